"""Find the modules in which rows of a batch meet, by running them on all rows and on parts.

A data-parallel rank sees a part of the batch's rows. That gives one device's numbers wherever
each row is treated alone, and for means over rows that are averaged over ranks. It does not
where rows meet: batch statistics, contrast within a batch, auxiliary losses over all tokens, sums
and masked means. Nothing about operators is assumed: a module is run on random weights in float64,
on a few rows and on each half of them. What it returns for half of the rows must be half of what
it returns for all, and a loss must be put together from means that are known to average.

Where that fails the module's own code is told apart from that of the modules it calls: these are
given, and made to return, their part of what they had for all rows. So what is found is small: a
normalization, a router's loss, the loss of the model.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._chance import WithoutChance
from ._loss import TokenMeans
from ._proof import InDouble
from ._row_borders import (
    Border,
    RowMeetings,
    Rows,
    part_of_rows,
    rows_dim,
    structure,
)
from ._row_means import MeanTracker
from ._torch_private import pytree

NUM_ROWS, _NUM_PARTS = 4, 2


class RowCheckError(ValueError):
    """A model cannot be run on some rows of its batch."""


class GradientsDifferError(RowCheckError):
    """Rows meet in a backward pass alone, which nothing here can make right."""


Given = tuple[tuple[Any, ...], dict[str, Any]]


def row_meetings(model: nn.Module, whole: Given, halves: Sequence[Given]) -> RowMeetings:
    """Return where rows meet in a call of a model.

    Args:
        model: On the CPU, with values in float64; copies of it are run.
        whole: Positional and keyword arguments, with :data:`NUM_ROWS` rows.
        halves: The same with each half of the rows.

    Raises:
        RowCheckError: If the model cannot be run.
        GradientsDifferError: If its gradients differ though its results do not.
    """
    found = _Found()
    with warnings.catch_warnings(), seeded():
        warnings.simplefilter("ignore")
        _examine(model, "", _Call(*whole), [_Call(*half) for half in halves], found, is_model=True)
    return RowMeetings(regions=found.regions, borders=found.useful_borders())


@dataclass
class _Call:
    """What a module was called with, and, of one that was run, returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def inputs(self) -> list[Any]:
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Any]:
        return pytree.tree_leaves(self.output)


@dataclass
class _Run:
    """One run of a module.

    Attributes:
        call: What it was given and returned, with the graph of autograd.
        error: What it raised instead.
        calls: Of the modules that its own code calls, in order.
        means: Tells which scalars ranks may average.
        counts: What token means counted.
        parameters: Of the module that ran.
        buffers: As they were afterwards.
        kept: Other tensors that modules then held, by module and attribute.
    """

    call: _Call
    means: MeanTracker
    error: str | None = None
    calls: list[tuple[str, _Call]] = field(default_factory=list[tuple[str, _Call]])
    counts: list[Tensor] = field(default_factory=list[Tensor])
    parameters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    kept: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], Tensor])


@dataclass
class _Found:
    """What was found so far.

    Attributes:
        regions: Modules in whose own code rows meet, and why.
        borders: By module and form of call.
        unclear: Calls of which it cannot be told where the rows are in what they are given.
        mixed: Likewise in what they return: both dims of (batch x batch), for example.
        callers: Modules whose own code calls a module.
    """

    regions: dict[str, str] = field(default_factory=dict[str, str])
    borders: dict[tuple[str, str], Border] = field(default_factory=dict[tuple[str, str], Border])
    unclear: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    mixed: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    callers: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def useful_borders(self) -> dict[tuple[str, str], Border]:
        """Return those of regions, and of what can be left to run on a part of the rows."""
        regions = {*self.regions}
        return {
            at: border
            for at, border in self.borders.items()
            if at not in self.unclear
            and (
                at[0] in regions
                or (self.callers.get(at[0], set()) & regions and at not in self.mixed)
            )
        }

    def add(self, fqn: str, whole: _Call, parts: Sequence[_Call]) -> None:
        at = fqn, structure((whole.args, whole.kwargs))
        inputs, is_clear = _where(whole.inputs, parts[0].inputs)
        outputs, is_row_wise = _where(whole.outputs, parts[0].outputs)
        border = Border(inputs, outputs)
        if not is_clear or self.borders.setdefault(at, border) != border:
            self.unclear.add(at)
        if not is_row_wise:
            self.mixed.add(at)


