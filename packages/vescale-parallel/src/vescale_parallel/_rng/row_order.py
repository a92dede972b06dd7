"""Whether rows are outermost or innermost in a dim of random numbers that they share.

Shapes do not tell (rows x time) from (time x rows). What is computed with them does: a model is
run on random weights in float64, on a few rows and on each of these twice, with twice the same
numbers for each, laid one way and the other. Laid as they are to be, everything that the model
then computes is twice what it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor.random import Fill, RandomOperator
from vescale_parallel._cross_replica.borders import Rows, rows_dim
from vescale_parallel._cross_replica.runs import seeded
from vescale_parallel._model.copies import deep_copied, snapshot
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.random_copies import InDouble
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.random_ops import DrawMode, draw_with
from vescale_parallel._trace.rng_trace import DrawNotes, NotedDraw
from vescale_parallel._verify.modes.without_chance import without_chance

from .predict import Draw, Given

# Bytes of activations that are kept of one run, to be compared.
_MOST_KEPT = 1 << 28


def twice_over(x: Tensor, rows: Rows, num_rows: int) -> Tensor:
    """Return a tensor of ``num_rows`` rows with all of them twice, in the same order."""
    if rows.outermost:
        return torch.cat((x, x), rows.dim)
    apart = x.unflatten(rows.dim, (-1, num_rows))
    return torch.cat((apart, apart), rows.dim + 1).flatten(rows.dim, rows.dim + 1)


def order_of_rows(
    model: nn.Module, once: Given, twice: Given, num_rows: int, draw: Draw, dim: int
) -> Rows | None:
    """Return how rows lie in a dim of what a model draws, None if it cannot be seen.

    The model has values and is on the CPU; copies of it are run, on ``num_rows`` rows and on all
    of them twice. Draws of equal modules are taken for equal.
    """
    few = _run(model, once, _Trial(draw))
    if few is None:
        return None
    runs: dict[Rows, _Trial] = {}
    for rows in (Rows(dim), Rows(dim, outermost=False)):
        many = _run(model, twice, _Trial(draw, _Laid(few, rows, num_rows)))
        if many is not None:
            runs[rows] = many
    return _first_to_fit(few, runs, num_rows)


def _first_to_fit(few: _Trial, runs: Mapping[Rows, _Trial], num_rows: int) -> Rows | None:
    for at, tensor in few.kept.items():
        fitting = [
            rows
            for rows, many in runs.items()
            if at in many.kept and _is_twice(many.kept[at], tensor, num_rows)
        ]
        if len(fitting) == 1:
            return fitting[0]
    return None


def _is_twice(many: Tensor, few: Tensor, num_rows: int) -> bool:
    if many.shape == few.shape:
        return _equal(many, few) or (not few.dim() and _equal(many, 2 * few))
    dim = rows_dim(many.shape, few.shape, 2)
    if dim is None:
        return False
    orders = [Rows(dim)]
    if few.shape[dim] % num_rows == 0:
        orders.append(Rows(dim, outermost=False))
    return any(_equal(many, twice_over(few, rows, num_rows)) for rows in orders)


def _equal(found: Tensor, expected: Tensor) -> bool:
    if not found.is_floating_point() and not found.is_complex():
        return torch.equal(found, expected)
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-9 * scale, equal_nan=True)


@dataclass(frozen=True)
class _Laid:
    """The numbers of a run on some rows, as one on twice as many is to have them."""

    few: _Trial
    rows: Rows
    num_rows: int

    def __getitem__(self, index: int) -> Tensor:
        return twice_over(self.few.drawn[index], self.rows, self.num_rows)


@dataclass
class _Trial:
    """One run of a model, in which one draw is of random numbers.

    Attributes:
        draw: Which.
        given: Numbers to take; None to draw.
        drawn: The numbers, one for each time.
        kept: Tensors that modules were given and returned since then.
    """

    draw: Draw
    given: _Laid | None = None
    drawn: list[Tensor] = field(default_factory=list[Tensor])
    kept: dict[tuple[str, int, int], Tensor] = field(
        default_factory=dict[tuple[str, int, int], Tensor]
    )
    _num_calls: dict[str, int] = field(default_factory=dict[str, int])
    _num_bytes: int = 0

    def run(self, noted: NotedDraw, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if (generalize(noted.fqn), noted.index) != (generalize(self.draw[0]), self.draw[1]):
            return without_chance(func, args, kwargs)
        return draw_with(self._fill, func, args, kwargs)

    def keep(self, name: str, tree: Any) -> None:
        """Keep what a module was given or returned."""
        number = self._num_calls[name] = self._num_calls.get(name, 0) + 1
        if not self.drawn:
            return
        for index, leaf in enumerate(pytree.tree_leaves(tree)):
            if not isinstance(leaf, Tensor) or leaf.is_sparse:
                continue
            self._num_bytes += leaf.nbytes
            # What the model itself returns is kept in any case.
            if self._num_bytes < _MOST_KEPT or name == "":
                self.kept[name, number, index] = leaf.detach().clone()

    def _fill(self, how: RandomOperator, out: Tensor) -> None:
        if self.given is None:
            fill = how.fill
            if fill.method == "bernoulli_":
                fill = Fill("bernoulli_", (0.5,))  # so that some are dropped of few
            fill(out, torch.default_generator)
            self.drawn.append(out.clone())
            return
        index = len(self.drawn)
        out.copy_(self.given[index])
        self.drawn.append(out)


def _run(model: nn.Module, given: Given, trial: _Trial) -> _Trial | None:
    """Run a copy of a model; return None if it cannot be, or does not draw so."""
    subject, notes = deep_copied(model), DrawNotes()
    notes.follow(subject)
    for fqn, module in subject.named_modules():
        _keep_calls(module, fqn, trial)
    return trial if _has_run(subject, given, _OneDraw(notes, trial)) and trial.drawn else None


def _has_run(subject: nn.Module, given: Given, *modes: AbstractContextManager[Any]) -> bool:
    """Run a model that has values on a batch, and return whether it could be."""
    # A cache that the caller gave has to be as it was: the call itself comes after this.
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, snapshot(given))
    try:
        with ExitStack() as stack:
            for each in (seeded(), torch.no_grad(), InDouble(), *modes, warnings.catch_warnings()):
                stack.enter_context(each)
            warnings.simplefilter("ignore")
            subject(*args, **kwargs)
    # Arbitrary user code: whatever it raises means that it cannot be run on such rows.
    except Exception:
        return False
    return True


def _keep_calls(module: nn.Module, fqn: str, trial: _Trial) -> None:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        trial.keep(f"{fqn}(", (args, kwargs))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        trial.keep(fqn, output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


class _OneDraw(DrawMode):
    """Has all draws but one give constants."""

    def __init__(self, notes: DrawNotes, trial: _Trial) -> None:
        super().__init__()
        self._notes, self._trial = notes, trial

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._trial.run(self._notes.note(func, args), func, args, kwargs)


def draws_with_values(model: nn.Module, given: Given) -> tuple[NotedDraw, ...] | None:
    """Return what a model draws, seen by running it; None if it cannot be."""
    subject, notes = deep_copied(model), DrawNotes()
    notes.watch(subject)
    return tuple(notes.draws) if _has_run(subject, given) else None
