"""State as data: nested dicts turned into tagged JSON with references to tensors, and back.

A string that starts with a dollar sign stands for the tensor whose key follows; a lone one for
the tensor whose key is the dotted path of this place in the state, which keeps commit records
short. All other JSON stands for itself, but for an object with a single key that starts with a
dollar sign, which is what JSON lacks: ``{"$tuple": [...]}``, ``{"$str": "$5"}``,
``{"$float": "inf"}``, ``{"$dict": [[key, value], ...]}`` for dicts whose keys are not all plain
strings, and ``{"$per_rank": [...]}`` with the value of every rank. FORMAT.md lists them all.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
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


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Return whether ``value`` hands out its state; plain Python values are told at once."""
    return type(value) not in _PLAIN_TYPES and isinstance(value, Stateful)


# What a defaultdict may make of a key that it lacks, by the name in a checkpoint.
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)},
}
_SEQUENCES: dict[type[Any], str] = {list: "", tuple: "$tuple", torch.Size: "$size"}
# Python turns no more than 4300 decimal digits of an integer into text, and back.
_MAX_INT_BITS = 14_000
_PLAIN_TYPES = frozenset({dict, list, tuple, str, int, float, bool, type(None)})


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state split into what is JSON and what is tensors.

    Attributes:
        tree: The whole state as tagged JSON.
        tensors: The tensors it refers to, by dotted key.
        groups: The top-level key of each tensor; empty for a tensor directly at the top.
        values: Every Python value by its dotted key, to compare ranks.
        per_rank: What each rank has its own of, by dotted key: a list, part of the tree, with
            this rank's value.
        per_rank_tensors: The keys of the tensors in those values.
    """

    tree: dict[str, Json]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    groups: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, Json] = field(default_factory=dict[str, Json])
    per_rank: dict[str, list[Json]] = field(default_factory=dict[str, list[Json]])
    per_rank_tensors: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def note(self, path: str, value: Json) -> None:
        """Remember a Python value; keys that look alike when dotted are told apart."""
        while path in self.values:
            path += "'"
        self.values[path] = value


def dotted(path: str, key: str | int) -> str:
    """Return where an item of what is at ``path`` is; an empty path is the whole state."""
    return f"{path}.{key}" if path else str(key)


def below(path: str, top: str) -> str:
    """Return ``path`` as seen from ``top``, above it; an empty ``top`` is the whole state."""
    return path[len(top) + 1 :] if top else path


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
        encoded.tree[key] = _encode(value, key, key, encoded)
    return encoded


def _encode(value: Any, path: str, group: str, encoded: Encoded) -> Json:
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, group, encoded)
    if isinstance(value, PerRank):
        return _encode_per_rank(value, path, group, encoded)
    if is_stateful(value):
        state: Any = value.state_dict()
        # Whatever mapping it is, an object takes back what it has handed out.
        own = dict(state) if isinstance(state, Mapping) else state
        return _encode(own, path, group, encoded)
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, group, encoded)
    if type(value) in _SEQUENCES:
        if not value:
            encoded.note(path, type(value).__name__)
        items: list[Json] = [
            _encode(item, f"{path}.{index}", group, encoded) for index, item in enumerate(value)
        ]
        tag = _SEQUENCES[type(value)]
        return {tag: items} if tag else items
    scalar = _encode_scalar(value, path)
    encoded.note(path, scalar)
    return scalar


def _encode_tensor(tensor: torch.Tensor, key: str, group: str, encoded: Encoded) -> str:
    if key in encoded.tensors:
        raise CheckpointError(
            f"two tensors of the state have the key {key!r}: one key contains a dot that the "
            f"other spells by nesting; rename one of them"
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the key {key!r} is no text that UTF-8 has: {error}") from error
    group = "" if key == group else group
    if key.endswith("__metadata__") and below(key, group) == "__metadata__":
        raise CheckpointError(f"{key!r}: safetensors reserves this name; rename it")
    encoded.tensors[key] = tensor
    encoded.groups[key] = group
    return "$"


def _encode_per_rank(value: PerRank, path: str, group: str, encoded: Encoded) -> Json:
    own = Encoded({})
    node = [_encode(value.value, path, group, own)]
    if own.per_rank:
        raise CheckpointError(f"{path!r} is a PerRank in a PerRank; leave out one")
    for key in own.tensors:
        if key in encoded.tensors:
            raise CheckpointError(f"two tensors of the state have the key {key!r}")
    encoded.tensors.update(own.tensors)
    encoded.groups.update(own.groups)
    encoded.note(path, "per rank")
    encoded.per_rank[path] = node
    encoded.per_rank_tensors[path] = list(own.tensors)
    return {"$per_rank": node}


def _encode_mapping(value: Mapping[Any, Any], path: str, group: str, encoded: Encoded) -> Json:
    if not value:
        encoded.note(path, "dict")
    types = set(map(type, value))
    if not types <= {str, int}:
        odd = next(key for key in value if type(key) not in (str, int))
        raise CheckpointError(
            f"expected str or int keys in the dict at {path!r}, got {odd!r} ({type(odd).__name__})"
        )
    items = {key: _encode(item, f"{path}.{key}", group, encoded) for key, item in value.items()}
    pairs: list[Json] = [[key, item] for key, item in items.items()]
    match type(value).__name__:
        case "Counter" if type(value) is Counter:
            return {"$counter": pairs}
        case "OrderedDict" if type(value) is OrderedDict:
            return {"$ordered": pairs}
        case "defaultdict" if type(value) is defaultdict:
            return {"$default": [_factory_name(value, path), pairs]}
        case "dict" if type(value) is dict:
            is_tagged = int in types or any(map(_IS_TAG, items))
            return {"$dict": pairs} if is_tagged else items
        case _:
            raise _unstorable(value, path)


def _factory_name(value: Mapping[Any, Any], path: str) -> str:
    factory = getattr(value, "default_factory", None)
    name = next((name for name, known in _FACTORIES.items() if known is factory), None)
    if name is None:
        raise CheckpointError(
            f"cannot store {path!r}: a defaultdict of {factory!r}, which only pickle could; "
            f"expected one of {', '.join(_FACTORIES)}; convert it with dict()"
        )
    return name


def _encode_scalar(value: Any, path: str) -> Json:
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise CheckpointError(
                f"cannot store {path!r}: an integer of {value.bit_length()} bits, expected at "
                f"most {_MAX_INT_BITS}; store it as a string of hexadecimal digits"
            )
        return value
    if type(value) is str:
        return {"$str": value} if value.startswith("$") else value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    raise _unstorable(value, path)


def _unstorable(value: Any, path: str) -> CheckpointError:
    return CheckpointError(
        f"cannot store {path!r}: a {type(value).__module__}.{type(value).__qualname__} "
        f"is neither a tensor, nor a JSON-able value (None, bool, int, float, str, list, tuple, "
        f"dict), nor has it state_dict() and load_state_dict(); convert it, for example with "
        f"float(), str(), dict() or torch.as_tensor(), or leave it out"
    )


def reference_to(key: str) -> str:
    """Return the node that stands for a tensor."""
    return f"${key}"


def is_reference(node: Json) -> TypeGuard[str]:
    """Return whether a node of the tree stands for a tensor."""
    return isinstance(node, str) and node.startswith("$")


def key_of(reference: str) -> str:
    """Return the key of the tensor that a node stands for."""
    return reference[1:]


def items_of(node: Json) -> list[tuple[str | int, Json]] | None:
    """Return the items of a node that stands for a dict, otherwise None."""
    if not isinstance(node, dict):
        return None
    tag = _tag(node)
    if tag is None:
        return list(node.items())
    if tag == "$default":
        return _default_pairs(node)[1]
    return _pairs(node[tag]) if tag in ("$dict", "$counter", "$ordered") else None


def with_items(node: Json, items: Sequence[tuple[str | int, Json]]) -> Json:
    """Return a node of the same kind of dict with other items."""
    assert isinstance(node, dict)
    pairs: list[Json] = [[key, item] for key, item in items]
    match _tag(node):
        case "$dict" | "$counter" | "$ordered" as tag:
            return {tag: pairs}
        case "$default":
            return {"$default": [_default_pairs(node)[0], pairs]}
        case _:
            return {str(key): item for key, item in items}


def elements_of(node: Json) -> list[Json] | None:
    """Return the elements of a node that stands for a list or a tuple, otherwise None."""
    if isinstance(node, list):
        return node
    if isinstance(node, dict) and (tag := _tag(node)) in ("$tuple", "$size"):
        elements = node[tag]
        return elements if isinstance(elements, list) else None
    return None


def ranks_of(node: Json) -> list[Json] | None:
    """Return the values that ranks have saved, one if all were the same, otherwise None."""
    if isinstance(node, dict) and _tag(node) == "$per_rank":
        values = node["$per_rank"]
        return values if isinstance(values, list) and values else None
    return None


def references(node: Json, path: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, tensor key) for every tensor that a tree at ``path`` refers to."""
    if is_reference(node):
        yield path, key_of(node)
    elif (values := ranks_of(node)) is not None:
        yield from dict.fromkeys(found for value in values for found in references(value, path))
    elif (items := items_of(node)) is not None:
        for key, item in items:
            yield from references(item, dotted(path, key))
    elif (elements := elements_of(node)) is not None:
        for index, element in enumerate(elements):
            yield from references(element, dotted(path, index))


