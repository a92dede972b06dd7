"""Copies of a parallelized model: those that averages of its weights are kept in.

[Note: copies of a model] What ``parallelize`` adds to a model (hooks, groups of parameters, an
engine) belongs to that one. So a copy is parallelized, as the model was: from the modules as they
were before, without values, with the same plan and example. Then it gets the values of the model's
shards, which are cut alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import Box, DTensor
from vescale_parallel._model.copies import (
    copied_with_hooks,
    meta_parameter,
    on_meta,
    tensors_in_attributes,
)

_SCALARS = (bool, int, float, str, type(None))


class ModelCopies:
    """Makes copies of a model that is about to be parallelized.

    Args:
        model: As it still is.
        change: Parallelizes one in place, given how its values are read.
    """

    def __init__(self, model: nn.Module, change: Callable[[nn.Module, Any], None]) -> None:
        self._change, self._why_not = change, ""
        self._before: nn.Module | None = None
        try:
            memo: dict[int, Any] = {id(t): t for _, _, t in tensors_in_attributes(model)}
            memo |= {id(p): meta_parameter(p) for p in model.parameters()}
            memo |= {id(buffer): on_meta(buffer) for buffer in model.buffers()}
            self._before = copied_with_hooks(model, memo)
        # Arbitrary attributes of a user's modules: locks, files, process groups.
        except Exception as error:
            self._why_not = f"{type(error).__name__}: {error}"

    def copy(self, model: nn.Module) -> nn.Module:
        """Return a copy of the parallelized model. Every rank must call this.

        Raises:
            TypeError: If it had attributes that cannot be copied.
        """
        if self._before is None:
            raise TypeError(
                f"{type(model).__name__} cannot be copied: before parallelize it held what "
                f"copy.deepcopy does not copy ({self._why_not})"
            )
        memo: dict[int, Any] = {id(p): meta_parameter(p) for p in self._before.parameters()}
        theirs = dict(model.named_buffers(remove_duplicate=False))
        for fqn, buffer in self._before.named_buffers(remove_duplicate=False):
            memo[id(buffer)] = theirs[fqn].detach().clone()
        made = copied_with_hooks(self._before, memo)
        self._change(made, _read)
        object.__setattr__(made, "_vescale_copies", self)
        _take_values(made, model)
        return made


def _read(tensor: Tensor, box: Box) -> Tensor:
    """Return a box of a buffer; of a parameter memory that is filled afterwards."""
    return torch.zeros(box.shape, dtype=tensor.dtype) if tensor.is_meta else tensor[box.slices]


def _take_values(made: nn.Module, model: nn.Module) -> None:
    own: Any
    held: Any
    for (fqn, own), (_, held) in zip(
        made.named_parameters(), model.named_parameters(), strict=True
    ):
        assert isinstance(own, DTensor)
        assert own.placements == held.placements, fqn
        own.requires_grad_(held.requires_grad)
        with torch.no_grad():
            own._local_tensor.copy_(held._local_tensor)
    for own, held in zip(made.modules(), model.modules(), strict=True):
        for name, value in vars(held).items():
            if isinstance(value, _SCALARS) and name in vars(own):
                vars(own)[name] = value
