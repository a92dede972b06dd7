"""A model on slices of its sequence, compared with one device before it runs so.

Ranks are threads, with the very code that will run. On random weights in float64 what the model
returns and every gradient must agree with one device's; what mixes positions in a block otherwise
than by attention, as convolutions and recurrences do, does not, and is named.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import package_logger
from vescale_parallel._model.blocks import alike_parameters, sequence_stacks
from vescale_parallel._model.copies import discard
from vescale_parallel._model.random_copies import random_copy, sharing_copy
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._trace.generators import (
    States,
    set_generators,
    states_of_generators,
    untouched_generators,
)
from vescale_parallel._verify.calls.flags import set_flags
from vescale_parallel._verify.compared_results import close, largest_of, other_number, other_tensor
from vescale_parallel._verify.compared_runs import Listener, run_once
from vescale_parallel._verify.freed_memory import give_memory_back
from vescale_parallel._verify.region import Given, Region, Results
from vescale_parallel._verify.scaled_down_model import is_large
from vescale_parallel._verify.threads import run_in_threads
from vescale_parallel._verify.whole_model import whole_region

from .attending import Attending, NotSlicedError
from .behind import Behind
from .blocks import SlicedBlocks
from .draws import DrawsSlices
from .find_written import Held, State, Writes, begin_with, first_other, state_of
from .sliced.tensor import WholeError
from .slices import ContextThreads, Method, SequenceSlices
from .slicing import ShortSequenceError, Slicing
from .watch import module_that_raised, noted_outputs
from .written import Combination, Place

_MOST_TRIES = 8  # each shows modules of one kind, of which blocks have few
_log = package_logger("vescale.parallel")

Notes = dict[str, Tensor]
DrawsBy = Callable[[SlicedBlocks], DrawsSlices]


def proven_slicing(
    model: nn.Module,
    named: Mapping[str, Any],
    size: int,
    *,
    draws_by: DrawsBy,
    training: bool | None = None,
    method: Method = "all_to_all",
    behind: bool = True,
) -> Slicing:
    """Return which blocks give one device's numbers on slices of a sequence, and of what.

    Args:
        model: Whole, perhaps without values.
        named: The arguments of a call.
        size: How many ranks share a sequence.
        draws_by: Makes what has the modules of a rank draw its part.
        training: The mode to run in; None for those that its modules are in.
        method: How ranks attend.
        behind: Whether what is behind the blocks may run on slices.

    Raises:
        NotSlicedError: Saying which module computes something else.
        ShortSequenceError: If there is too little of the sequence to tell.
    """
    with untouched_generators(seed=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = whole_region(model, named, {})
        alike = alike_parameters(model) if is_large(model) else None
        base = random_copy(model, alike=alike)
        set_flags(base, model)  # which a random copy evaluates
        if training is not None:
            base.train(training)
        attending = Attending.of(region, base)
        make = functools.partial(SlicedBlocks, method=method)

        def compared(slicing: Slicing) -> Slicing:
            return _compared(region, base, slicing, size, make, draws_by, behind=behind)

        found = _first_proven(compared, attending, attending.slicing(), _MOST_TRIES)
        discard(base)
    give_memory_back()
    return found


def _first_proven(
    compared: Callable[[Slicing], Slicing], attending: Attending, slicing: Slicing, num_tries: int
) -> Slicing:
    """Return the first slicing that is one device's, of those that there are to try."""
    try:
        return compared(slicing)
    except NotSlicedError as error:
        more = attending.otherwise(error, slicing) if num_tries else None
        if more is None:
            raise
        try:
            return _first_proven(compared, attending, more, num_tries - 1)
        except NotSlicedError as later:
            # Of the code as it is, not of what was tried, if that says nothing to do.
            says_more = "use context_parallel" in str(later)
            raise (later if says_more else error) from None


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
        return run_on_ranks(given, base, *how, begin=state or {})

    def combinations() -> dict[Place, Combination]:
        set_generators(begin)
        again = sharing_copy(base)  # as ranks have it, without numbers and flags of the first run
        begin_with(again, writes.multiples)
        try:
            run(again, given)
            apart, slices = on_ranks(given, replace(slicing, behind=Behind()), writes.multiples)
        # Arbitrary user code, of numbers that it did not write: what it writes is refused below.
        except Exception:
            discard(again)
            return {}
        apart = [each.state for each in apart]
        found = writes.combinations(again, apart, slices, slicing.stacks)
        discard(again)
        return found

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
        runs, _ = on_ranks(given, tried)
        _check_runs(reference, tried, runs)
        return not any(each.gathered_large for each in runs)

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


def _check_runs(reference: _Ran, slicing: Slicing, runs: Sequence[_Ran]) -> None:
    """Refuse what ranks returned, or drew, if it is not one device's."""
    notes, end = [each.notes for each in runs], reference.end.torch
    culprit = _first_difference(reference.notes, notes, runs[0].slices)
    _compare(reference.results, [each.results for each in runs], culprit)
    _check_side_effects(reference.results, [each.results for each in runs])
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


