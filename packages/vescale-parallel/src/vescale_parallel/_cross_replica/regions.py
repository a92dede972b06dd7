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
from torch.overrides import TorchFunctionMode

from vescale_parallel._model.code import writes_to_first
from vescale_parallel._model.copies import is_of_module
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import LiftPlain
from vescale_parallel._torch_private import current_function_mode, is_transformed, pytree

from .borders import NOWHERE, TRANSFORMED, RowCoupling, Rows
from .kept import settle_attributes, settle_buffers
from .row_converter import (
    AS_ARRAYS,
    EMBEDDINGS,
    RowByRow,
    RowConverter,
    as_array,
    bounds_error,
    given_to_embedding,
    is_of_a_part,
    padded,
)
from .writes import Parted, loses_gradient, loss_of_gradient, without_graph


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
        self._mode = _WithRows(self._converter)
        self._wrapped: dict[str, nn.Module] = {}
        self._hooked: set[str] = set()
        self._model: nn.Module | None = None
        self._modules = set[int]()
        # Hooks of regions that ran with them, which are not to run behind them again.
        self._ran: dict[int, tuple[nn.Module, Any]] = {}
        self._own: set[int] = set()  # parameters of the model, which ZeRO 3 shows as shards
        # Whether a region's own code runs, and the modules that it left to run on parts,
        # innermost last, with what makes their outputs whole, and whether it runs again behind
        # them.
        self._is_inside = False
        self._left: list[tuple[nn.Module, Callable[[Any], Any], bool]] = []
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
        self._model, self._modules = model, {id(each) for each in model.modules()}
        self._own.update(map(id, model.parameters()))
        for fqn in {*names, *self._by_row}:
            if fqn in self._hooked or self._is_in_list(fqn):
                continue
            self._hooked.add(fqn)
            module = model.get_submodule(fqn)
            leave = functools.partial(self._leave, fqn)
            module.register_forward_pre_hook(leave, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._return, always_call=True, with_kwargs=True)
            # The model's own hooks are code of what calls the module: they get all rows, as that.
            for key in [*module._forward_hooks]:
                if is_of_module(module._forward_hooks[key], self._modules):
                    module._forward_hooks[key] = module._forward_hooks.pop(key)

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
            args, kwargs = self._converter.to_rows((args, kwargs), rows.inputs)
            with self._inside():
                output = forward(*args, **kwargs)
                output = self._with_own_hooks(module, args, kwargs, output)
                settle_buffers(module, self._converter.as_values)
                output = self._converter.rows_made_inside(output, rows.outputs)
                return self._converter.to_parts(output, rows.outputs, is_model=not fqn)

        return run

    def _with_own_hooks(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return what own hooks of a region make of all rows: they are code of it."""
        for key, hook in [*module._forward_hooks.items()]:
            if is_of_module(hook, self._modules):
                named = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
                made = hook(module, args, *named, output)
                output = output if made is None else made
                self._ran[key] = module, module._forward_hooks.pop(key)
        if self._ran and self._model is not None:
            settle_buffers(self._model, self._converter.as_values)
        return output

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
        if not (self._is_inside or self._converter.is_any_whole((args, kwargs))):
            return None
        if any(map(self._is_made_of_all_rows, module.parameters())):
            return None
        left = self._parts_for(fqn, (args, kwargs))
        if left is None:
            return None
        given, whole = left
        settle_buffers(module, self._converter.as_held)
        if self._is_inside:
            self._mode.pause()
        self._left.append((module, whole, self._is_inside))
        self._is_inside = False
        return given

    def _is_made_of_all_rows(self, param: Tensor) -> bool:
        """Whether functional_call, say, has hung it there; the model's own may be shards."""
        return id(param) not in self._own and self._converter.is_inside(param)

    def _parts_for(self, fqn: str, tree: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        """Return what a module is given of a call, and what makes whole what it returns.

        None for what runs on the whole batch, as the region's own code.
        """
        if fqn in self._by_row:
            return self._picked_for(self._by_row[fqn], tree)
        rows = self.coupling.rows_of_module(fqn, tree)
        if rows is None or self.coupling.is_region(fqn):
            return None
        if self._converter.is_any_whole(tree):
            tree = self._converter.rows_made_inside(tree, rows.inputs)
        if not self._converter.divides(tree, rows.inputs):
            return None  # what a mask has picked
        return (
            self._converter.to_parts(tree, rows.inputs),
            functools.partial(self._converter.to_rows, rows=rows.outputs),
        )

    def _picked_for(self, module: RowByRow, tree: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the same of any number of rows, which a region may have picked."""
        leaves, spec = pytree.tree_flatten(tree)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        rows = [module.rows_of_each(self._converter.replicated(x)) for x in tensors]
        parts = iter(self._converter.to_parts(rows, [Rows(1)] * len(rows)))
        given = [
            module.as_taken(next(parts), x.dim()) if isinstance(x, Tensor) else x for x in leaves
        ]

        def whole(made: Tensor) -> Tensor:
            every = self._converter.whole_like(module.rows_of_each(made), rows[0], Rows(1))
            return module.as_taken(every, 2).reshape(*tensors[0].shape[:-1], made.shape[-1])

        return pytree.tree_unflatten(given, spec), whole

    def _return(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Behind such a module, or a region: go on with the whole batch, and with its hooks."""
        for key in [key for key, (ran, _) in self._ran.items() if ran is module]:
            module._forward_hooks[key] = self._ran.pop(key)[1]
        if not self._left or self._left[-1][0] is not module or self._is_inside:
            return None
        _, whole, self._is_inside = self._left.pop()
        if self._is_inside:
            self._mode.resume()
        # A module that raised has no output.
        return None if output is None else whole(output)


class _WithRows(TorchFunctionMode):
    """Has plain tensors that meet distributed ones be the same on all ranks, gradients too."""

    def __init__(self, converter: RowConverter) -> None:
        super().__init__()
        self._converter = converter
        self.parted = Parted()
        self.is_paused = False

    def pause(self) -> None:
        """Cost nothing while a module runs on plain tensors."""
        if current_function_mode() is self:
            self.__exit__(None, None, None)
        else:
            self.is_paused = True  # below a mode that the model's code has entered

    def resume(self) -> None:
        """Go on."""
        if self.is_paused:
            self.is_paused = False
        else:
            self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, named = tuple(args), dict(kwargs or {})
        if self.is_paused:
            return func(*args, **named)
        try:
            return self._called(func, args, named)
        except RuntimeError as error:
            if not is_transformed():
                raise
            raise ValueError(TRANSFORMED) from error

    def _called(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, named)) if isinstance(x, Tensor)]
        if self.parted.has_lost(tensors) and not writes_to_first(func):
            raise ValueError(loss_of_gradient(func))
        if not tensors:
            # Made from nothing (an index, zeros to add to): what ranks make is the same.
            made = func(*args, **named)
            return self._converter.replicated(made) if type(made) is Tensor else made
        if func is torch.autograd.grad:
            return self._gradients(*args, **named)
        if func in AS_ARRAYS and self._converter.is_inside(tensors[0]):
            return as_array(func, *args, **named)
        if len(tensors) > 1 and any(map(self._converter.is_inside, tensors)):
            if writes_to_first(func) and loses_gradient(tensors):
                if not self.parted.take(tensors[0]):
                    raise ValueError(loss_of_gradient(func))
                args, named = pytree.tree_map_only(Tensor, without_graph, (args, named))
            if func == _SET_DATA and not self._converter.is_inside(args[0]):
                return func(args[0], args[1].full_tensor())
            if func in EMBEDDINGS:
                named = given_to_embedding(func, args, named)
            if any(is_of_a_part(x) for x in tensors if not self._converter.is_inside(x)):
                raise ValueError(_OF_A_PART)
            name = getattr(func, "__name__", "")
            if name == "_pad_packed_sequence":
                return padded(*args, **named)
            is_read = name in _PACKED  # how many go on at each step, by torch's C++ from memory
            held = self._replicated_floats if is_read else self._converter.replicated
            args, named = pytree.tree_map_only(Tensor, held, (args, named))
            return func(*args, **named)
        made = func(*args, **named)
        if torch.is_grad_enabled():
            self.parted.see(func, tensors[0], made)
        return made

    def _replicated_floats(self, x: Tensor) -> Tensor:
        return self._converter.replicated(x) if x.is_floating_point() else x

    def _gradients(
        self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **named: Any
    ) -> tuple[Tensor | None, ...]:
        """Differentiate by parameters themselves, of whose gradients each rank has a part."""
        of_all_rows = any(map(self._converter.is_inside, pytree.tree_leaves(outputs)))
        if of_all_rows:
            grad_outputs = pytree.tree_map_only(Tensor, self._converter.replicated, grad_outputs)
        made = torch.autograd.grad(outputs, inputs, grad_outputs, *args, **named)
        by = [inputs] if isinstance(inputs, Tensor) else inputs
        return tuple(
            grad
            if grad is None or not of_all_rows or self._converter.is_inside(each)
            else self._converter.mean(grad)
            for each, grad in zip(by, made, strict=True)
        )


_PACKED = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_OF_A_PART = (
    "what a module made of this rank's rows meets what is made of all rows of the batch, and the "
    "module handed it over by a list or an object outside of the model; return it, or keep it in "
    "an attribute of the module (self.aux_loss = ...) that the model's forward reads"
)
_SET_DATA: Any = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]: a descriptor
