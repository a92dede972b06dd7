"""State as data: nested dicts turned into tagged JSON with references to tensors, and back.

Plain JSON stands for itself. What JSON lacks is an object with a single key that starts with
a dollar sign: ``{"$tensor": key}``, ``{"$tuple": [...]}``, ``{"$float": "inf"}``,
``{"$dict": [[key, value], ...]}`` for dicts whose keys are not all plain strings, and
``{"$per_rank": [...]}`` with the value of every rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from ._per_rank import PerRank
from .exceptions import CheckpointError, CorruptCheckpointError, MismatchError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that hands out its state as a dict and takes it back: modules, optimizers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state split into what is JSON and what is tensors.

    Attributes:
        tree: The whole state as tagged JSON.
        tensors: The tensors it refers to, by dotted key.
        groups: The top-level key of each tensor and its key below that.
        values: Every Python value by its dotted key, to compare ranks.
        per_rank: What each rank has its own of, by dotted key: a list, part of the tree, with
            this rank's value.
        per_rank_tensors: The keys of the tensors in those values.
    """

    tree: dict[str, Json]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    groups: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    values: dict[str, Json] = field(default_factory=dict[str, Json])
    per_rank: dict[str, list[Json]] = field(default_factory=dict[str, list[Json]])
    per_rank_tensors: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def note(self, path: tuple[str | int, ...], value: Json) -> None:
        """Remember a Python value; keys that look alike when dotted are told apart."""
        key = dotted(path)
        while key in self.values:
            key += "'"
        self.values[key] = value


def dotted(path: tuple[str | int, ...]) -> str:
    """Return the key of a leaf as messages and files show it."""
    return ".".join(map(str, path))


def encode(state: Mapping[str, Any]) -> Encoded:
    """Split ``state`` into tagged JSON and tensors.

    Raises:
        CheckpointError: If a value is of a type that cannot be stored without pickle, or two
            tensors would get the same dotted key.
    """
    encoded = Encoded({})
    for key, value in state.items():
        if type(key) is not str or not key:
            raise CheckpointError(f"expected non-empty strings as keys of the state, got {key!r}")
        encoded.tree[key] = _encode(value, (key,), encoded)
    return encoded


def _encode(value: Any, path: tuple[str | int, ...], encoded: Encoded) -> Json:
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, encoded)
    if isinstance(value, PerRank):
        return _encode_per_rank(value, path, encoded)
    if isinstance(value, Stateful):
        return _encode(value.state_dict(), path, encoded)
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, encoded)
    if type(value) in (list, tuple, torch.Size):
        if not value:
            encoded.note(path, type(value).__name__)
        items: list[Json] = [_encode(v, (*path, i), encoded) for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    scalar = _encode_scalar(value, path)
    encoded.note(path, scalar)
    return scalar


def _encode_tensor(
    tensor: torch.Tensor, path: tuple[str | int, ...], encoded: Encoded
) -> dict[str, Json]:
    key = dotted(path)
    if key in encoded.tensors:
        raise CheckpointError(
            f"two tensors of the state have the key {key!r}: one key contains a dot that the "
            f"other spells by nesting; rename one of them"
        )
    if dotted(path[1:] or path) == "__metadata__":
        raise CheckpointError(f"{key!r}: safetensors reserves this name; rename it")
    encoded.tensors[key] = tensor
    encoded.groups[key] = (str(path[0]), dotted(path[1:])) if len(path) > 1 else ("", key)
    return {"$tensor": key}


def _encode_per_rank(value: PerRank, path: tuple[str | int, ...], encoded: Encoded) -> Json:
    own = Encoded({})
    node = [_encode(value.value, path, own)]
    if own.per_rank:
        raise CheckpointError(f"{dotted(path)!r} is a PerRank in a PerRank; leave out one")
    for key in own.tensors:
        if key in encoded.tensors:
            raise CheckpointError(f"two tensors of the state have the key {key!r}")
    encoded.tensors.update(own.tensors)
    encoded.groups.update(own.groups)
    encoded.note(path, "per rank")
    encoded.per_rank[dotted(path)] = node
    encoded.per_rank_tensors[dotted(path)] = list(own.tensors)
    return {"$per_rank": node}


def _encode_mapping(
    value: Mapping[Any, Any], path: tuple[str | int, ...], encoded: Encoded
) -> Json:
    if not value:
        encoded.note(path, "dict")
    for key in value:
        if type(key) not in (str, int):
            raise CheckpointError(
                f"expected str or int keys in the dict at {dotted(path)!r}, got {key!r} "
                f"({type(key).__name__})"
            )
    items = [(key, _encode(item, (*path, key), encoded)) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[key, item] for key, item in items]}
    if all(type(key) is str and not key.startswith("$") for key, _ in items):
        return dict(items)
    return {"$dict": [[key, item] for key, item in items]}


