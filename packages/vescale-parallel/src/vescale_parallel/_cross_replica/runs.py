"""Run a module on all rows of a small batch or on a part, and note what its code calls."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._loss.kernels import leave_in_blocks
from vescale_parallel._loss.sum_ratios import SumRatios
from vescale_parallel._loss.token_mean import TokenMeans
from vescale_parallel._model.copies import (
    own_containers,
    snapshot,
    tensors_in_attributes,
    writable,
)
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.random_copies import InDouble, sharing_copy
from vescale_parallel._model.structures import open_objects
from vescale_parallel._torch_private import is_transformed, pytree
from vescale_parallel._trace.generators import untouched_generators
from vescale_parallel._verify.modes.side_effects import SideEffects, watched_side_effects
from vescale_parallel._verify.modes.without_chance import WithoutChance

from .borders import part_of_rows
from .dims.bounds import GivenBounds
from .kept import Kept, Place, changed, kept_in
from .parts import NUM_PARTS, is_part, rows_in, same_value
from .results.means import MeanTracker
from .results.ranked_rows import Picked, PickedRows
from .results.row_lists import folded_alike
from .set_attributes import Attributes, put


@dataclass
class Call:
    """What a module was called with, and, of one that was run, returned.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: What it returned.
        are_means: Of the output's leaves, whether they are means that ranks may average.
        folded: The output with lists of rows as leaves, if there are some.
        held: What its caller has set in attributes of it, and of modules within it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    are_means: tuple[bool, ...] = ()
    folded: Any = None
    held: dict[Place, Any] = field(default_factory=dict[Place, Any])

    @property
    def inputs(self) -> list[Any]:
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Any]:
        return pytree.tree_leaves(self.output if self.folded is None else self.folded)

    @property
    def unfolded_outputs(self) -> list[Any]:
        return pytree.tree_leaves(self.output)


@dataclass
class Run:
    """One run of a module.

    Attributes:
        call: What it was given and returned, with the graph of autograd.
        error: What it raised instead.
        calls: Of the modules that its own code calls, in order.
        means: Tells which scalars ranks may average.
        counts: What token means counted in all rows.
        own_counts: What they counted in this run's.
        are_counted: Of what it divides by sums, in order, in which those of all parts divide.
        parameters: Of the module that ran.
        buffers: As they were afterwards.
        written: Likewise parameters that the model is known to write to.
        kept: Other tensors that modules then held, by module and attribute.
        left: What it has left in attributes, which was not so before.
        subject: The copy of the module that ran.
        depth: How many modules that the module calls are running, one inside of the other.
        picked: Operators that picked elements along a dim.
        effects: What it read of tensors.
    """

    call: Call
    means: MeanTracker
    error: str | None = None
    calls: list[tuple[str, Call]] = field(default_factory=list[tuple[str, Call]])
    counts: list[Tensor] = field(default_factory=list[Tensor])
    own_counts: list[Tensor] = field(default_factory=list[Tensor])
    are_counted: tuple[bool, ...] = ()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    written: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    kept: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], Tensor])
    left: Kept = field(default_factory=dict[Place, list[Any]])
    subject: nn.Module | None = None
    depth: int = 0
    picked: list[Picked] = field(default_factory=list[Picked])
    effects: SideEffects = field(default_factory=SideEffects)


def tells_num_rows(whole: Call, part: Call) -> bool:
    """Whether a module is given a number that counts rows."""
    numbers = zip(whole.inputs, part.inputs, strict=False)
    return any(type(w) is type(p) is int and w == NUM_PARTS * p != 0 for w, p in numbers)


def fold_row_lists(whole: Run, parts: Sequence[Run]) -> None:
    """Have lists with elements of each row be one leaf of what runs returned, in place."""
    runs = whole, *parts
    trees = folded_alike(whole.call.output, [run.call.output for run in parts])
    for run, tree in zip(runs, trees, strict=False):
        run.call.folded = tree
        run.call.are_means = tuple(map(run.means.is_mean, run.call.outputs))


class RowCheckError(ValueError):
    """It is not known where rows of a batch depend on each other."""


class NotFewerRowsError(RowCheckError):
    """More than one dim may be the rows, and the model does not run on fewer along one of them."""


class OtherCallsError(Exception):
    """With fewer rows a module calls other modules."""


