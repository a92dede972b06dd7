"""What modules keep in attributes from one call to the next, and which of it depends on the rows.

[Note: kept attributes] A running mean, a queue of features or the last loss may be a tensor or a
number that is a plain attribute, not a buffer. A data-parallel rank makes it of its own rows.
Where a second call returns other results with what the first one left there, the model computes
with it: it is treated as buffers are. Others are only read by the program, which is warned of
them by name: means to print, mostly.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_parallel._torch_private import pytree

from .parts import equal, is_part

# A module, relative to the one that ran, and the name of an attribute of it.
Place = tuple[str, str]
Kept = dict[Place, list[Any]]
OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (int, float, str, type(None))
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)


def kept_in(module: nn.Module) -> Kept:
    """Return the tensors and numbers that modules hold in attributes, and in objects there."""
    seen: dict[int, list[Any]] = {}  # modules share configurations
    return {
        (fqn, name): leaves
        for fqn, each in module.named_modules()
        for name, value in vars(each).items()
        if name not in OF_TORCH and (leaves := _leaves_of(value, seen))
    }


def changed(before: Kept, after: Kept) -> Kept:
    """Return what is not as it was."""
    return {at: x for at, x in after.items() if at not in before or not _same(before[at], x)}


def dependent(whole: Kept, parts: Sequence[Kept], num_rows: int) -> set[Place]:
    """Return what parts do not leave as all ``num_rows`` do, or their part of it."""
    return {
        at
        for at, expected in whole.items()
        if not _is_of_rows(expected, [part.get(at, []) for part in parts], num_rows)
    }


def with_rows(whole: Kept, parts: Sequence[Kept], num_rows: int) -> set[Place]:
    """Return what has something for every row, of which a part of the rows leaves its part."""
    others = dependent(whole, parts, num_rows)
    return {
        at
        for at, expected in whole.items()
        if at not in others and not all(_same(part.get(at, []), expected) for part in parts)
    }


def set_kept(module: nn.Module, other: nn.Module, places: set[Place]) -> None:
    """Give a module what another one holds in some attributes."""
    for fqn, name in places:
        vars(module.get_submodule(fqn))[name] = vars(other.get_submodule(fqn))[name]


def worth_a_warning(
    places: set[Place], module: nn.Module, first: Kept, second: Kept
) -> set[Place]:
    """Return the attributes that a program may take for those of one device.

    Not sizes of the batch, which two calls of the same rows leave alike, nor tensors with a graph:
    a loop differentiates these, and gets a mean over ranks as of any loss.
    """
    return {
        at
        for at in places
        if not (_counts_rows(first[at], second.get(at, first[at])) or _has_graph(module, at))
    }


def _counts_rows(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return all(isinstance(x, int) for x in first) and list(first) == list(second)


def _has_graph(module: nn.Module, place: Place) -> bool:
    value = vars(module.get_submodule(place[0])).get(place[1])
    return isinstance(value, Tensor) and value.requires_grad


def absolute(fqn: str, place: Place) -> Place:
    """Return a place in the model, given one in a module of it."""
    return f"{fqn}.{place[0]}".strip("."), place[1]


def names_of(places: Iterable[Place]) -> frozenset[str]:
    """Return the names of attributes, with those of their modules."""
    return frozenset(".".join(at).strip(".") for at in places)


def settle_attributes(module: nn.Module) -> None:
    """Keep what is made of all rows as the plain tensors that one device has.

    Not a part of the rows, nor what has a gradient: the next call, or the loop, goes on with it.
    """
    for name, value in vars(module).items():
        if name in OF_TORCH:
            continue
        if isinstance(value, list | dict):
            places = value if isinstance(value, dict) else range(len(value))
            for place in places:
                value[place] = _settled(value[place])
        elif isinstance(value, DTensor):
            vars(module)[name] = _settled(value)


def settle_buffers(module: nn.Module, plain: Callable[[Tensor], Tensor]) -> None:
    """Keep what code over all rows has assigned to buffers as the plain tensors that they were.

    Those of parts of the module too: their own code may run on a rank's rows, and read them there.
    """
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and (made := plain(buffer)) is not buffer:
                part._buffers[name] = made


def _settled(x: Any) -> Any:
    if not isinstance(x, DTensor) or x.requires_grad:
        return x
    is_whole = all(p.is_replicate() or p.is_partial() for p in x.placements)
    return x.full_tensor() if is_whole else x


def _leaves_of(value: Any, seen: dict[int, list[Any]]) -> list[Any]:
    if isinstance(value, _PLAIN):
        return [] if isinstance(value, str) or value is None else [value]
    if id(value) not in seen:
        seen[id(value)] = [
            x.detach() if isinstance(x, Tensor) else x
            for leaf in pytree.tree_leaves(value)
            for x in (leaf, *_inside(leaf))
            if isinstance(x, int | float) or _is_plain(x)
        ]
    return seen[id(value)]


def _inside(leaf: Any) -> list[Any]:
    if isinstance(leaf, (Tensor, *_PLAIN, *_CODE)):
        return []
    held: Mapping[str, Any] = getattr(leaf, "__dict__", {})
    return [x for each in held.values() for x in pytree.tree_leaves(each)]


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.device.type != "meta"


def _same(x: Sequence[Any], y: Sequence[Any]) -> bool:
    return len(x) == len(y) and all(map(_equal, x, y))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return isinstance(x, Tensor) and isinstance(y, Tensor) and equal(x, y)
    if isinstance(x, float) and isinstance(y, float):
        return math.isclose(x, y, rel_tol=1e-9) or (math.isnan(x) and math.isnan(y))
    return x == y


def _is_of_rows(whole: Sequence[Any], parts: Sequence[Sequence[Any]], num_rows: int) -> bool:
    if any(len(part) != len(whole) for part in parts):
        return len(whole) == sum(map(len, parts))  # a list with something for every row
    return all(
        all(_equal(x, expected) for x in found)
        or (
            isinstance(expected, Tensor)
            and expected.dim() > 0
            and all(
                isinstance(x, Tensor) and is_part(x, expected, i, num_rows)
                for i, x in enumerate(found)
            )
        )
        for expected, *found in zip(whole, *parts, strict=True)
    )


def differs(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two calls return other tensors or numbers."""
    kinds = int | float | torch.Tensor
    pairs = zip(first, second, strict=False)
    return len(first) != len(second) or not all(
        _equal(x, y) for x, y in pairs if isinstance(x, kinds)
    )