def has_references(node: Json) -> bool:
    """Return whether a tree refers to any tensor."""
    return any(True for _ in references(node, ""))


def complete(node: Json, path: str, stored: Container[str]) -> Json:
    """Return a tree with the keys of all tensors, those that their places spell, too.

    Raises:
        CorruptCheckpointError: If it is no tree, or there is no such tensor.
    """
    if isinstance(node, str):
        if not node.startswith("$"):
            return node
        key = node[1:] or path
        if key not in stored:
            raise CorruptCheckpointError(f"the state refers to {key!r}, which is not stored")
        return f"${key}"
    if isinstance(node, list):
        return [complete(item, f"{path}.{i}", stored) for i, item in enumerate(node)]
    return _complete_tagged(node, path, stored) if isinstance(node, dict) else node


def _complete_tagged(node: dict[str, Json], path: str, stored: Container[str]) -> Json:
    match _tag(node), node:
        case None, _:
            if any(map(_IS_TAG, node)):
                raise CorruptCheckpointError(f"unknown value in the checkpoint: {_short(node)}")
            return {key: complete(item, f"{path}.{key}", stored) for key, item in node.items()}
        case "$tuple" | "$size" as tag, _:
            return {tag: complete(node[tag], path, stored)}
        case "$dict" | "$counter" | "$ordered" | "$default", _:
            items = items_of(node) or []
            return with_items(
                node, [(k, complete(item, f"{path}.{k}", stored)) for k, item in items]
            )
        case "$per_rank", {"$per_rank": list(values)}:
            return {"$per_rank": [complete(value, path, stored) for value in values]}
        case _:
            return node


