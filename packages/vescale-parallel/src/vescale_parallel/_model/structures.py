"""Structures of classes that torch does not open: tokenizers' batches, objects of dataclasses.

What looks at the tensors of a call, splits its rows or joins them goes by torch's pytree, which
opens dicts and not what is derived from them. So the classes that are met are made known to it.
An object is filled again without its constructor, which may take anything and do anything.
"""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor, nn

from vescale_parallel._torch_private import pytree

from .copies import tensors_within

_Context = tuple[list[Any], dict[str, Any]]
# What most arguments are, and is not opened.
_PLAIN = frozenset((Tensor, type(None), bool, int, float, str))


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a structure, those of ``pytree.tree_leaves``.

    Passes of a pipeline ask for them several times a block, and pytree hands every leaf up
    through a generator a level: this takes a sixth of the time for what calls are given.
    """
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind in _PLAIN:
        found.append(tree)
    elif kind is tuple or kind is list:
        for part in tree:
            _collect(part, found)
    elif kind is dict:
        for part in tree.values():
            _collect(part, found)
    else:
        found += pytree.tree_leaves(tree)


def open_mappings(values: Iterable[Any]) -> None:
    """Have pytree open the mappings among some values from now on, as it opens a dict."""
    for value in values:
        cls = type(value)
        if isinstance(value, dict | UserDict) and cls not in pytree.SUPPORTED_NODES:
            _register_mapping(cls)


def _register_mapping(cls: type[Any]) -> None:
    is_dict, new = issubclass(cls, dict), cast("Callable[..., Any]", cls.__new__)

    def flatten(mapping: Any) -> tuple[list[Any], _Context]:
        attributes = {k: v for k, v in getattr(mapping, "__dict__", {}).items() if k != "data"}
        return list(mapping.values()), (list(mapping), attributes)

    def flatten_with_keys(mapping: Any) -> tuple[list[tuple[Any, Any]], _Context]:
        values, context = flatten(mapping)
        return [*zip(map(pytree.MappingKey, context[0]), values, strict=True)], context

    def unflatten(values: Iterable[Any], context: _Context) -> Any:
        keys, attributes = context
        # Constructors may take anything, or count what is constructed.
        mapping = new(cls)
        if not is_dict:
            mapping.data = {}
        if attributes:
            vars(mapping).update(attributes)
        for key, value in zip(keys, values, strict=True):
            (dict if is_dict else UserDict).__setitem__(mapping, key, value)
        return mapping

    pytree.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def opening(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of which what it returns is opened, :func:`open_objects`."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        open_objects(output)
        return output

    return call


def flattened(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a structure and its form, after :func:`open_objects`."""
    open_objects(tree)
    return pytree.tree_flatten(tree)


def open_objects(tree: Any) -> None:
    """Have pytree open the dataclasses and namespaces with tensors in a structure from now on."""
    shut = [leaf for leaf in leaves_of(tree) if type(leaf) not in _PLAIN and _is_shut(leaf)]
    for cls in {type(leaf) for leaf in shut}:
        _register_object(cls)
    if shut:  # one may have others in its fields
        open_objects(shut)


def _is_shut(leaf: Any) -> bool:
    if isinstance(leaf, Tensor | nn.Module | type):
        return False
    has_fields = is_dataclass(leaf) and type(leaf).__new__ is object.__new__
    return (has_fields or type(leaf) is SimpleNamespace) and next(
        tensors_within(leaf), None
    ) is not None


def _register_object(cls: type[Any]) -> None:
    names = [each.name for each in fields(cls)] if is_dataclass(cls) else None
    new = cast("Callable[..., Any]", cls.__new__)

    def flatten(made: Any) -> tuple[list[Any], _Context]:
        held = getattr(made, "__dict__", {})
        # A field of ``init=False`` may have no value yet.
        present = [*held] if names is None else [each for each in names if hasattr(made, each)]
        attributes = {k: v for k, v in held.items() if k not in present}
        return [getattr(made, name) for name in present], (present, attributes)

    def flatten_with_keys(made: Any) -> tuple[list[tuple[Any, Any]], _Context]:
        values, context = flatten(made)
        return [*zip(map(pytree.GetAttrKey, context[0]), values, strict=True)], context

    def unflatten(values: Iterable[Any], context: _Context) -> Any:
        present, attributes = context
        made = new(cls)
        for name, value in (*zip(present, values, strict=True), *attributes.items()):
            object.__setattr__(made, name, value)  # of one that is frozen, too
        return made

    pytree.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
