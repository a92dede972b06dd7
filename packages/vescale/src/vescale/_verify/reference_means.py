"""Means that one device computes as ranks do, shard after shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class GlobalMeans(TorchFunctionMode):
    """Has shards divide by the targets that count in all of them, once they are counted.

    A forward may compute several means, of which each has targets of its own: where an answer
    begins and where it ends, masked tokens and the next sentence. They are told apart by their
    order in a forward.
    """

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.is_counting = True
        self._num_parts, self._counts, self._index = num_parts, list[Tensor](), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (F.cross_entropy, F.nll_loss):
            return func(*args, **kwargs)
        given = signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        target: Tensor = given.arguments["target"]
        if given.arguments["reduction"] != "mean" or target.is_floating_point():  # of classes
            return func(*args, **kwargs)
        index, self._index = self._index, self._index + 1
        if self.is_counting:
            self._counts.append(_count(**given.arguments))
        given.arguments["reduction"] = "sum"
        summed = func(*given.args, **given.kwargs)
        return summed * self._num_parts / self._counts[index].to(summed.dtype)

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """Be the mode of one forward."""
        self._index = 0
        with self:
            yield

    @contextmanager
    def left_in(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Leave the mode while these run, which run as they are written where a mode looks on."""
        handles: list[Any] = []

        def leave(block: nn.Module, args: Any) -> None:
            self.__exit__(None, None, None)

        def come_back(block: nn.Module, args: Any, output: Any) -> None:
            self.__enter__()

        for block in blocks:  # within what the model's own engine does around them
            handles.append(block.register_forward_pre_hook(leave))
            handles.append(block.register_forward_hook(come_back, prepend=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _count(
    *, input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, **_: Any
) -> Tensor:
    """Return what torch divides the mean over some targets by."""
    counting = target[target != ignore_index]
    if weight is None:
        return torch.tensor(counting.numel(), device=input.device)
    return weight[counting].sum()


def mean_in_order(grads: Sequence[Tensor | None], copies: int) -> Tensor | None:
    """Return the mean of ranks' gradients, summed over the shards of a copy, then over copies."""
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return None
    found = [torch.zeros_like(like) if grad is None else grad for grad in grads]
    shards = len(found) // copies
    sums = [_sum(found[at : at + shards]) for at in range(0, len(found), shards)]
    return _sum(sums) / len(found)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Add up in order; those of half precision in float32, rounded once, as all_reduce does."""
    dtype = tensors[0].dtype
    total = tensors[0].float() if dtype.itemsize == 2 else tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total.to(dtype)
