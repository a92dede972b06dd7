"""Mappings of classes that torch does not open: tokenizers' batches, dicts of one's own class.

What looks at the tensors of a call, splits its rows or joins them goes by torch's pytree, which
opens dicts and not what is derived from them. So the classes that are met are made known to it.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable
from typing import Any, cast

from vescale_parallel._torch_private import pytree

_Context = tuple[list[Any], dict[str, Any]]


def open_mappings(values: Iterable[Any]) -> None:
    """Have pytree open the mappings among some values from now on, as it opens a dict."""
    for value in values:
        cls = type(value)
        if isinstance(value, dict | UserDict) and cls not in pytree.SUPPORTED_NODES:
            _register(cls)


def _register(cls: type[Any]) -> None:
    is_dict, new = issubclass(cls, dict), cast("Callable[..., Any]", cls.__new__)

    def flatten(mapping: Any) -> tuple[list[Any], _Context]:
        attributes = {k: v for k, v in getattr(mapping, "__dict__", {}).items() if k != "data"}
        return list(mapping.values()), (list(mapping), attributes)

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

    pytree.register_pytree_node(cls, flatten, unflatten)
