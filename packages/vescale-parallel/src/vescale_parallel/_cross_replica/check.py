"""Find the modules in which rows depend on each other, by runs on all rows and on parts.

A data-parallel rank sees a part of the batch's rows. That gives one device's numbers wherever
each row is treated alone, and for means over rows that are averaged over ranks. It does not
where rows depend on each other: batch statistics, contrast within a batch, auxiliary losses over
all tokens, sums
and masked means. Nothing about operators is assumed: a module is run on random weights in float64,
on a few rows and on each half of them. What it returns for half of the rows must be half of what
it returns for all, and a loss must be put together from means that are known to average.

Where that fails the module's own code is told apart from that of the modules it calls: these are
given, and made to return, their part of what they had for all rows. So what is found is small: a
normalization, a router's loss, the loss of the model.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.random_copies import scaled_copy, sharing_copy
from vescale_parallel._verify.compared_results import other_decision

from .added.added_buffers import added_buffers
from .borders import RowCoupling, structure
from .dims.bounds import GivenBounds
from .found import NO_BOUNDS, Found, Given
from .gradients_of_parts import GradientsDifferError, compare_gradients, is_flat
from .hooks.hooked import hooked_modules
from .kept import Place, absolute, dependent, differs, set_kept, with_rows, worth_a_warning
from .parts import NUM_PARTS, NUM_ROWS, equal, is_part, same_value
from .results.means import is_number
from .results.ranked_rows import picks_rows
from .runs import (
    Call,
    OtherCallsError,
    RowCheckError,
    Run,
    Script,
    fold_row_lists,
    run_module,
    seeded,
)


class CannotRunError(RowCheckError):
    """A model cannot be run on some rows of its batch."""


class UnclearRowsError(RowCheckError):
    """More than one dim may be the rows, and it makes a difference."""


Callers = Callable[[Collection[str]], dict[str, str]]
# What weights are multiplied with where a loss is one number for any rows: within a margin then.
_SMALLER = (0.1, 0.01)


def row_coupling(
    model: nn.Module,
    whole: Given,
    halves: Sequence[Given],
    *,
    num_rows: int = NUM_ROWS,
    losses_only: bool = False,
    bounds: GivenBounds = NO_BOUNDS,
    in_lists: bool = False,
    blocks: frozenset[str] | None = None,
    callers: Callers = lambda regions: {},
) -> RowCoupling:
    """Return where rows depend on each other in a call of a model.

    The model is on the CPU, with values in float64; ``whole`` has ``num_rows`` rows. With
    ``losses_only``, numbers that have no gradient do not matter. ``bounds`` are those of rows,
    which the batches are given. With ``in_lists`` rows are elements of lists, of which a loss need
    not be put together from known means; whether it is one is left to look at rows of other sizes.
    ``callers`` returns what has to be a region if others are; see [Note: as many rows as there
    are].

    Raises:
        CannotRunError: If the model cannot be run.
        GradientsDifferError: If its gradients differ though its results do not.
    """
    about: Callable[..., Found] = functools.partial(
        Found, losses_only, num_rows, bounds, in_lists=in_lists, blocks=blocks or frozenset()
    )
    found = _found(model, whole, halves, about())
    found.regions = {**callers(found.regions), **found.regions}
    coupling = found.coupling(whole, halves)
    divides = blocks is not None and bool(found.regions) and found.divides
    if not (found.may_add or divides):
        return coupling
    try:
        again = about(added=found.may_add, counts_ratios=divides)
        apart = _found(model, whole, halves, again)
    except GradientsDifferError:  # then it does not help that they are counted
        apart = _found(model, whole, halves, about(added=found.may_add))
    return replace(coupling, apart=apart.coupling(whole, halves))


def _found(model: nn.Module, whole: Given, halves: Sequence[Given], found: Found) -> Found:
    with warnings.catch_warnings(), seeded():
        warnings.simplefilter("ignore")
        calls = Call(*whole), [Call(*half) for half in halves]
        found.hooked = hooked_modules(model)
        _examine(model, "", *calls, found, is_model=True)
        for factor in _SMALLER:
            if not found.is_flat or found.regions:
                break
            found.is_flat = False
            _examine(scaled_copy(model, factor), "", *calls, found, is_model=True)
    found.absorb_hooked()
    return found


def _examine(
    module: nn.Module,
    fqn: str,
    call: Call,
    halves: Sequence[Call],
    found: Found,
    *,
    is_model: bool = False,
) -> None:
    """Note the regions in a module, and where the rows are in this call of it."""
    if is_model:
        whole = _first_run(module, call, found)
    else:
        whole = _run(module, fqn, call, None, found)
    if whole.error is not None:
        raise CannotRunError(f"{fqn or 'the model'}: {whole.error}")
    parts = [_run(module, fqn, half, whole, found) for half in halves]
    fold_row_lists(whole, parts)
    found.add(fqn, whole.call, [run.call for run in parts])
    if is_model:
        _look_at_kept(module, call, whole, parts, found)
    why = _difference(whole, parts, found, fqn)
    if why is None:
        if is_model:
            compare_gradients(whole, parts, found.num_rows)
            found.is_flat = is_flat(whole, parts)
        elif any(fqn in each.between() for each in found.hooked):
            _examine_inside(module, fqn, whole, halves, found)  # where rows are, if it is absorbed
        return
    if is_model and not found.added:
        found.may_add = added_buffers(module, call, whole, parts, found.written)
    known = len(found.regions)
    own = _examine_inside(module, fqn, whole, halves, found)
    if own is not None or len(found.regions) == known:
        found.regions[fqn] = own or why
        _absorb_keepers(fqn, whole, parts, found)


def _first_run(model: nn.Module, call: Call, found: Found) -> Run:
    """Run a model on all rows; learn which parameters it writes to."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    whole = _run(model, "", call, None, found)
    found.divides, found.ratios = whole.means.may_divide_by_sums(), whole.are_counted
    written = [name for name, p in whole.parameters.items() if not torch.equal(p, before[name])]
    found.written = {name: before[name] for name in written}
    if not written:
        return whole
    for name, parameter in model.named_parameters():
        if name in found.written:
            parameter.data.copy_(before[name])
    return _run(model, "", call, None, found)


