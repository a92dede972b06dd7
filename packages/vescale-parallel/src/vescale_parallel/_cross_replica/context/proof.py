"""A model on slices of its sequence, compared with one device before it runs so.

Ranks are threads, with the very code that will run. On random weights in float64 what the model
returns and every gradient must agree with one device's; what mixes positions in a block otherwise
than by attention, as convolutions and recurrences do, does not, and is named.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.copies import discard
from vescale_parallel._model.random_copies import InDouble, random_copy, sharing_copy
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import untouched_generators
from vescale_parallel._verify.compared_runs import Given, Results, close, run_once
from vescale_parallel._verify.freed_memory import give_memory_back
from vescale_parallel._verify.region import Region
from vescale_parallel._verify.threads import run_in_threads
from vescale_parallel._verify.whole_model import whole_region

from .blocks import ShortSequenceError, SlicedBlocks, Slicing, name_of
from .slices import ContextThreads, Method, SequenceSlices
from .watch import ForwardWatch, noted_outputs

Notes = dict[str, Tensor]


class NotSlicedError(ValueError):
    """A model computes something else on slices, or cannot be compared."""


def proven_slicing(
    model: nn.Module,
    named: Mapping[str, Any],
    size: int,
    *,
    training: bool,
    method: Method = "all_to_all",
) -> Slicing:
    """Return which blocks give one device's numbers on slices of a sequence, and of what.

    Args:
        model: Whole, perhaps without values.
        named: The arguments of a call.
        size: How many ranks share a sequence.
        training: The mode to run in.
        method: How ranks attend.

    Raises:
        NotSlicedError: Saying which module computes something else.
        ShortSequenceError: If there is too little of the sequence to tell.
    """
    with untouched_generators(seed=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = whole_region(model, named, {})
        base = random_copy(model).train(training)
        stacks, modules = _attending_stacks(region, base)
        whole = sharing_copy(base)
        seen = noted_outputs(whole)
        outputs = run_once(whole, Given([*region.inputs], region.spec, [])).outputs
        cotangents = [torch.randn_like(x) for x in outputs]
        seen.clear()
        expected = run_once(whole, Given([*region.inputs], region.spec, cotangents))
        discard(whole)
        slicing = Slicing(stacks, modules)
        make = functools.partial(SlicedBlocks, method=method)
        runs, notes, slices = _on_ranks(region, base, size, slicing, cotangents, make)
        discard(base)
    _compare(expected, runs, _first_difference(seen, notes, slices, stacks))
    del expected, runs, seen, notes
    give_memory_back()
    return slicing


def _attending_stacks(region: Region, base: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Return the stacks in which all blocks attend, and the modules in these that do.

    Raises:
        NotSlicedError: If there are none, or they draw random numbers.
    """
    watch = ForwardWatch()
    inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in region.inputs]
    args, kwargs = pytree.tree_unflatten(inputs, region.spec)
    watched = sharing_copy(base)
    try:
        with InDouble():
            watch.run(watched, args, kwargs)
    # Arbitrary user code: whatever it raises means that it cannot be compared.
    except Exception as error:
        raise NotSlicedError(
            f"it cannot be compared with one device: {type(error).__name__}: {error}"
        ) from error
    found = [stack for stack in block_stacks(base) if {*stack} <= watch.attending]
    if not found:
        raise NotSlicedError(
            "found no list of two or more blocks that all call F.scaled_dot_product_attention or "
            "transformers' attention interface, by which a rank attends to all of the sequence"
        )
    stacks = frozenset(map(name_of, found))
    drawing = [at for stack, at in watch.drawing.items() if stack in stacks]
    if drawing:
        raise NotSlicedError(
            f"{drawing[0]!r} draws random numbers, of which one device would draw others than "
            "ranks on their slices; set dropout to 0 in blocks (of attention, too); before and "
            "behind them dropout is one device's"
        )
    inside = tuple(f"{stack}." for stack in stacks)
    return stacks, frozenset(fqn for fqn in watch.modules if fqn.startswith(inside))


def _on_ranks(
    region: Region,
    base: nn.Module,
    size: int,
    slicing: Slicing,
    cotangents: list[Tensor],
    make: Callable[[ContextThreads], SlicedBlocks],
) -> tuple[list[Results], list[Notes], SequenceSlices]:
    """Run a model on all ranks; return also what its modules returned, and the slices."""
    found: list[SequenceSlices] = []

    def on_rank(rank: int, threads: ThreadExchange) -> tuple[Results, Notes]:
        local = sharing_copy(base)
        blocks = make(ContextThreads(threads, rank))
        blocks.install(local, block_stacks(local))
        blocks.slice_as(slicing)
        blocks.runs_short_ones = False
        notes = noted_outputs(local)
        result = run_once(local, Given([*region.inputs], region.spec, cotangents))
        found.append(blocks.slices)
        discard(local)
        return result, notes

    try:
        both = run_in_threads(size, on_rank)
    except ShortSequenceError:
        raise
    except Exception as error:
        raise NotSlicedError(f"on slices it raises {type(error).__name__}: {error}") from error
    return [result for result, _ in both], [notes for _, notes in both], found[0]


def _compare(expected: Results, runs: Sequence[Results], culprit: str | None) -> None:
    where = "the model" if culprit is None else repr(culprit)
    for run in runs:
        pairs = zip(run.tensors, expected.tensors, strict=False)
        if run.floats != expected.floats or not all(_same(x, whole) for x, whole in pairs):
            raise NotSlicedError(f"{where} returns something else where it is given slices")
    for name, whole in expected.grads.items():
        found = [run.grads[name] for run in runs]
        given = [x for x in found if x is not None]
        zero = torch.zeros_like(given[0]) if given else None
        mean = None if zero is None else sum(given, zero) / len(runs)
        if not _same_gradient(mean, whole):
            raise NotSlicedError(f"the gradient of {name!r} differs where it is given slices")


def _same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return close(found, expected, expected)


def _same_gradient(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        given = found if expected is None else expected
        return given is None or not bool(given.any())
    return close(found, expected, expected)


def _first_difference(
    seen: Notes, notes: Sequence[Notes], slices: SequenceSlices, stacks: frozenset[str]
) -> str | None:
    """Return the first module in blocks, as they end, whose slices are not those of the whole."""
    inside = tuple(f"{stack}." for stack in stacks)
    for fqn, whole in seen.items():
        if not fqn.startswith(inside) or whole.dim() < 2 or whole.shape[1] != slices.length:
            continue
        parts = [slices.part(whole, 1, rank) for rank in range(len(notes))]
        if any(
            fqn in each and each[fqn].shape == part.shape and not close(each[fqn], part, whole)
            for each, part in zip(notes, parts, strict=True)
        ):
            return fqn
    return None
