"""The state tree: nested dicts as tagged JSON with references to tensors, and back.

A string that starts with a dollar sign stands for the tensor whose key follows; a lone one for
the tensor whose key is the dotted path of this place in the state, which keeps manifests
short. All other JSON stands for itself, but for an object with a single key that starts with a
dollar sign, which is what JSON lacks: ``{"$tuple": [...]}``, ``{"$str": "$5"}``,
``{"$float": "inf"}``, ``{"$dict": [[key, value], ...]}`` for dicts whose keys are not all plain
strings, and ``{"$per_rank": [...]}`` with the value of every rank. FORMAT.md lists them all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from operator import methodcaller
from typing import Any, TypeGuard

import torch

from vescale_ckpt.exceptions import CorruptCheckpointError, MismatchError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


# What a defaultdict may make of a key that it lacks, by the name in a checkpoint.
FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)},
}

is_tag = methodcaller("startswith", "$")


def dotted(path: str, key: str | int) -> str:
    """Return where an item of what is at ``path`` is; an empty path is the whole state."""
    return f"{path}.{key}" if path else str(key)


def below(path: str, top: str) -> str:
    """Return ``path`` as seen from ``top``, above it; an empty ``top`` is the whole state."""
    return path[len(top) + 1 :] if top else path


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


def leaves(node: Json, path: str) -> Iterator[str]:
    """Yield where there is something that is no dict or sequence, or an empty one."""
    return (leaf for leaf, _ in leaves_of(node, path))


def leaves_of(node: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Yield what is no dict or sequence, or an empty one, and where it is."""
    inner = items_of(node)
    if inner is None and (elements := elements_of(node)) is not None:
        inner = list(enumerate(elements))
    if not inner:
        yield path, node
        return
    for key, item in inner:
        yield from leaves_of(item, dotted(path, key))


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
            if any(map(is_tag, node)):
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
            return defaultdict(FACTORIES[factory], items)
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
    if len(node) != 1:
        return None
    (key,) = node
    return key if key.startswith("$") else None


def _are_lengths(elements: list[Json]) -> bool:
    return all(type(element) is int for element in elements)


def _default_pairs(node: dict[str, Json]) -> tuple[str, list[tuple[str | int, Json]]]:
    """Return the name of the factory of a defaultdict, and its items."""
    match node["$default"]:
        case [str(name), list(pairs)] if name in FACTORIES:
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
