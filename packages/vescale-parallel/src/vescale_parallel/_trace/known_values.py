"""Constant propagation: what fake tensors would hold, where that is known.

Forwards look at masks: ``nn.Transformer`` asks whether the one that it has is causal. What is made
of constants and masks alone is computed beside its fake tensor, so that there is an answer. A
parameter, a random number and the batch's data end it: by them another batch may go another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vescale_parallel._torch_private import FakeTensor, pytree

# Elements an operator may see. Masks of 4,096 tokens are inside, most activations are not.
_LARGE_NUMEL = 1 << 24
# What is known though no argument is a tensor, and what has its first argument's shape alone.
_MAKERS = frozenset(("arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros"))
_SHAPED_ALIKE = frozenset(
    ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
)
_UNWRITTEN = frozenset(("empty_like", "new_empty", "new_empty_strided"))


class KnownValues:
    """The values of some fake tensors: real tensors that share memory where the fake ones do."""

    def __init__(self) -> None:
        # Of somebody else until they are asked for: most are not.
        self._given = WeakTensorKeyDictionary()
        self._values = WeakTensorKeyDictionary()

    def give(self, fake: Tensor, value: Tensor) -> None:
        """Say what a fake tensor holds, should that be a mask; ``value`` is not written into."""
        if _is_mask(value):
            self._given[fake] = value

    def has(self, fake: Tensor) -> bool:
        """Return whether something is known of a fake tensor."""
        return fake in self._given or fake in self._values

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
    ) -> list[Any] | None:
        """Run an operator on the values of its arguments.

        Returns:
            The leaves of what it gives, or None where not all of the values are known; what it
            writes into is not known any more then.
        """
        found = None
        if all(isinstance(tensor, FakeTensor) for tensor in _written(func, args, kwargs)):
            found = self._run(func, args, kwargs, inputs)
        if found is None and func._schema.is_mutable:
            self._forget(_written(func, args, kwargs))
        return found

    def note(self, outputs: Sequence[Any], values: Sequence[Any]) -> None:
        """Remember what :meth:`run` returned for the fake tensors that stand for it."""
        for fake, value in zip(outputs, values, strict=True):
            if isinstance(fake, FakeTensor):
                self._values[fake] = value

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]
    ) -> list[Any] | None:
        name = func._schema.name.rpartition("::")[2]
        if name in _UNWRITTEN or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if not inputs and name not in _MAKERS:
            return None
        known: dict[int, Tensor] = {}
        for position, tensor in enumerate(inputs):
            value = self._of(tensor)
            if value is None and position == 0 and name in _SHAPED_ALIKE:
                value = torch.empty(tensor.shape, dtype=tensor.dtype)
            if value is None:
                return None
            known[id(tensor)] = value
        if sum(value.numel() for value in known.values()) > _LARGE_NUMEL:
            return None
        given: dict[str, Any] = dict(kwargs)
        if given.get("device") is not None:
            given["device"] = torch.device("cpu")
        args, given = pytree.tree_map_only(Tensor, lambda t: known[id(t)], (args, given))
        try:
            with torch.no_grad():
                return pytree.tree_leaves(func(*args, **given))
        # Of half precision the CPU lacks some operators.
        except (NotImplementedError, RuntimeError):
            return None

    def _of(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, FakeTensor):
            if tensor in self._given:
                self._values[tensor] = _copy(self._given.pop(tensor))
            return self._values.get(tensor)
        if tensor.is_meta or tensor.requires_grad:
            return None
        # Integers of the run are its own; other real tensors may be anybody's.
        return _copy(tensor) if tensor.is_floating_point() else tensor

    def _forget(self, written: Sequence[Tensor]) -> None:
        storages = {tensor.untyped_storage() for tensor in written}
        for fakes in (self._given, self._values):
            for fake in [fake for fake in fakes if fake.untyped_storage() in storages]:
                del fakes[fake]


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor has nothing but zeros, ones and what stands for -inf."""
    if tensor.dim() < 2 or tensor.numel() > _LARGE_NUMEL or tensor.is_complex():
        return False
    tensor = tensor.detach()
    return bool(((tensor == 0) | (tensor == 1) | (tensor < -1e4)).all())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes into."""
    if not func._schema.is_mutable:
        return []
    given = dict(enumerate(args))
    values = [
        given.get(index, kwargs.get(argument.name))
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
