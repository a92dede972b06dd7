"""Plain tensors that meet those of all rows, the same on all ranks with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_parallel._cross_replica.borders import TRANSFORMED
from vescale_parallel._model.code import writes_to_first
from vescale_parallel._torch_private import current_function_mode, is_transformed, pytree

from .row_converter import (
    AS_ARRAYS,
    EMBEDDINGS,
    RowConverter,
    as_array,
    given_to_embedding,
    is_of_a_part,
    padded,
)
from .writes import Parted, loses_gradient, loss_of_gradient, without_graph


class WithRows(TorchFunctionMode):
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
