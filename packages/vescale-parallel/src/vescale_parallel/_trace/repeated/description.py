"""What decides what a call does: its module and arguments, as one value that can be compared."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._torch_private import FakeTensor
from vescale_parallel._trace.known_values import KnownValues

from .attribute_reads import Attribute

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
# Of one call: what is larger is not compared.
_MOST_OBJECTS, _MOST_ELEMENTS = 10_000, 1 << 22
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class NotComparableError(Exception):
    """There is something that cannot be told to be equal."""


class Description:
    """Describes values one after the other, those that it has met before by when it did.

    Two calls whose descriptions are equal compute the same, as far as their modules and
    arguments decide it: floating-point tensors have no values here, what has is compared by
    value, and what cannot be looked into is the same object.

    Attributes:
        tensors: All that there were, in order, each once.
        objects: What is described by identity, which is not to be used again.
    """

    def __init__(
        self, values: KnownValues, varying: Collection[Attribute], own_hooks: Collection[int]
    ) -> None:
        self.tensors: list[Tensor] = []
        self.objects: list[object] = []
        self._values, self._varying, self._own_hooks = values, varying, own_hooks
        self._met: dict[int, int] = {}
        self._storages: dict[torch.UntypedStorage, int] = {}

    def block(self, module: nn.Module) -> object:
        """Describe a block. Hooks on itself run around what it computes, whoever does that."""
        return self._module(module, hooked=True)

    def of(self, value: Any) -> object:
        """Describe any value.

        Raises:
            NotComparableError: If it holds too much.
        """
        if isinstance(value, _PLAIN):
            return type(value), value
        if id(value) in self._met:
            return "met", self._met[id(value)]
        if len(self._met) > _MOST_OBJECTS:
            raise NotComparableError
        self._met[id(value)] = len(self._met)
        self.objects.append(value)  # or its identity would be used again
        match value:
            case Tensor():
                return self._tensor(value)
            case nn.Module():
                return self._module(value, hooked=False)
            case enum.Enum():
                return type(value), value.name
            case dict():
                return type(value), tuple((self.of(k), self.of(v)) for k, v in value.items())
            case list() | tuple():
                return type(value), tuple(map(self.of, value))
            case set() | frozenset() if all(isinstance(each, _PLAIN) for each in value):
                return type(value), frozenset((type(each), each) for each in value)
            case _:
                return self._object(value)

    def _object(self, value: Any) -> object:
        match value:
            case types.FunctionType():
                cells = tuple(map(self._cell, value.__closure__ or ()))
                given = self.of(value.__defaults__), self.of(value.__kwdefaults__)
                return "function", id(value.__code__), id(value.__globals__), cells, given
            case types.MethodType():
                return "method", self.of(value.__func__), self.of(value.__self__)
            case functools.partial():
                return "partial", *map(self.of, (value.func, value.args, value.keywords))
            case type() | types.ModuleType() | types.BuiltinFunctionType():
                return "object", id(value)
            case _ if type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
                return type(value), self.of(vars(value))
            case _:
                return "object", id(value)

    def _cell(self, cell: types.CellType) -> object:
        try:
            return self.of(cell.cell_contents)
        except ValueError:  # nothing is in it yet
            return "empty"

    def _module(self, module: nn.Module, *, hooked: bool) -> object:
        if isinstance(module, torch.jit.ScriptModule):
            raise NotComparableError
        foreign = {
            number for name in _HOOKS for number in vars(module)[name]
        }.difference(self._own_hooks)  # fmt: skip
        if foreign and not hooked:
            raise NotComparableError
        cls = type(module)
        found = tuple(
            (name, None if (cls, name) in self._varying else self.of(value))
            for name, value in vars(module).items()
            if not _is_passed_over(name) and (name != "forward" or not hooked)
        )
        return cls, found

    def _tensor(self, tensor: Tensor) -> object:
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor):
            raise NotComparableError
        if tensor.layout is not torch.strided:
            raise NotComparableError
        self.tensors.append(tensor)
        storage = tensor.untyped_storage()
        shared = self._storages.setdefault(storage, len(self._storages))
        told = (
            type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
            str(tensor.device), tensor.requires_grad, tensor.is_leaf, storage.nbytes(), shared,
        )  # fmt: skip
        return told, self._contents(tensor)

    def _contents(self, tensor: Tensor) -> object:
        """Describe what a tensor holds: nothing, if it is fake and nobody knows."""
        if isinstance(tensor, FakeTensor):
            return id(tensor) if self._values.has(tensor) else None
        if tensor.is_meta:
            return None
        if tensor.numel() > _MOST_ELEMENTS or tensor.dtype.is_floating_point:
            return id(tensor)
        return tensor.detach().contiguous().cpu().numpy().tobytes()


def _is_passed_over(name: str) -> bool:
    """Whether an attribute of a module is about hooks, which are looked at apart."""
    return name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


def described(
    make: Callable[[], Description], block: nn.Module, args: object, kwargs: Mapping[str, Any]
) -> tuple[object, Description] | None:
    """Describe a call of a block; None if it cannot be compared with others."""
    found = make()
    try:
        return (found.block(block), found.of((args, dict(kwargs)))), found
    except (NotComparableError, RecursionError):
        return None
