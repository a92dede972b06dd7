"""A model on slices of its sequence, compared with one device before it runs so.

Ranks are threads, with the very code that will run. On random weights in float64 what the model
returns and every gradient must agree with one device's; what mixes positions in a block otherwise
than by attention, as convolutions and recurrences do, does not, and is named.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import package_logger
from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.copies import discard, snapshot
from vescale_parallel._model.random_copies import InDouble, random_copy, sharing_copy
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import (
    States,
    set_generators,
    states_of_generators,
    untouched_generators,
)
from vescale_parallel._verify.compared_runs import Given, Results, close, largest_of, run_once
from vescale_parallel._verify.freed_memory import give_memory_back
from vescale_parallel._verify.region import Region
from vescale_parallel._verify.threads import run_in_threads
from vescale_parallel._verify.whole_model import whole_region

from .behind import Behind
from .blocks import ShortSequenceError, SlicedBlocks, Slicing, name_of
from .draws import DrawKey, DrawsSlices, WholeDraw
from .find_written import Held, State, Writes, begin_with, first_other, state_of
from .leaving import Leaving
from .slices import ContextThreads, Method, SequenceSlices
from .watch import ForwardWatch, module_that_raised, noted_outputs
from .written import Combination, Place

_log = package_logger("vescale.parallel")

Notes = dict[str, Tensor]
DrawsBy = Callable[[SlicedBlocks], DrawsSlices]


class NotSlicedError(ValueError):
    """A model computes something else on slices, or cannot be compared.

    Attributes:
        raised: What its code raised, to be said after what to do about it.
    """

    def __init__(self, why: str, raised: str = "") -> None:
        super().__init__(why)
        self.raised = raised


def proven_slicing(
    model: nn.Module,
    named: Mapping[str, Any],
    size: int,
    *,
    draws_by: DrawsBy,
    training: bool,
    method: Method = "all_to_all",
    behind: bool = True,
) -> Slicing:
    """Return which blocks give one device's numbers on slices of a sequence, and of what.

    Args:
        model: Whole, perhaps without values.
        named: The arguments of a call.
        size: How many ranks share a sequence.
        draws_by: Makes what has the modules of a rank draw its part.
        training: The mode to run in.
        method: How ranks attend.
        behind: Whether what is behind the blocks may run on slices.

    Raises:
        NotSlicedError: Saying which module computes something else.
        ShortSequenceError: If there is too little of the sequence to tell.
    """
    with untouched_generators(seed=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = whole_region(model, named, {})
        base = random_copy(model).train(training)
        slicing = _attending_stacks(region, base)
        make = functools.partial(SlicedBlocks, method=method)
        found = _compared(region, base, slicing, size, make, draws_by, behind=behind)
        discard(base)
    give_memory_back()
    return found


def _compared(
    region: Region,
    base: nn.Module,
    slicing: Slicing,
    size: int,
    make: Callable[[ContextThreads], SlicedBlocks],
    draws_by: DrawsBy,
    *,
    behind: bool,
) -> Slicing:
    given, begin = Given([*region.inputs], region.spec, []), states_of_generators()
    run = functools.partial(run_once, with_chance=bool(slicing.draws))

    def on_ranks(
        given: Given, tried: Slicing, state: State | None = None
    ) -> tuple[list[_Ran], SequenceSlices]:
        set_generators(begin)
        how = size, tried, make, draws_by, writes.once
        return _on_ranks(given, base, *how, begin=state or {})

    def combinations() -> dict[Place, Combination]:
        set_generators(begin)
        begin_with(whole, writes.multiples)
        try:
            run(whole, given)
            apart, slices = on_ranks(given, replace(slicing, behind=Behind()), writes.multiples)
        # Arbitrary user code, of numbers that it did not write: what it writes is refused below.
        except Exception:
            return {}
        return writes.combinations(whole, [each.state for each in apart], slices, slicing.stacks)

    whole = sharing_copy(base)
    writes = Writes(whole)
    outputs = run(whole, given).outputs
    writes.note(whole)
    if writes.once:
        slicing = replace(slicing, written=combinations())
    discard(whole)
    whole, given = sharing_copy(base), replace(given, cotangents=[*map(torch.randn_like, outputs)])
    seen = noted_outputs(whole)
    set_generators(begin)
    reference = _Ran(run(whole, given), seen, states_of_generators(), writes.once)
    discard(whole)

    def is_worth_it(tried: Slicing) -> bool:
        ranks = on_ranks(given, tried)
        _check_runs(reference, tried, *ranks)
        return not any(each.gathered_large for each in ranks[0])

    found = _proven_behind(slicing, is_worth_it) if behind else None
    if found is None:
        found = replace(slicing, behind=Behind())
        is_worth_it(found)
    return found


def _proven_behind(slicing: Slicing, is_worth_it: Callable[[Slicing], bool]) -> Slicing | None:
    """Return what runs on slices behind the blocks, too, if that is one device's.

    None if it is not, as of a head that mixes positions, and if code there gathers what is larger
    than what left the blocks.
    """
    if slicing.behind.stack is None:
        return None
    try:
        if is_worth_it(slicing):
            return slicing
        why = "its code needs whole tensors there"
    except ShortSequenceError:
        raise
    except NotSlicedError as error:
        why = str(error)
    _log.info("what is behind %s runs on whole sequences: %s", slicing.behind.stack, why)
    return None


def _check_runs(
    reference: _Ran, slicing: Slicing, runs: Sequence[_Ran], slices: SequenceSlices
) -> None:
    """Refuse what ranks returned, or drew, if it is not one device's."""
    notes, end = [each.notes for each in runs], reference.end.torch
    culprit = _first_difference(reference.notes, notes, slices, slicing.stacks)
    _compare(reference.results, [each.results for each in runs], culprit)
    others = (first_other(reference.state, each.state, slicing.stacks) for each in runs)
    if (other := next(filter(None, others), None)) is not None:
        raise NotSlicedError(
            f"{other[0] or 'the model'!r} keeps {other[1]!r}, which is of all positions on one "
            "device, and is neither a sum nor a mean over them, nor one value of each"
        )
    if slicing.draws and any(not torch.equal(each.end.torch, end) for each in runs):
        raise NotSlicedError(
            f"{min(slicing.drawing)!r}, or another module, draws fewer or more random numbers "
            "where it is given slices"
        )


