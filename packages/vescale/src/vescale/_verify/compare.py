"""Compare what ranks computed with what one device computed, within rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vescale_parallel import ParallelPlan

from .activations import Activations
from .placements import best_match
from .record import Record
from .report import Divergence
from .rounding import NOTHING, Expected, distance, is_rounding, largest


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What came of the comparison within rounding.

    Attributes:
        divergence: The first one.
        num_compared: Outputs of modules.
        not_compared: Modules whose outputs have shapes that nothing explains.
    """

    divergence: Divergence | None
    num_compared: int
    not_compared: tuple[str, ...]


def within_rounding(expected: Expected, ranks: Sequence[Record], plan: ParallelPlan) -> Rounding:
    """Find the first divergence of a plan from one device, in the order of computation."""
    activations = Activations(expected, ranks, plan)
    divergences = (
        divergence
        for step in range(len(expected.record.losses))
        for divergence in _of_step(expected, ranks, step, activations)
    )
    return Rounding(
        divergence=next((each for each in divergences if each is not None), None),
        num_compared=activations.num_compared,
        not_compared=tuple(activations.not_compared),
    )


def same_first_gradients(expected: Expected, other: Record) -> bool:
    """Whether another run of one device has its first loss and gradients, within rounding.

    That is rounding of the largest gradient for all of them: terms of others may cancel.
    """
    ones, found = expected.record.gradients[0], other.gradients[0]
    largest_one = _largest_of(ones)
    return (
        _numbers("loss", expected, [other], 0, lambda r: r.losses) is None
        and ones.keys() == found.keys()
        and all(
            distance(one, found[name])
            <= expected.bound(one, [r.gradients[0][name] for r in expected.perturbed], largest_one)
            for name, one in ones.items()
        )
    )


def _of_step(
    expected: Expected, ranks: Sequence[Record], step: int, activations: Activations
) -> Iterator[Divergence | None]:
    yield activations.first_divergence(step)
    yield _numbers("loss", expected, ranks, step, lambda r: r.losses)
    yield _tensors("gradient", expected, ranks, step, lambda r: r.gradients, backward=True)
    yield _numbers("norm of gradients", expected, ranks, step, lambda r: r.norms)
    known = [_without_noise(expected, record, step) for record in ranks]
    yield _tensors("parameter", expected, known, step, lambda r: r.parameters)
    yield _tensors("buffer", expected, ranks, step, lambda r: r.buffers)


def _without_noise(expected: Expected, rank: Record, step: int) -> Record:
    """Return a rank's record with one device's parameters where only noise decides on an update.

    An optimizer that divides by the size of gradients, as Adam does, makes as large a step of
    one that is nothing but rounding as of any other: of a bias of keys, say, which softmax does
    not see. Such an element may be off by what its tensor was updated by, in either direction.
    """
    one, parameters = expected.record, dict[str, Tensor]()
    for name, found in rank.parameters[step].items():
        own = one.parameters[step].get(name)
        if own is None or own.shape != found.shape or not own.is_floating_point():
            parameters[name] = found
            continue
        is_noise = torch.zeros_like(own, dtype=torch.bool)
        reach, before = 0.0, one.initial[name]
        for at in range(step + 1):
            gradient = one.gradients[at].get(name)
            if gradient is not None:
                others = [r.gradients[at][name] for r in expected.perturbed]
                least = _least(expected, gradient, _largest_of(one.gradients[at]))
                is_noise |= gradient.abs() <= expected.bound(gradient, others, least)
            reach += 2 * distance(one.parameters[at][name], before)
            before = one.parameters[at][name]
        may_differ = is_noise & ((found - own).abs() <= reach)
        parameters[name] = torch.where(may_differ, own, found)
    return replace(rank, parameters=[*rank.parameters[:step], parameters])


def _least(expected: Expected, gradient: Tensor, of_step: float) -> float:
    """Return by what a gradient is measured at least, given the largest one of its step.

    One that is no larger than rounding of the largest is nothing but rounding, in all of its
    elements: of a bias that softmax does not see. Terms that cancel are as large as any.
    """
    is_noise = is_rounding(largest(gradient), of_step, expected.epsilon)
    return of_step if is_noise else NOTHING * of_step


def _largest_of(tensors: Mapping[str, Tensor]) -> float:
    return max(map(largest, tensors.values()), default=0.0)


def _numbers(
    what: str,
    expected: Expected,
    ranks: Sequence[Record],
    step: int,
    of: Callable[[Record], Sequence[Tensor]],
) -> Divergence | None:
    if not of(expected.record):
        return None
    one = of(expected.record)[step]
    bound = expected.bound(one, [of(r)[step] for r in expected.perturbed])
    for rank, record in enumerate(ranks):
        found = of(record)[step]
        if not distance(one, found) <= bound:
            return _of_tensors(expected, what, "", step, rank, one, found, bound)
    return None


def _tensors(
    what: str,
    expected: Expected,
    ranks: Sequence[Record],
    step: int,
    of: Callable[[Record], Sequence[Mapping[str, Tensor]]],
    *,
    backward: bool = False,
) -> Divergence | None:
    ones, others = of(expected.record)[step], [of(r)[step] for r in expected.perturbed]
    largest_one = _largest_of(ones) if backward else 0.0
    for rank, record in enumerate(ranks):
        found = of(record)[step]
        if found.keys() != ones.keys():
            name = sorted(found.keys() ^ ones.keys())[0]
            note = "one device has none" if name in found else "the ranks have none"
            return Divergence(step=step, what=what, name=name, rank=rank, note=note)
    # The last parameter of forward is the first whose gradient is computed.
    for name in [*ones][::-1] if backward else ones:
        one = ones[name]
        least = _least(expected, one, largest_one)
        bound = expected.bound(one, [other[name] for other in others], least)
        for rank, record in enumerate(ranks):
            found = of(record)[step][name]
            if found.shape != one.shape or not distance(one, found) <= bound:
                return _of_tensors(expected, what, name, step, rank, one, found, bound)
    return None


def _of_tensors(
    expected: Expected,
    what: str,
    name: str,
    step: int,
    rank: int,
    one: Tensor,
    found: Tensor,
    bound: float,
) -> Divergence:
    if one.shape != found.shape:
        shapes = f"{tuple(found.shape)}, one device {tuple(one.shape)}"
        return Divergence(step=step, what=what, name=name, rank=rank, note=f"shape {shapes}")
    match = best_match(one, {(0, 0): found}, 0.0)
    assert match is not None
    return Divergence(
        step=step,
        what=what,
        name=name,
        rank=rank,
        index=match.index,
        found=match.found,
        expected=match.expected,
        error=match.error / expected.unit(one),
        threshold=bound / expected.unit(one),
    )
