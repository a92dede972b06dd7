"""How the parts of a structure are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vescale_parallel._torch_private import pytree


def leaf_names(tree: Any) -> list[str]:
    """Return where in a structure every leaf is: ``['logits']``, or its number."""
    try:
        pairs, _ = pytree.tree_flatten_with_path(tree)
    except ValueError:  # a class that does not say how its parts are called
        return [f"leaf {index}" for index, _ in enumerate(pytree.tree_leaves(tree))]
    return [pytree.keystr(path) for path, _ in pairs]


def names_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Return where in the arguments of a call every leaf is."""
    return [*(f"argument {name}" for name in leaf_names(tuple(args))), *leaf_names(dict(kwargs))]