def _attending_stacks(region: Region, base: nn.Module) -> Slicing:
    """Return the stacks in which all blocks attend, the modules that do, and what is drawn.

    Raises:
        NotSlicedError: If there are none, or of a draw that cannot be told from another one.
    """
    watch = ForwardWatch()
    inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in region.inputs]
    args, kwargs = snapshot(pytree.tree_unflatten(inputs, region.spec))
    watched = sharing_copy(base)
    try:
        with InDouble():
            watch.run(watched, args, kwargs)
    # Arbitrary user code: whatever it raises means that it cannot be compared.
    except Exception as error:
        raise NotSlicedError(
            f"it cannot be compared with one device: {type(error).__name__}: {error}"
        ) from error
    finally:
        discard(watched)
    found = [stack for stack in block_stacks(base) if {*stack} <= watch.attending]
    if not found:
        raise NotSlicedError(
            "found no list of two or more blocks that all call F.scaled_dot_product_attention or "
            "transformers' attention interface, by which a rank attends to all of the sequence"
        )
    stacks = frozenset(map(name_of, found))
    inside = tuple(f"{stack}." for stack in stacks)
    attending = frozenset(fqn for fqn in watch.modules if fqn.startswith(inside))
    once = {fqn: next(iter(at)) for fqn, at in watch.in_attention.items() if len(at) == 1}
    leaving, behind = Leaving(watch.returned), watch.behind.behind()
    behind = behind if behind.stack in stacks else Behind()
    return Slicing(stacks, attending, _draws(watch, stacks), once, leaving=leaving, behind=behind)


def _draws(watch: ForwardWatch, stacks: frozenset[str]) -> dict[DrawKey, WholeDraw]:
    draws: dict[DrawKey, WholeDraw] = {}
    for stack in sorted(stacks & {*watch.draws}):
        for key, whole in watch.draws[stack].items():
            if whole is None:
                raise NotSlicedError(
                    f"{key[0]!r} draws random numbers of several shapes in one call of the model, "
                    "of which it cannot be told what ranks have"
                )
            draws[key] = whole
    return draws


@dataclass(frozen=True)
class _Ran:
    """What a rank returned, what its modules did and keep, and where its generators are then.

    And whether code behind the blocks gathered what is larger than what left them.
    """

    results: Results
    notes: Notes
    end: States
    state: State
    gathered_large: bool = False


def _on_ranks(
    given: Given,
    base: nn.Module,
    size: int,
    slicing: Slicing,
    make: Callable[[ContextThreads], SlicedBlocks],
    draws_by: DrawsBy,
    written: Collection[Held],
    *,
    begin: State,
) -> tuple[list[_Ran], SequenceSlices]:
    """Run a model on all ranks, from what another run wrote; return also the slices."""
    found: list[SequenceSlices] = []

    def on_rank(rank: int, threads: ThreadExchange) -> _Ran:
        local = sharing_copy(base)
        begin_with(local, begin)
        blocks = make(ContextThreads(threads, rank))
        blocks.install(local, block_stacks(local))
        blocks.slice_as(slicing)
        blocks.runs_short_ones = False
        blocks.behind.finish_calls(local)
        notes = noted_outputs(local)
        if slicing.draws:
            draws_by(blocks).install(local)
        try:
            result = run_once(local, given, with_chance=bool(slicing.draws))
        # Arbitrary user code: whatever it raises means that it does not run on slices.
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            if isinstance(error, ShortSequenceError) or "context_parallel" in raised:
                raise  # it says what to do
            where = module_that_raised(error, local)
            raise NotSlicedError(f"{where!r} does not run on slices", raised) from error
        found.append(blocks.slices)
        state = state_of(local, written)
        discard(local)
        return _Ran(result, notes, states_of_generators(), state, blocks.behind.gathered_large)

    try:
        runs = run_in_threads(size, on_rank, draw_alike=True)
    except (ShortSequenceError, NotSlicedError):
        raise
    except Exception as error:
        raise NotSlicedError(f"on slices it raises {type(error).__name__}: {error}") from error
    return runs, found[0]


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
    return close(found, expected, largest_of(expected))


def _same_gradient(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        given = found if expected is None else expected
        return given is None or not bool(given.any())
    return close(found, expected, largest_of(expected))


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
            fqn in each
            and each[fqn].shape == part.shape
            and not close(each[fqn], part, largest_of(whole))
            for each, part in zip(notes, parts, strict=True)
        ):
            return fqn
    return None