def _encode_scalar(value: Any, path: tuple[str | int, ...]) -> Json:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    raise CheckpointError(
        f"cannot store {dotted(path)!r}: a {type(value).__module__}.{type(value).__qualname__} "
        f"is neither a tensor, nor a JSON-able value (None, bool, int, float, str, list, tuple, "
        f"dict), nor has it state_dict() and load_state_dict(); convert it, for example with "
        f"float(), str() or torch.as_tensor(), or leave it out"
    )


def is_reference(node: Json) -> TypeGuard[dict[str, str]]:
    """Return whether a node of the tree stands for a tensor."""
    return isinstance(node, dict) and len(node) == 1 and isinstance(node.get("$tensor"), str)


def items_of(node: Json) -> list[tuple[str | int, Json]] | None:
    """Return the items of a node that stands for a dict, otherwise None."""
    if not isinstance(node, dict):
        return None
    tag = _tag(node)
    if tag is None:
        return list(node.items())
    return _pairs(node[tag]) if tag in ("$dict", "$counter") else None


def elements_of(node: Json) -> list[Json] | None:
    """Return the elements of a node that stands for a list or a tuple, otherwise None."""
    if isinstance(node, list):
        return node
    if isinstance(node, dict) and _tag(node) == "$tuple":
        elements = node["$tuple"]
        return elements if isinstance(elements, list) else None
    return None


def ranks_of(node: Json) -> list[Json] | None:
    """Return the values that ranks have saved, one if all were the same, otherwise None."""
    if isinstance(node, dict) and _tag(node) == "$per_rank":
        values = node["$per_rank"]
        return values if isinstance(values, list) and values else None
    return None


def references(node: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, tensor key) for every tensor that a tree refers to."""
    if is_reference(node):
        yield dotted(path), node["$tensor"]
    elif (values := ranks_of(node)) is not None:
        yield from dict.fromkeys(found for value in values for found in references(value, path))
    elif (items := items_of(node)) is not None:
        for key, item in items:
            yield from references(item, (*path, key))
    elif (elements := elements_of(node)) is not None:
        for index, element in enumerate(elements):
            yield from references(element, (*path, index))


def decode(node: Json, tensor: Callable[[str], Any]) -> Any:
    """Return the Python value of a node; ``tensor`` turns a key into what stands for it."""
    match node:
        case list():
            return [decode(element, tensor) for element in node]
        case dict():
            return _decode_tagged(node, tensor)
        case _:
            return node


def _decode_tagged(node: dict[str, Json], tensor: Callable[[str], Any]) -> Any:
    match _tag(node), node:
        case None, _:
            return {key: decode(item, tensor) for key, item in node.items()}
        case "$tensor", {"$tensor": str(key)}:
            return tensor(key)
        case "$tuple", {"$tuple": list(elements)}:
            return tuple(decode(element, tensor) for element in elements)
        case "$float", {"$float": "inf" | "-inf" | "nan" as text}:
            return float(text)
        case "$dict", {"$dict": pairs}:
            return {key: decode(item, tensor) for key, item in _pairs(pairs)}
        case "$per_rank", {"$per_rank": list()}:
            raise MismatchError(
                f"{_short(node)} was saved for each rank, which has a place in PerRank only"
            )
        case "$counter", {"$counter": pairs}:
            return Counter({key: decode(item, tensor) for key, item in _pairs(pairs)})
        case _:
            raise CorruptCheckpointError(f"unknown value in the checkpoint: {_short(node)}")


def _tag(node: dict[str, Json]) -> str | None:
    """Return the dollar key of a tagged object; None for an ordinary dict."""
    tags = [key for key in node if key.startswith("$")]
    if not tags:
        return None
    if len(node) > 1:
        raise CorruptCheckpointError(f"unknown value in the checkpoint: {_short(node)}")
    return tags[0]


def _pairs(pairs: Json) -> list[tuple[str | int, Json]]:
    result: list[tuple[str | int, Json]] = []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        match pair:
            case [str() | int() as key, item] if not isinstance(key, bool):
                result.append((key, item))
            case _:
                raise CorruptCheckpointError(
                    f"unknown dict item in the checkpoint: {_short(pair)}"
                )
    return result


def _short(node: Json) -> str:
    text = repr(node)
    return text if len(text) <= 80 else text[:77] + "..."
