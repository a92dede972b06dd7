"""Encode a state as tagged JSON and tensors; see state_tree.py for what stands for what."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from vescale_ckpt.exceptions import CheckpointError
from vescale_ckpt.types import PerRank, Stateful

from .state_tree import FACTORIES, Json, below, is_tag

_SEQUENCES: dict[type[Any], str] = {list: "", tuple: "$tuple", torch.Size: "$size"}
# Python turns no more than 4300 decimal digits of an integer into text, and back.
_MAX_INT_BITS = 14_000
_PLAIN_TYPES = frozenset({dict, list, tuple, str, int, float, bool, type(None)})


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Return whether ``value`` hands out its state; plain Python values are told at once."""
    # A class has the methods of its objects, too, but no state.
    is_candidate = type(value) not in _PLAIN_TYPES and not isinstance(value, type)
    return is_candidate and isinstance(value, Stateful)


@contextmanager
def state_of(given: Stateful, key: str) -> Iterator[None]:
    """Say whose state it is that could not be had, if getting it fails.

    Raises:
        CheckpointError: Instead of any other exception.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{key}: a {type(given).__name__} did not give its state: "
            f"{type(error).__name__}: {error}"
        ) from error


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
        try:
            encoded.tree[key] = _encode(value, key, key, encoded)
        except RecursionError as error:
            raise CheckpointError(
                f"cannot store {key!r}: it contains itself, or is nested deeper than Python "
                "recurses"
            ) from error
    return encoded


def _encode(value: Any, path: str, group: str, encoded: Encoded) -> Json:
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, group, encoded)
    if isinstance(value, PerRank):
        return _encode_per_rank(value, path, group, encoded)
    if is_stateful(value):
        with state_of(value, path):
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
            is_tagged = int in types or any(map(is_tag, items))
            return {"$dict": pairs} if is_tagged else items
        case _:
            raise _unstorable(value, path)


def _factory_name(value: Mapping[Any, Any], path: str) -> str:
    factory = getattr(value, "default_factory", None)
    name = next((name for name, known in FACTORIES.items() if known is factory), None)
    if name is None:
        raise CheckpointError(
            f"cannot store {path!r}: a defaultdict of {factory!r}, which only pickle could; "
            f"expected one of {', '.join(FACTORIES)}; convert it with dict()"
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
    named = value if isinstance(value, type) else type(value)
    kind = "the class" if named is value else "a"
    return CheckpointError(
        f"cannot store {path!r}: {kind} {named.__module__}.{named.__qualname__} "
        f"is neither a tensor, nor a JSON-able value (None, bool, int, float, str, list, tuple, "
        f"dict), nor has it state_dict() and load_state_dict(); convert it, for example with "
        f"float(), str(), dict() or torch.as_tensor(), or leave it out"
    )