def _examine(
    module: nn.Module,
    fqn: str,
    call: _Call,
    halves: Sequence[_Call],
    found: _Found,
    *,
    is_model: bool = False,
) -> None:
    """Note the regions in a module, and where the rows are in this call of it."""
    whole = _run(module, fqn, call, [], _NUM_PARTS)
    if whole.error is not None:
        raise RowCheckError(f"{fqn or 'the model'}: {whole.error}")
    parts = [_run(module, fqn, half, whole.counts, 1) for half in halves]
    found.add(fqn, whole.call, [run.call for run in parts])
    why = _difference(whole, parts)
    if why is None:
        if is_model:
            _compare_gradients(whole, parts)
        return
    known = len(found.regions)
    own = _examine_inside(module, fqn, whole, halves, found)
    if own is not None or len(found.regions) == known:
        found.regions[fqn] = own or why
        _absorb_keepers(fqn, whole, parts, found)


def _examine_inside(
    module: nn.Module, fqn: str, whole: _Run, halves: Sequence[_Call], found: _Found
) -> str | None:
    """Examine the modules that a module calls; return why rows meet in its own code, if so."""
    script = [_Script(whole.calls, part) for part in range(_NUM_PARTS)]
    try:
        forced = [
            _run(module, fqn, half, whole.counts, 1, each)
            for half, each in zip(halves, script, strict=True)
        ]
    except _OtherCallsError as error:
        return str(error)
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
        _examine(module.get_submodule(_below(child, fqn)), child, call, of_halves, found)
    noticed = [each.noticed for each in script if each.noticed]
    return noticed[0] if noticed else _difference(whole, forced, own_buffers=True)


def _absorb_keepers(fqn: str, whole: _Run, parts: Sequence[_Run], found: _Found) -> None:
    """Make regions of modules that keep what a region's code may read behind their backs."""
    for (holder, attribute), tensor in whole.kept.items():
        if all(_equal_or_none(run.kept.get((holder, attribute)), tensor) for run in parts):
            continue
        while holder:
            path = f"{fqn}.{holder}".lstrip(".")
            found.regions.setdefault(path, f"{attribute!r}, which is kept, depends on the rows")
            holder = holder.rpartition(".")[0]


