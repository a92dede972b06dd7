"""Compare the bits of runs: initial values, random numbers, repetitions, micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from .placements import best_match
from .record import Record
from .report import Divergence, Level, LevelResult
from .rounding import largest


def same_initial(expected: Record, ranks: Sequence[Record]) -> LevelResult:
    """N0: compare parameters and buffers before the first step."""
    for rank, record in enumerate(ranks):
        for _, divergence in _bits("initial value", None, expected.initial, record.initial):
            if divergence:
                first = dataclasses.replace(divergence, rank=rank)
                return LevelResult(level="N0", status="failed", divergence=first)
    return LevelResult(level="N0", status="passed", text=f"{len(expected.initial)} tensors")


def same_draws(expected: Record, ranks: Sequence[Record]) -> LevelResult:
    """N1: compare where the random generator is after every step."""
    for step, state in enumerate(expected.generators[1:]):
        for rank, record in enumerate(ranks):
            if not torch.equal(state, record.generators[step + 1]):
                note = "the CPU's generator is in another state than one device's after the step"
                return LevelResult(
                    level="N1",
                    status="failed",
                    divergence=Divergence(
                        step=step, what="generator", name="torch", rank=rank, note=note
                    ),
                )
    return LevelResult(level="N1", status="passed", text="state of the generator")


def same_again(runs: Sequence[tuple[str, Sequence[Record], Sequence[Record]]]) -> LevelResult:
    """N2: compare the bits of the same plan run again, in one process or in many."""
    for what, first, second in runs:
        for rank, (one, other) in enumerate(zip(first, second, strict=True)):
            divergence = _first_of_run(one, other, rank, what)
            if divergence is not None:
                return LevelResult(level="N2", status="failed", divergence=divergence)
    return LevelResult(level="N2", status="passed", text=", ".join(run[0] for run in runs))


def same_micro_batches(
    level: Level, reference: Record, ranks: Sequence[Record], rounded: Sequence[str], text: str
) -> LevelResult:
    """N3, N5: compare the bits of gradients and parameters with one device's, shard after shard.

    Args:
        level: For which the reference was made.
        reference: One device's run.
        ranks: Those of the ranks.
        rounded: Names of parameters whose bits are not promised.
        text: What to say about them.
    """
    for step in range(len(reference.losses)):
        if divergence := _other_bits("gradient", step, reference, ranks, without=rounded):
            return LevelResult(level=level, status="failed", divergence=divergence)
        if rounded:  # what is computed of a number without promised bits has none either
            break
        if not _same_norms(step, reference, ranks):
            text = f"gradients up to step {step}, whose norm is added up over shards and rounded"
            break
        if divergence := _other_bits("parameter", step, reference, ranks):
            return LevelResult(level=level, status="failed", divergence=divergence)
    return LevelResult(level=level, status="passed", text=text)


def _other_bits(
    what: Literal["gradient", "parameter"],
    step: int,
    reference: Record,
    ranks: Sequence[Record],
    without: Sequence[str] = (),
) -> Divergence | None:
    def of(record: Record) -> Mapping[str, Tensor]:
        return (record.gradients if what == "gradient" else record.parameters)[step]

    for rank, record in enumerate(ranks):
        for name, divergence in _bits(what, step, of(reference), of(record)):
            if divergence and name not in without:
                return dataclasses.replace(divergence, rank=rank)
    return None


def _same_norms(step: int, reference: Record, ranks: Sequence[Record]) -> bool:
    if not reference.norms:  # gradients are not clipped
        return True
    return all(same_bits(reference.norms[step], record.norms[step]) for record in ranks)


def _bits(
    what: str, step: int | None, ones: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> Iterator[tuple[str, Divergence | None]]:
    for name, one in ones.items():
        if name not in others:
            yield name, Divergence(step=step, what=what, name=name, note="the ranks lack it")
        elif not same_bits(one, others[name]):
            match = best_match(one, {(0, 0): others[name]}, 0.0)
            yield (
                name,
                (
                    Divergence(step=step, what=what, name=name, note="has another shape")
                    if match is None
                    else Divergence(
                        step=step,
                        what=what,
                        name=name,
                        index=match.index,
                        found=match.found,
                        expected=match.expected,
                        error=match.error / (torch.finfo(one.dtype).eps * (largest(one) or 1.0))
                        if one.is_floating_point()
                        else match.error,
                    )
                ),
            )


def _first_of_run(one: Record, other: Record, rank: int, what: str) -> Divergence | None:
    for key, tensors in one.activations.items():
        for x, y in zip(tensors, other.activations.get(key, ()), strict=False):
            if not same_bits(x, y):
                return Divergence(
                    step=key.step, what="activation", name=key.module, rank=rank, note=what
                )
    for step in range(len(one.losses)):
        for kind, x, y in (
            ("loss", {"": one.losses[step]}, {"": other.losses[step]}),
            ("gradient", one.gradients[step], other.gradients[step]),
            ("parameter", one.parameters[step], other.parameters[step]),
        ):
            for name in x:
                if name not in y or not same_bits(x[name], y[name]):
                    return Divergence(step=step, what=kind, name=name, rank=rank, note=what)
    return None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