@dataclass
class Script:
    """Has the modules that a module calls be given and return their part of a run on all rows.

    Attributes:
        part: Which part of the rows this run is on.
        calls: Of the run on all rows.
        num_rows: How many all rows are.
        bounds: Of rows, which the model is given.
        noticed: How an input was not that part, the first one.
    """

    part: int
    calls: Sequence[tuple[str, Call]]
    num_rows: int
    bounds: GivenBounds
    noticed: str | None = None

    def inputs(self, index: int, fqn: str, call: Call, means: MeanTracker) -> Call:
        if index >= len(self.calls) or self.calls[index][0] != fqn:
            raise OtherCallsError(f"with fewer rows it calls {fqn or 'itself'!r} otherwise")
        expected = self.calls[index][1]
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        if len(leaves) != len(expected.inputs):
            raise OtherCallsError(f"with fewer rows it gives {fqn!r} other arguments")
        pairs = list(zip(leaves, expected.inputs, strict=True))
        if self.noticed is None and any(self._differs(x, w, means) for x, w in pairs):
            self.noticed = f"what it gives {fqn!r} depends on other rows"
        given = [self._scripted(x, w, means) for x, w in pairs]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return Call(args, kwargs, held=self._held(fqn, call.held, expected.held, means))

    def _held(
        self, fqn: str, held: Mapping[Place, Any], whole: Mapping[Place, Any], means: MeanTracker
    ) -> dict[Place, Any]:
        if held.keys() != whole.keys():
            raise OtherCallsError(f"with fewer rows it sets other attributes of {fqn!r}")
        for at, x in held.items():
            is_count = type(x) is int and whole[at] == NUM_PARTS * x
            if self.noticed is None and not is_count and self._differs(x, whole[at], means):
                self.noticed = f"{at[1]!r}, which it sets in {fqn!r}, depends on other rows"
        return {at: self._scripted(x, whole[at], means) for at, x in held.items()}

    def output(self, index: int, output: Any, means: MeanTracker) -> Any:
        leaves, spec = pytree.tree_flatten(output)
        expected = self.calls[index][1].outputs
        if len(leaves) != len(expected):
            return output
        pairs = zip(leaves, expected, strict=True)
        return pytree.tree_unflatten([self._scripted(x, w, means) for x, w in pairs], spec)

    def _differs(self, x: Any, whole: Any, means: MeanTracker) -> bool:
        if not isinstance(x, Tensor) or not isinstance(whole, Tensor):
            return isinstance(x, Tensor) != isinstance(whole, Tensor) or not same_value(x, whole)
        if self.bounds.kind(whole, x, self.part):
            return False
        return not means.is_mean(x) and not is_part(x, whole, self.part, self.num_rows)

    def _scripted(self, x: Any, whole: Any, means: MeanTracker) -> Any:
        if not isinstance(x, Tensor) or not isinstance(whole, Tensor):
            return x
        if means.is_mean(x):
            # Of all rows, so that what is wrong inside is not found again outside.
            return means.note(whole.clone().requires_grad_(x.requires_grad))
        if is_part(x, whole, self.part, self.num_rows) or self.bounds.kind(whole, x, self.part):
            return x
        if x.shape == whole.shape:
            return whole.clone().requires_grad_(x.requires_grad)
        rows = rows_in(whole, x, self.part, self.num_rows)
        if rows is None:
            return x
        mine = part_of_rows(whole, rows, self.part, NUM_PARTS, self.num_rows)
        return mine.clone().requires_grad_(x.requires_grad)