def _run(
    module: nn.Module,
    fqn: str,
    call: Call,
    whole: Run | None,
    found: Found,
    script: Script | None = None,
) -> Run:
    """Run a module on all rows, or, if it is given the run that did, on a part of them."""
    counts, num_parts = ([], NUM_PARTS) if whole is None else (whole.counts, 1)
    ratios = found.ratios_in(fqn, None if whole is None else whole.are_counted)
    known: dict[str, Any] = {"ratios": ratios, "blocks": found.blocks, "written": found.written}
    return run_module(module, fqn, call, counts, num_parts, script, **known)


def _examine_inside(
    module: nn.Module, fqn: str, whole: Run, halves: Sequence[Call], found: Found
) -> str | None:
    """Examine the modules that a module calls; return why its own code needs all rows, if so."""
    known = whole.calls, found.num_rows, found.bounds
    script = [Script(part, *known) for part in range(NUM_PARTS)]
    try:
        forced = [
            _run(module, fqn, half, whole, found, each)
            for half, each in zip(halves, script, strict=True)
        ]
    except OtherCallsError as error:
        return None if found.in_lists else str(error)  # which are other arguments for fewer rows
    examined: set[tuple[str, str]] = set()
    for index, (child, call) in enumerate(whole.calls):
        if any(index >= len(run.calls) for run in forced):
            break  # one of them raised
        found.callers.setdefault(child, set()).add(fqn)
        key = (child, structure((call.args, call.kwargs)))
        of_halves = [run.calls[index][1] for run in forced]
        if key in examined:
            found.add(child, call, of_halves)
            continue
        examined.add(key)
        inside = module.get_submodule(child.removeprefix(fqn).lstrip("."))
        _examine(inside, child, call, of_halves, found)
        if (name := found.needs_caller(child, call)) is not None:
            return f"it sets {name!r} of {child!r}, in which rows depend on each other"
    fold_row_lists(whole, forced)
    noticed = [each.noticed for each in script if each.noticed]
    return noticed[0] if noticed else _difference(whole, forced, found, fqn, own=True)


def _look_at_kept(
    model: nn.Module, call: Call, whole: Run, parts: Sequence[Run], found: Found
) -> None:
    """Note what a model leaves in attributes that depends on rows; see [Note: kept attributes]."""
    if whole.subject is None or any(run.error for run in parts):
        return
    of_parts = [run.left for run in parts]
    left = whole.left, of_parts, found.num_rows
    rows, places = with_rows(*left), dependent(*left)
    if rows and _again(model, call, whole, rows, found) is None:
        found.rows_read |= rows
    if not places:
        return
    again = _again(model, call, whole, places, found)
    if again is None:
        found.read |= places
        return
    found.kept |= worth_a_warning(places, whole.subject, whole.left, again.left)