def decode(node: Json, tensor: Callable[[str], Any]) -> Any:
    """Return the Python value of a node; ``tensor`` turns a key into what stands for it."""
    match node:
        case list():
            return [decode(element, tensor) for element in node]
        case dict():
            return _decode_tagged(node, tensor)
        case str() if is_reference(node):
            return tensor(key_of(node))
        case _:
            return node


def _decode_tagged(node: dict[str, Json], tensor: Callable[[str], Any]) -> Any:
    match _tag(node), node:
        case None, _:
            return {key: decode(item, tensor) for key, item in node.items()}
        case "$str", {"$str": str(text)}:
            return text
        case "$tuple", {"$tuple": list(elements)}:
            return tuple(decode(element, tensor) for element in elements)
        case "$size", {"$size": list(elements)} if _are_lengths(elements):
            return torch.Size(elements)  # pyright: ignore[reportArgumentType]: they are integers
        case "$ordered", {"$ordered": pairs}:
            return OrderedDict((key, decode(item, tensor)) for key, item in _pairs(pairs))
        case "$default", _:
            factory, pairs = _default_pairs(node)
            items = {key: decode(item, tensor) for key, item in pairs}
            return defaultdict(_FACTORIES[factory], items)
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


_IS_TAG = methodcaller("startswith", "$")


def _tag(node: dict[str, Json]) -> str | None:
    """Return the dollar key of a tagged object; None for an ordinary dict."""
    if len(node) != 1:
        return None
    (key,) = node
    return key if key.startswith("$") else None


def _are_lengths(elements: list[Json]) -> bool:
    return all(type(element) is int for element in elements)


def _default_pairs(node: dict[str, Json]) -> tuple[str, list[tuple[str | int, Json]]]:
    """Return the name of the factory of a defaultdict, and its items."""
    match node["$default"]:
        case [str(name), list(pairs)] if name in _FACTORIES:
            return name, _pairs(pairs)
        case _:
            raise CorruptCheckpointError(f"unknown value in the checkpoint: {_short(node)}")


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