def run_module(
    module: nn.Module,
    fqn: str,
    call: Call,
    counts: list[Tensor],
    num_of_parts: int,
    script: Script | None = None,
    *,
    written: Mapping[str, Tensor] | None = None,
    ratios: SumRatios | None = None,
    blocks: Collection[str] = (),
) -> Run:
    """Run a copy of a module on all rows, ``num_of_parts`` parts, or on one part.

    ``written`` are values of the model's parameters that every run begins with, though it writes.
    ``ratios`` sees ratios of sums to count, outside of ``blocks``, which are patterns.
    """
    subject = sharing_copy(module)
    is_whole = num_of_parts == NUM_PARTS
    own_counts = list[Tensor]()

    def count(index: int, counted: Tensor) -> Tensor:
        own_counts.append(counted)
        if is_whole:
            counts.append(counted)
        elif index >= len(counts):
            raise OtherCallsError("with fewer rows it computes other losses")
        return counts[index]

    token_means = TokenMeans(NUM_PARTS // num_of_parts, count, ratios)
    means = MeanTracker(token_means.means, (call.args, call.kwargs), subject.buffers())
    put(_copied(call.held), subject)
    run = Run(Call(*_copied((call.args, call.kwargs))), means)
    _record_calls(subject, fqn, run, script)
    if ratios is not None:
        names = (name for name, _ in subject.named_modules() if name)
        at = [name for name in names if generalize(f"{fqn}.{name}".lstrip(".")) in blocks]
        leave_in_blocks(subject, at)
    try:
        with ExitStack() as stack:
            picked = PickedRows(lambda: run.depth == 0, run.picked)
            modes = (token_means, InDouble(), run.means, picked, WithoutChance())
            for each in (seeded(), torch.enable_grad(), *modes):
                stack.enter_context(each)
            run.effects = stack.enter_context(watched_side_effects(subject))
            # What it was called with is told by the call, whatever it puts into its arguments.
            args, kwargs = own_containers((run.call.args, run.call.kwargs))
            if ratios is not None:
                ratios.begin((args, kwargs))
            run.call.output = subject(*args, **kwargs)
            open_objects(run.call.output)
            run.call.are_means = tuple(map(run.means.is_mean, run.call.outputs))
    except OtherCallsError:
        raise
    # Arbitrary user code: whatever it raises means that it cannot be run on such rows.
    except Exception as error:
        run.error = f"{type(error).__name__}: {error}"
    run.counts, run.own_counts = counts, own_counts
    run.are_counted = () if ratios is None else tuple(ratios.are_counted)
    run.parameters = dict(subject.named_parameters())
    run.written = _settle_parameters(module, fqn, run.parameters, written or {})
    run.buffers = {name: buffer.detach() for name, buffer in subject.named_buffers()}
    run.kept = {(fqn, name): x.detach() for fqn, name, x in tensors_in_attributes(subject)}
    run.subject, run.left = subject, changed(kept_in(module), kept_in(subject))
    return run


def _settle_parameters(
    module: nn.Module,
    fqn: str,
    found: Mapping[str, nn.Parameter],
    written: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return what a run left in parameters that it writes to; have the next one begin alike."""
    left: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        before = written.get(f"{fqn}.{name}".lstrip("."))
        if before is not None:
            left[name] = found[name].detach().clone()
            # Not counted as a write: backward through this run may have kept it.
            parameter.data.copy_(before)
    return left


def _record_calls(subject: nn.Module, fqn: str, run: Run, script: Script | None) -> None:
    """Note the calls that a module's own code makes, and have them follow a script."""
    attributes = Attributes(subject)

    def watch(name: str, child: nn.Module) -> None:
        at = f"{fqn}.{name}".lstrip(".")

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if is_transformed():  # of the code that transforms, and of nothing by itself
                return None
            run.depth += 1
            if run.depth > 1:
                return None
            given = Call(args, kwargs, held=attributes.set_since(child))
            if script is not None:
                with run.means.passing_over_reads():
                    given = script.inputs(len(run.calls), at, given, run.means)
                put(given.held, child)
            args, kwargs = _copied((given.args, given.kwargs))
            run.calls.append((at, Call(args, kwargs, held=_copied(given.held))))
            return given.args, given.kwargs

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            if is_transformed():
                return None
            run.depth -= 1
            if run.depth:
                return None
            attributes.note(child)
            if script is not None:
                with run.means.passing_over_reads():
                    output = script.output(len(run.calls) - 1, output, run.means)
            leaves = pytree.tree_leaves(output)
            run.calls[-1][1].are_means = tuple(map(run.means.is_mean, leaves))
            run.calls[-1][1].output = _copied(output)
            return output

        child.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        child.register_forward_hook(after)

    for name, child in subject.named_modules():
        if child is not subject:
            watch(name, child)


def _copied(tree: Any) -> Any:
    """Copy tensors, and objects that a module may change: the caller's caches stay as they are."""
    return pytree.tree_map_only(Tensor, _copied_tensor, snapshot(tree))


def _copied_tensor(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return writable(x.detach().clone().requires_grad_(x.requires_grad))


@contextmanager
def seeded() -> Iterator[None]:
    """Have everything that draws on the CPU begin alike, and be as before afterwards."""
    with untouched_generators(0):
        random.seed(0)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)
        yield