def _again(
    model: nn.Module, call: Call, whole: Run, places: set[Place], found: Found
) -> Run | None:
    """Run a model with what it left in attributes; None if it then returns something else."""
    assert whole.subject is not None
    second = sharing_copy(model)
    set_kept(second, whole.subject, places)
    again = _run(second, "", call, None, found)
    outputs = whole.call.unfolded_outputs, again.call.unfolded_outputs
    return None if again.error is not None or differs(*outputs) else again


def _absorb_keepers(fqn: str, whole: Run, parts: Sequence[Run], found: Found) -> None:
    """Make regions of modules that keep what a region's code may read behind their backs."""
    for (holder, attribute), tensor in whole.kept.items():
        of_parts = [run.kept.get((holder, attribute)) for run in parts]
        if all(x is not None and equal(x, tensor) for x in of_parts):
            continue
        while holder:
            path = f"{fqn}.{holder}".lstrip(".")
            found.regions.setdefault(path, f"{attribute!r}, which is kept, depends on the rows")
            holder = holder.rpartition(".")[0]


def _difference(
    whole: Run, parts: Sequence[Run], found: Found, fqn: str, *, own: bool = False
) -> str | None:
    """Return what a module returns, or keeps, that parts of the rows do not give."""
    outputs = whole.call.outputs
    failed = next((run.error for run in parts if run.error is not None), None)
    if failed is not None:
        found.fails = True
        return f"with fewer rows it raises {failed}"
    if any(len(run.call.outputs) != len(outputs) for run in parts):
        return "it returns other things for fewer rows"
    if found.counts_ratios and not _are_sums(whole, parts):
        return "it divides by what is no sum over rows"
    for index, expected in enumerate(outputs):
        of_parts = [run.call.outputs[index] for run in parts]
        if found.losses_only and is_number(expected):
            continue
        if not isinstance(expected, Tensor):
            if not all(same_value(x, expected) for x in of_parts):
                return "it returns a number that depends on how many rows there are"
        elif not _averages(expected, of_parts, (whole, *parts), found) and (
            _is_loss(expected)
            or not all(
                isinstance(x, Tensor) and is_part(x, expected, i, found.num_rows)
                for i, x in enumerate(of_parts)
            )
        ):
            name = found.names[index] if not fqn and len(found.names) == len(outputs) > 1 else ""
            return _description(expected, name)
    for name, buffer in whole.buffers.items():
        if (own and "." in name) or f"{fqn}.{name}".lstrip(".") in found.added:
            continue
        if not all(equal(run.buffers[name], buffer) for run in parts):
            return f"its buffer {name!r} depends on all rows"
    for name, parameter in whole.written.items():
        if own and "." in name:
            continue
        if not all(equal(run.written[name], parameter) for run in parts):
            return f"its parameter {name!r}, which it writes to, depends on all rows"
    of_parts = [run.left for run in parts]
    for at in dependent(whole.left, of_parts, found.num_rows) if found.read else ():
        if absolute(fqn, at) in found.read and not (own and at[0]):
            return f"its attribute {at[1]!r}, which the next call reads, depends on all rows"
    effects = [run.effects for run in parts]
    decision = other_decision(whole.effects, effects, own=own, in_lists=found.in_lists)
    return decision or picks_rows(whole.picked, parts[0].picked, own=own)


def _are_sums(whole: Run, parts: Sequence[Run]) -> bool:
    """Whether what means count in parts adds up to what they count in all rows."""
    if any(len(run.own_counts) != len(whole.own_counts) for run in parts):
        return False
    of_parts = zip(*(run.own_counts for run in parts), strict=True)
    return all(
        equal(torch.stack(each).sum(), counted)
        for each, counted in zip(of_parts, whole.own_counts, strict=True)
    )


def _is_loss(output: Tensor) -> bool:
    # Equal for these rows, if it is (nan, an accuracy of 0), does not mean equal for others.
    return output.dim() == 0 and output.is_floating_point()


def _description(output: Tensor, name: str) -> str:
    if output.dim() == 0:
        named = f", output{name}" if name else ""
        return f"it returns a number that is not a plain mean over rows{named}"
    return f"rows of its result of shape {tuple(output.shape)} depend on other rows"


def _averages(whole: Tensor, of_parts: Sequence[Any], runs: Sequence[Run], found: Found) -> bool:
    """Whether a loss of all rows is the mean over parts of theirs, whatever rows these have.

    ``runs`` are the one of all rows, and those of parts.
    """
    if whole.dim() or not all(isinstance(x, Tensor) for x in of_parts):
        return False
    of_whole, *means = [run.means for run in runs]
    known = found.in_lists or all(
        run.is_mean(x) and run.counts_as(of_whole) for x, run in zip(of_parts, means, strict=True)
    )
    return known and equal(torch.stack([*of_parts]).mean(), whole)
