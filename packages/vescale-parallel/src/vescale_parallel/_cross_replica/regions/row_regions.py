"""Run code in which rows depend on each other on distributed tensors of the global batch.

[Note: regions] Data-parallel ranks run a model on plain tensors, their part of the rows. Where
:mod:`.check` found that rows depend on each other, a module's own code gets distributed tensors
of the whole batch instead, cut along the rows: a sum is the sum over all ranks, a size is that of
the global batch. Modules that it calls and in which rows do not depend on each other get plain
parts again, so that the bulk of the work stays as it is. Parameters and other plain tensors that
meet distributed ones are the same on all ranks.

[Note: gradients of regions] The engine averages parameters' gradients over the R data-parallel
ranks. So among plain tensors the gradient of a rank's rows is R times one device's, and the mean
over ranks of the gradients of what all of them hold is one device's. Among distributed tensors
gradients are one device's. Hence the factors below.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._cross_replica.borders import NOWHERE, RowCoupling, Rows
from vescale_parallel._cross_replica.kept import settle_attributes, settle_buffers
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import LiftPlain
from vescale_parallel._torch_private import pytree

from .own_hooks import LeftCall, OwnHooks
from .row_converter import RowByRow, RowConverter, bounds_error
from .rows_mode import WithRows


class RowRegions:
    """Carries out where rows depend on each other, for one model on one rank.

    ``with_tp`` are the axes of data- and tensor-parallel ranks together. ``by_row`` are modules of
    which it is known that they take and return rows, in all of their tensors and without a look at
    other rows: experts that ranks share, which send each its own. ``listed`` are such experts in
    lists, which get no rows themselves: what calls them sends :meth:`part_of` those of all ranks.
    Of either, rows that a region has picked are shared out as equally as they divide.

    Attributes:
        coupling: Of the call that runs.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        tp_mesh: DeviceMesh | None,
        with_tp: DeviceMesh | None,
        lift: LiftPlain | None,
        by_row: Mapping[str, RowByRow] | None = None,
        listed: Collection[str] = (),
    ) -> None:
        self._by_row = by_row or {}
        self._in_lists = tuple(f"{expert}." for expert in listed)
        self._converter = RowConverter(mesh, tp_mesh, with_tp)
        self._lift = lift
        self._mode = WithRows(self._converter)
        self._wrapped: dict[str, nn.Module] = {}
        self._hooked: set[str] = set()
        self._model: nn.Module | None = None
        self._own: set[int] = set()  # parameters of the model, which ZeRO 3 shows as shards
        # Whether a region's own code runs, and the calls that it left, innermost last.
        self._is_inside = False
        self._left: list[LeftCall] = []
        self._hooks = OwnHooks(self._as_caller)
        self.coupling = NOWHERE

    @contextmanager
    def of_call(self, coupling: RowCoupling, num_rows: int) -> Iterator[None]:
        """Begin a call of the model, which has ``num_rows`` on this rank.

        And in what backward runs again of it, so what is known stays until the next call that
        makes a graph.
        """
        before = self.coupling, self._converter.num_rows
        self.coupling, self._converter.num_rows = coupling, num_rows
        try:
            yield
            for fqn, module in self._wrapped.items():
                if coupling.is_region(fqn):
                    settle_attributes(module)
        finally:
            self._is_inside = False
            self._left.clear()
            self._hooks.forget()
            if not torch.is_grad_enabled():
                self.coupling, self._converter.num_rows = before

    def prepare(self, model: nn.Module, fqns: Iterable[str]) -> None:
        """Wrap modules now, in case rows depend on each other in them; others wrap them later."""
        for fqn in fqns:
            if fqn not in {*self._wrapped, *self._by_row} and not self._is_in_list(fqn):
                module = self._wrapped[fqn] = model.get_submodule(fqn)
                module.forward = self._over_all_rows(module, module.forward, fqn)

    def watch(self, model: nn.Module, coupling: RowCoupling) -> None:
        """Have modules compute over all rows where a check has found that they need them."""
        names = coupling.names([name for name, _ in model.named_modules()])
        self.prepare(model, names)
        self._model, modules = model, {id(each) for each in model.modules()}
        self._own.update(map(id, model.parameters()))
        for fqn in {*names, *self._by_row}:
            if self._is_in_list(fqn):
                continue
            module = model.get_submodule(fqn)
            if fqn not in self._hooked:
                self._hooked.add(fqn)
                leave = functools.partial(self._leave, fqn)
                module.register_forward_pre_hook(leave, prepend=True, with_kwargs=True)
                module.register_forward_hook(self._return, always_call=True, with_kwargs=True)
            self._hooks.put_on(module, modules)

    def _is_in_list(self, fqn: str) -> bool:
        """Whether a module is one of experts in a list, of which no row looks at another one.

        The check that looks for rows that do gives experts other numbers of them, and may err.
        """
        return f"{fqn}.".startswith(self._in_lists) if self._in_lists else False

    @property
    def is_inside(self) -> bool:
        """Whether a region's own code runs."""
        return self._is_inside

    def is_whole(self, tree: Any) -> bool:
        """Whether any tensor of a tree is of the batch of all ranks."""
        return self._converter.is_any_whole(tree)

    @contextmanager
    def on_parts(self) -> Iterator[None]:
        """Run code that a region calls on plain tensors of this rank."""
        was_inside, self._is_inside = self._is_inside, False
        if was_inside:
            self._mode.pause()
        try:
            yield
        finally:
            self._is_inside = was_inside
            if was_inside:
                self._mode.resume()

    def part_of(self, rows: Tensor) -> Tensor:
        """Return this rank's part of rows that a region has picked, of any number."""
        return self._converter.to_parts(self._converter.replicated(rows), [Rows(0)])

    def whole_of(self, made: Tensor, rows: Tensor) -> Tensor:
        """Return what ranks made of their parts of rows, of all of them."""
        return self._converter.whole_like(made, rows, Rows(0))

    def _over_all_rows(
        self, module: nn.Module, forward: Callable[..., Any], fqn: str
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.coupling.is_region(fqn):
                return forward(*args, **kwargs)
            if self._is_inside or self._converter.is_any_whole((args, kwargs)):
                with contextlib.nullcontext() if self._is_inside else self._inside():
                    output = forward(*args, **kwargs)
                    settle_buffers(module, self._converter.as_values)
                    return output
            rows = self.coupling.rows_of_module(fqn, (args, kwargs))
            if rows is None:
                raise ValueError(
                    f"rows of the batch depend on each other in {fqn or 'the model'!r} "
                    f"({self.coupling.reason(fqn)}), and where they are in what it is called "
                    "with could not be told; use data_parallel.size 1, or give it tensors whose "
                    "first dim is the batch"
                )
            if any(isinstance(where, Rows) and where.bounds for where in rows.inputs):
                raise ValueError(bounds_error(fqn, self.coupling.reason(fqn)))
            given = self._converter.to_rows((args, kwargs), rows.inputs)
            with self._inside():
                args, kwargs = given = self._hooks.before_all_rows(module, given)
                output = forward(*args, **kwargs)
                output = self._hooks.behind_all_rows(module, given, output)
                settle_buffers(self._written_in(module), self._converter.as_values)
                output = self._converter.rows_made_inside(output, rows.outputs)
                return self._converter.to_parts(output, rows.outputs, is_model=not fqn)

        return run

    def _written_in(self, region: nn.Module) -> nn.Module:
        """Return the module to whose buffers a region writes, or a hook of the model on it."""
        return self._model if self._model is not None and self._hooks.are_on(region) else region

    @contextmanager
    def _inside(self) -> Iterator[None]:
        if self._lift is not None:
            self._lift.begin()  # below this mode, which ends before it
        self._is_inside, was_paused = True, self._mode.is_paused
        self._mode.is_paused = False
        try:
            with self._mode:
                yield
        finally:
            self._is_inside, self._mode.is_paused = False, was_paused
            self._mode.parted.forget()

    def _leave(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a module that a region calls: give it this rank's part, if that is right."""
        # Not inside, but on the whole batch, is what checkpoint runs again in backward.
        is_whole = self._is_inside or self._converter.is_any_whole((args, kwargs))
        left = self._left_call(fqn, module, (args, kwargs)) if is_whole else None
        enters = not is_whole and self.coupling.is_region(fqn)
        self._hooks.begin(module, left, enters=enters)
        if left is None:
            return None
        settle_buffers(module, self._converter.as_held)
        if self._is_inside:
            self._mode.pause()
        self._left.append(left)
        self._is_inside = False
        return left.parts(left.given)

    def _left_call(self, fqn: str, module: nn.Module, given: tuple[Any, Any]) -> LeftCall | None:
        """Return how a region's call runs on parts; None if it runs on the whole batch, as it."""
        if any(map(self._is_made_of_all_rows, module.parameters())):
            return None
        known = self._parts_for(fqn, given)
        return known and LeftCall(module, given, *known, goes_on=self._is_inside)

    @contextmanager
    def _as_caller(self) -> Iterator[None]:
        """Run code of what has left the call that begins."""
        if not self._left[-1].goes_on:
            yield
            return
        self._is_inside = True
        self._mode.resume()
        try:
            yield
        finally:
            self._mode.pause()
            self._is_inside = False

    def _is_made_of_all_rows(self, param: Tensor) -> bool:
        """Whether functional_call, say, has hung it there; the model's own may be shards."""
        return id(param) not in self._own and self._converter.is_inside(param)

    def _parts_for(
        self, fqn: str, tree: Any
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
        """Return what makes parts of what a module is given, and whole what it returns."""
        if fqn in self._by_row:
            return self._picked_for(self._by_row[fqn], tree)
        rows = self.coupling.rows_of_module(fqn, tree)
        if rows is None or self.coupling.is_region(fqn):
            return None

        def of_rows(tree: Any) -> Any:
            is_whole = self._converter.is_any_whole(tree)
            return self._converter.rows_made_inside(tree, rows.inputs) if is_whole else tree

        made = of_rows(tree)
        if not self._converter.divides(made, rows.inputs):
            return None  # what a mask has picked
        return (
            # A hook before the module may have replaced it.
            lambda given: self._converter.to_parts(
                made if given is tree else of_rows(given), rows.inputs
            ),
            functools.partial(self._converter.to_rows, rows=rows.outputs),
        )

    def _picked_for(
        self, module: RowByRow, tree: Any
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return the same of any number of rows, which a region may have picked."""
        tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
        # Once, since whole tensors that are sharded are gathered for it.
        rows = [module.rows_of_each(self._converter.replicated(x)) for x in tensors]

        def parts(given: Any) -> Any:
            leaves, spec = pytree.tree_flatten(given)
            mine = [x for x in leaves if isinstance(x, Tensor)]
            if given is not tree:  # a hook before the module has replaced it
                rows[:] = [module.rows_of_each(self._converter.replicated(x)) for x in mine]
            made = iter(self._converter.to_parts(rows, [Rows(1)] * len(rows)))
            taken = [
                module.as_taken(next(made), x.dim()) if isinstance(x, Tensor) else x
                for x in leaves
            ]
            return pytree.tree_unflatten(taken, spec)

        def whole(made: Tensor) -> Tensor:
            every = self._converter.whole_like(module.rows_of_each(made), rows[0], Rows(1))
            return module.as_taken(every, 2).reshape(*tensors[0].shape[:-1], made.shape[-1])

        return parts, whole

    def _return(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Behind such a module: go on with the whole batch, and with the model's hooks."""
        if not self._left or self._left[-1].module is not module or self._is_inside:
            return None
        left = self._left.pop()
        self._is_inside = left.goes_on
        if self._is_inside:
            self._mode.resume()
        self._hooks.returned(left)
        # A module that raised has no output.
        return None if output is None else left.whole(output)