def _equal_or_none(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and _equal(found, expected)


class _OtherCallsError(Exception):
    """With fewer rows a module calls other modules."""


@dataclass
class _Script:
    """Has the modules that a module calls be given and return their part of a run on all rows.

    Attributes:
        calls: Of the run on all rows.
        part: Which part of the rows this run is on.
        noticed: How an input was not that part, the first one.
    """

    calls: Sequence[tuple[str, _Call]]
    part: int
    noticed: str | None = None

    def inputs(self, index: int, fqn: str, call: _Call, means: MeanTracker) -> _Call:
        if index >= len(self.calls) or self.calls[index][0] != fqn:
            raise _OtherCallsError(f"with fewer rows it calls {fqn or 'itself'!r} otherwise")
        expected = self.calls[index][1]
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        if len(leaves) != len(expected.inputs):
            raise _OtherCallsError(f"with fewer rows it gives {fqn!r} other arguments")
        pairs = list(zip(leaves, expected.inputs, strict=True))
        if self.noticed is None and any(self._differs(x, w, means) for x, w in pairs):
            self.noticed = f"what it gives {fqn!r} depends on other rows"
        given = [self._scripted(x, w, means) for x, w in pairs]
        args, kwargs = pytree.tree_unflatten(given, spec)
        return _Call(args, kwargs)

    def output(self, index: int, output: Any, means: MeanTracker) -> Any:
        leaves, spec = pytree.tree_flatten(output)
        expected = self.calls[index][1].outputs
        if len(leaves) != len(expected):
            return output
        pairs = zip(leaves, expected, strict=True)
        return pytree.tree_unflatten([self._scripted(x, w, means) for x, w in pairs], spec)

    def _differs(self, x: Any, whole: Any, means: MeanTracker) -> bool:
        if not isinstance(x, Tensor) or not isinstance(whole, Tensor):
            return isinstance(x, Tensor) != isinstance(whole, Tensor) or not _same_value(x, whole)
        return not means.is_mean(x) and not _is_part(x, whole, self.part)

    def _scripted(self, x: Any, whole: Any, means: MeanTracker) -> Any:
        if not isinstance(x, Tensor) or not isinstance(whole, Tensor):
            return x
        if means.is_mean(x) or _is_part(x, whole, self.part):
            return x
        if x.shape == whole.shape:
            return whole.clone().requires_grad_(x.requires_grad)
        rows = _rows(whole, x, self.part)
        if rows is None:
            return x
        mine = part_of_rows(whole, rows, self.part, _NUM_PARTS, NUM_ROWS)
        return mine.clone().requires_grad_(x.requires_grad)


def _run(
    module: nn.Module,
    fqn: str,
    call: _Call,
    counts: list[Tensor],
    num_of_parts: int,
    script: _Script | None = None,
) -> _Run:
    """Run a copy of a module on all rows, ``num_of_parts`` parts, or on one part."""
    subject = copy.deepcopy(module)
    is_whole = num_of_parts == _NUM_PARTS

    def count(index: int, counted: Tensor) -> Tensor:
        if is_whole:
            counts.append(counted)
        elif index >= len(counts):
            raise _OtherCallsError("with fewer rows it computes other losses")
        return counts[index]

    token_means = TokenMeans(_NUM_PARTS // num_of_parts, count)
    run = _Run(_Call(*_copied((call.args, call.kwargs))), MeanTracker(token_means.means))
    _record_calls(subject, fqn, run, script)
    try:
        with ExitStack() as stack:
            modes = (token_means, InDouble(), run.means, WithoutChance())
            for each in (seeded(), torch.enable_grad(), *modes):
                stack.enter_context(each)
            run.call.output = subject(*run.call.args, **run.call.kwargs)
    except _OtherCallsError:
        raise
    # Arbitrary user code: whatever it raises means that it cannot be run on such rows.
    except Exception as error:
        run.error = f"{type(error).__name__}: {error}"
    run.counts = counts
    run.parameters = dict(subject.named_parameters())
    run.buffers = {name: buffer.detach() for name, buffer in subject.named_buffers()}
    run.kept = dict(_kept(subject))
    return run


def _record_calls(subject: nn.Module, fqn: str, run: _Run, script: _Script | None) -> None:
    """Note the calls that a module's own code makes, and have them follow a script."""
    depth = 0

    def watch(name: str, child: nn.Module) -> None:
        at = f"{fqn}.{name}".lstrip(".")

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            if depth > 1:
                return None
            given = _Call(args, kwargs)
            if script is not None:
                given = script.inputs(len(run.calls), at, given, run.means)
            run.calls.append((at, _Call(*_copied((given.args, given.kwargs)))))
            return given.args, given.kwargs

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            nonlocal depth
            depth -= 1
            if depth:
                return None
            if script is not None:
                output = script.output(len(run.calls) - 1, output, run.means)
            run.calls[-1][1].output = _copied(output)
            return output

        child.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        child.register_forward_hook(after)

    for name, child in subject.named_modules():
        if child is not subject:
            watch(name, child)


def _kept(module: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield tensors that modules hold as plain attributes."""
    for fqn, each in module.named_modules():
        for name, value in vars(each).items():
            if name in ("_parameters", "_buffers", "_modules") or name.endswith("_hooks"):
                continue
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield (fqn, name), leaf.detach()


def _copied(tree: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree
    )


def _where(whole: list[Any], part: list[Any]) -> tuple[tuple[Rows | None, ...], bool]:
    """Return where the rows are in tensors, and whether shapes tell for all of them."""
    if len(whole) != len(part):
        return (), False
    pairs = list(zip(whole, part, strict=True))
    both = [isinstance(w, Tensor) and isinstance(x, Tensor) for w, x in pairs]
    rows = [
        _rows(w, x, 0) if tensors else None for (w, x), tensors in zip(pairs, both, strict=True)
    ]
    told = [
        not tensors or found is not None or w.shape == x.shape
        for (w, x), found, tensors in zip(pairs, rows, both, strict=True)
    ]
    return tuple(rows), all(told)


def _rows(whole: Tensor, part: Tensor, index: int) -> Rows | None:
    """Return where the rows are in a tensor, given the same for some of them."""
    dim = rows_dim(whole.shape, part.shape, _NUM_PARTS)
    if dim is None:
        return None
    inner = Rows(dim, outermost=False)
    length = whole.shape[dim]
    if length % NUM_ROWS == 0 and length > NUM_ROWS:
        outer = part_of_rows(whole, Rows(dim), index, _NUM_PARTS, NUM_ROWS)
        inside = part_of_rows(whole, inner, index, _NUM_PARTS, NUM_ROWS)
        if not _equal(part, outer) and _equal(part, inside):
            return inner
    return Rows(dim)


def _is_part(x: Tensor, whole: Tensor, part: int) -> bool:
    if x.shape == whole.shape:
        return _equal(x, whole)
    rows = _rows(whole, x, part)
    return rows is not None and _equal(x, part_of_rows(whole, rows, part, _NUM_PARTS, NUM_ROWS))


def _same_value(x: Any, y: Any) -> bool:
    if isinstance(x, bool | int | float | str | torch.Size | type(None)):
        return x == y
    return type(x) is type(y)


def _difference(whole: _Run, parts: Sequence[_Run], *, own_buffers: bool = False) -> str | None:
    """Return what a module returns, or keeps in a buffer, that parts of the rows do not give."""
    outputs = whole.call.outputs
    failed = next((run.error for run in parts if run.error is not None), None)
    if failed is not None:
        return f"with fewer rows it raises {failed}"
    if any(len(run.call.outputs) != len(outputs) for run in parts):
        return "it returns other things for fewer rows"
    for index, expected in enumerate(outputs):
        found = [run.call.outputs[index] for run in parts]
        if not isinstance(expected, Tensor):
            if not all(_same_value(x, expected) for x in found):
                return "it returns a number that depends on how many rows there are"
        elif not _averages(expected, found, parts) and (
            _is_loss(expected)
            or not all(
                isinstance(x, Tensor) and _is_part(x, expected, i) for i, x in enumerate(found)
            )
        ):
            return _description(expected)
    for name, buffer in whole.buffers.items():
        if own_buffers and "." in name:
            continue
        if not all(_equal(run.buffers[name], buffer) for run in parts):
            return f"its buffer {name!r} depends on all rows"
    return None


def _is_loss(output: Tensor) -> bool:
    # Equal for these rows, if it is (nan, for example), does not mean equal for others.
    return output.dim() == 0 and output.requires_grad


def _description(output: Tensor) -> str:
    if output.dim() == 0:
        return "it returns a number that is not a plain mean over rows"
    return f"rows of its result of shape {tuple(output.shape)} depend on other rows"


def _averages(whole: Tensor, found: Sequence[Any], parts: Sequence[_Run]) -> bool:
    """Whether a loss of all rows is the mean over parts of theirs, whatever rows these have."""
    if whole.dim() or not all(isinstance(x, Tensor) for x in found):
        return False
    known = all(run.means.is_mean(x) for x, run in zip(found, parts, strict=True))
    return known and _equal(sum(found) / len(found), whole)


def _compare_gradients(whole: _Run, parts: Sequence[_Run]) -> None:
    """Raise if parameters' gradients are not the sum over parts.

    Raises:
        GradientsDifferError: With the name of a parameter.
    """
    outputs = whole.call.outputs
    weights = [torch.randn_like(x) if _has_gradient(x) and x.dim() else None for x in outputs]
    expected = _gradients(
        whole,
        [
            torch.ones_like(x) if w is None and _has_gradient(x) else w
            for x, w in zip(outputs, weights, strict=True)
        ],
    )
    summed: dict[str, Tensor] = {}
    for part, run in enumerate(parts):
        given: list[Tensor | None] = []
        for whole_output, weight, x in zip(outputs, weights, run.call.outputs, strict=True):
            if not _has_gradient(x):
                given.append(None)
            elif weight is None or x.shape == whole_output.shape:
                full = torch.ones_like(x) if weight is None else weight
                given.append(full / _NUM_PARTS)
            else:
                rows = _rows(whole_output, x, part)
                assert rows is not None
                given.append(part_of_rows(weight, rows, part, _NUM_PARTS, NUM_ROWS))
        for name, grad in _gradients(run, given).items():
            summed[name] = summed[name] + grad if name in summed else grad
    for name, grad in expected.items():
        if not _equal(summed.get(name, torch.zeros_like(grad)), grad, relative=1e-6):
            raise GradientsDifferError(
                f"the gradient of {name!r} is not the sum over parts of the batch, though "
                "results are made row by row"
            )


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad


def _gradients(run: _Run, cotangents: Sequence[Tensor | None]) -> dict[str, Tensor]:
    pairs = [(x, c) for x, c in zip(run.call.outputs, cotangents, strict=True) if c is not None]
    wanted = {name: p for name, p in run.parameters.items() if p.requires_grad}
    if not pairs or not wanted:
        return {}
    with InDouble(), WithoutChance():
        grads = torch.autograd.grad(
            [x for x, _ in pairs], [*wanted.values()], [c for _, c in pairs], allow_unused=True
        )
    return {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}


def _equal(found: Tensor, expected: Tensor, *, relative: float = 1e-9) -> bool:
    """Whether numbers agree up to rounding; 1e-9 is some thousand times that of a long sum."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point() and not found.is_complex():
        return torch.equal(found, expected)
    if found.dtype not in (torch.float64, torch.complex128):
        relative = 1e-3
    finite = expected.detach()[expected.detach().isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(
        found.detach(),
        expected.detach(),
        rtol=relative,
        atol=relative * (largest + 1e-3),
        equal_nan=True,
    )


def _below(fqn: str, prefix: str) -> str:
    return fqn.removeprefix(f"{prefix}.") if prefix else fqn


@contextmanager
def seeded() -> Iterator[None]:
    """Have everything that draws on the CPU begin alike, and be as before afterwards."""
    generator, numpy = torch.default_generator, sys.modules.get("numpy")
    held = generator.get_state(), random.getstate()
    held_by_numpy = numpy.random.get_state() if numpy is not None else None
    generator.manual_seed(0)
    random.seed(0)
    if numpy is not None:
        numpy.random.seed(0)
    try:
        yield
    finally:
        generator.set_state(held[0])
        random.setstate(held[1])
        if numpy is not None:
            numpy.random.set_state(held_by_numpy)
