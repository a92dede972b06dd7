"""Keys of parameters in the state of an optimizer: numbers, or names.

[Note: numbers and names] torch's optimizers number their parameters, one group after the other.
Parallelized optimizers, and ``get_optimizer_state_dict`` of ``torch.distributed.checkpoint``, name
them. With the same groups the parameter at a place is the same one, which is what torch's own
``load_state_dict`` goes by; so a run of either kind goes on as one of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from vescale_ckpt._format.state_tree import (
    Json,
    decode,
    elements_of,
    items_of,
    reference_to,
    with_items,
)
from vescale_ckpt.exceptions import MismatchError

from .state_template import template_of

_Keys = list[list[str | int]]


def with_keys_of(optimizer: torch.optim.Optimizer, node: Json) -> Json:
    """Return the stored state of an optimizer with the keys that a given one has.

    It is returned as it is if both number their parameters, or both name them, or it is no state
    of an optimizer; see [Note: numbers and names].

    Raises:
        MismatchError: If parameters are keyed otherwise, and are not in the same groups.
    """
    stored, given = _stored_keys(node), _own_keys(optimizer)
    if stored is None or given is None or _are_names(stored) == _are_names(given):
        return node
    of_stored, of_given = [*map(len, stored)], [*map(len, given)]
    if of_stored != of_given:
        raise MismatchError(
            f"the checkpoint has groups of {of_stored} parameters, the given optimizer of "
            f"{of_given}, and one of them numbers its parameters, so only their places tell which "
            "is which: make the optimizer of the parameters that the stored one had, or load "
            "without it and let it begin anew"
        )
    places = zip(itertools.chain(*stored), itertools.chain(*given), strict=True)
    called = {str(before): now for before, now in places}
    items = [
        (key, _state(item, called) if key == "state" else item)
        for key, item in items_of(node) or ()
        if key != "param_groups"
    ]
    groups: list[Json] = [
        _with_parameters(group, keys) for group, keys in zip(_groups(node), given, strict=True)
    ]
    return with_items(node, [*items, ("param_groups", groups)])


def _state(node: Json, called: dict[str, str | int]) -> Json:
    pairs: list[Json] = [[called.get(str(key), key), item] for key, item in items_of(node) or ()]
    return {"$dict": pairs}  # keys may be integers


def _with_parameters(group: Json, keys: Sequence[str | int]) -> Json:
    items: list[tuple[str | int, Json]] = [
        (key, [*map(_text, keys)] if key == "params" else item)
        for key, item in items_of(group) or ()
    ]
    return with_items(group, items)


def _text(key: str | int) -> Json:
    return {"$str": key} if str(key).startswith(reference_to("")) else key


def _groups(node: Json) -> list[Json]:
    return elements_of(dict(items_of(node) or ()).get("param_groups")) or []


def _stored_keys(node: Json) -> _Keys | None:
    keys = [dict(items_of(group) or ()).get("params") for group in _groups(node)]
    return _checked([_values(each) for each in keys])


def _values(node: Json) -> list[Any] | None:
    elements = elements_of(node)
    return None if elements is None else [decode(each, lambda key: None) for each in elements]


def _own_keys(optimizer: torch.optim.Optimizer) -> _Keys | None:
    # Of no state: what some optimizers return by ``state_dict`` ranks have to send each other.
    groups = template_of(optimizer, {}).get("param_groups", ())
    return _checked([group.get("params") for group in groups])


def _checked(keys: Sequence[Any]) -> _Keys | None:
    """Return lists of numbers, or of names; None for anything else."""
    found: _Keys = [list(each) for each in keys if isinstance(each, list | tuple)]
    kinds = {type(key) for each in found for key in each}
    is_known = kinds in ({int}, {str})
    return found if len(found) == len(keys) and is_known else None


def _are_names(keys: _Keys) -> bool:
    return isinstance(next(itertools.chain(*keys)), str)
