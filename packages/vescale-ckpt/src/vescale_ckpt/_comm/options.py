"""Options of a save or a load, which every rank has to give alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vescale_ckpt.exceptions import MismatchError

from .control_group import ControlGroup, name_ranks


def check_same_options(options: Sequence[Mapping[str, Any]], ranks: ControlGroup) -> None:
    """Refuse options that differ: ranks would go to different collectives.

    Args:
        options: What each rank was given, in rank order; the same on every rank.
        ranks: All ranks.

    Raises:
        MismatchError: With what differs, and on which ranks.
    """
    for name in options[0]:
        by_value: dict[str, list[int]] = {}
        for rank, given in enumerate(options):
            by_value.setdefault(repr(given[name]), []).append(rank)
        if len(by_value) > 1:
            said = "; ".join(
                f"{value} on {name_ranks(where)}" for value, where in by_value.items()
            )
            raise ranks.common(
                MismatchError(f"expected the same {name} on every rank, got {name}={said}")
            )
