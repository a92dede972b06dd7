"""Operators that a plan names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def checked_overloads(name: str) -> Sequence[Any]:
    """Return the operators that a plan's ``recompute_keep`` calls by one name.

    Raises:
        ValueError: If there is none, or one that writes to its arguments.
    """
    found = overloads_of(name)
    if not found:
        raise ValueError(
            f"recompute_keep: torch has no operator {name!r} here; expected names such as "
            "'aten.bmm' or 'aten.bmm.default', of operators that are registered before parallelize"
        )
    kept = [op for op in found if not op._schema.is_mutable]
    if not kept:
        raise ValueError(
            f"recompute_keep: {name!r} writes to its arguments, so there is nothing to keep that "
            "it returns; name the operator that makes what it writes to"
        )
    return kept


def overloads_of(name: str) -> Sequence[Any]:
    """Return the overloads of ``namespace.operator``, or the one that a third name says."""
    namespace, _, rest = name.partition(".")
    operator, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        return ()
    names = packet.overloads()
    return [getattr(packet, each) for each in names if overload in ("", each)]