@dataclass(frozen=True)
class _Ran:
    """What a rank returned, what its modules did and keep, and where its generators are then.

    Attributes:
        gathered_large: Whether code behind the blocks gathered what is larger than what left them.
        slices: Of the sequence of each stack.
    """

    results: Results
    notes: Notes
    end: States
    state: State
    gathered_large: bool = False
    slices: Mapping[str, SequenceSlices] = field(default_factory=dict[str, SequenceSlices])


def run_on_ranks(
    given: Given,
    base: nn.Module,
    size: int,
    slicing: Slicing,
    make: Callable[[ContextThreads], SlicedBlocks],
    draws_by: DrawsBy,
    written: Collection[Held],
    *,
    begin: State,
    listeners: Sequence[Listener] = (),
) -> tuple[list[_Ran], SequenceSlices]:
    """Run a model on all ranks, from what another run wrote; return also the slices."""
    found: list[SequenceSlices] = []

    def on_rank(rank: int, threads: ThreadExchange) -> _Ran:
        local = sharing_copy(base)
        begin_with(local, begin)
        for listener in listeners[rank : rank + 1]:
            listener.listen(local)
        blocks = make(ContextThreads(threads, rank))
        blocks.install(local, sequence_stacks(local))
        blocks.slice_as(slicing)
        blocks.is_compared = True
        blocks.behind.finish_calls(local)
        notes = noted_outputs(local)
        if slicing.draws:
            draws_by(blocks).install(local)
        for listener in listeners[rank : rank + 1]:
            listener.listen_behind(local)
        try:
            result = run_once(local, given, with_chance=bool(slicing.draws))
        # Arbitrary user code: whatever it raises means that it does not run on slices.
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            if isinstance(error, ShortSequenceError):
                raise
            where = module_that_raised(error, local)
            if isinstance(error, WholeError):
                why = f"in {where!r} {error.why}"
                raise NotSlicedError(why, where=where, is_whole=True) from error
            if "context_parallel" in raised:  # it says what to do
                raise NotSlicedError(f"on slices it raises {raised}", where=where) from error
            why = f"{where!r} does not run on slices"
            raise NotSlicedError(why, raised, where) from error
        found.append(blocks.slices)
        state = state_of(local, written)
        discard(local)
        large, slices = blocks.behind.gathered_large, blocks.slices_of
        return _Ran(result, notes, states_of_generators(), state, large, slices)

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
            why = f"{where} returns something else where it is given slices"
            raise NotSlicedError(why, where=culprit or "")
    for name, whole in expected.grads.items():
        found = [run.grads[name] for run in runs]
        given = [x for x in found if x is not None]
        zero = torch.zeros_like(given[0]) if given else None
        mean = None if zero is None else sum(given, zero) / len(runs)
        if whole is not None and not bool(whole.isfinite().all()):
            raise NotSlicedError(
                f"the gradient of {name!r} is not finite on one device, on random weights and the "
                "first rows and positions of this batch; begin with a batch that is"
            )
        if not _same_gradient(mean, whole):
            raise NotSlicedError(f"the gradient of {name!r} differs where it is given slices")


def _check_side_effects(expected: Results, runs: Sequence[Results]) -> None:
    for run in runs:
        read = other_number(expected.side_effects, run.side_effects)
        if read is not None:
            why = f"{read} reads a number, which is another one of a slice"
            raise NotSlicedError(why, where=read.fqn)
        other = other_tensor(expected.side_effects, run.side_effects)
        if other is not None:
            why = f"{other.fqn!r} puts into {other.into!r} what is of a slice"
            raise NotSlicedError(why, where=other.fqn)


def _same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return _close_where_finite(found, expected, expected)


def _close_where_finite(found: Tensor, expected: Tensor, whole: Tensor) -> bool:
    """Compare numbers, of which those of padding may be none: a row that attends to nothing."""
    numbers, is_number = expected.isfinite(), found.isfinite()
    if found.shape != expected.shape or not torch.equal(numbers, is_number):
        return False
    return close(found[numbers], expected[numbers], largest_of(whole))


def _same_gradient(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        given = found if expected is None else expected
        return given is None or not bool(given.any())
    return close(found, expected, largest_of(expected))


def _first_difference(
    seen: Notes, notes: Sequence[Notes], of_stacks: Mapping[str, SequenceSlices]
) -> str | None:
    """Return the first module in blocks, as they end, whose slices are not those of the whole."""
    for fqn, whole in seen.items():
        inside = (
            slices for stack, slices in of_stacks.items() if f"{fqn}.".startswith(f"{stack}.")
        )
        slices = next(inside, None)
        if slices is None or whole.dim() < 2 or whole.shape[1] != slices.length:
            continue
        parts = [slices.part(whole, 1, rank) for rank in range(len(notes))]
        if any(
            fqn in each
            and each[fqn].shape == part.shape
            and not _close_where_finite(each[fqn], part, whole)
            for each, part in zip(notes, parts, strict=True)
        ):
            return fqn
    return None
