"""Which blocks a plan runs again in backward, and what of them it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

from .block_patterns import by_block
from .frozen_mapping import FrozenMapping

RecomputeMode = Literal["none", "full", "selective"]
Recompute = RecomputeMode | Mapping[str, RecomputeMode]
_MODES: tuple[str, ...] = get_args(RecomputeMode)


def checked_recompute(given: object) -> Recompute:
    """Return what a plan's ``recompute`` says, as a plan keeps it.

    Raises:
        ValueError: If it is no mode, and no patterns of blocks with one each.
    """
    if isinstance(given, Mapping):
        said = cast("Mapping[object, object]", given)
        bad = {key: mode for key, mode in said.items() if mode not in _MODES}
        if bad or not all(isinstance(key, str) for key in said):
            raise ValueError(
                f"expected recompute to be one of {[*_MODES]} of each pattern of blocks, "
                f"got {bad or dict(said)!r}"
            )
        return FrozenMapping(cast("Mapping[str, RecomputeMode]", given))
    if given not in _MODES:
        raise ValueError(
            f"expected recompute to be one of {[*_MODES]}, or patterns of blocks with one of "
            f"them, got {given!r}"
        )
    return cast("RecomputeMode", given)


def checked_keep(given: object, recompute: Recompute) -> tuple[str, ...]:
    """Return the operators that are kept besides, as a plan keeps them.

    Raises:
        ValueError: If they are no names, or no block is recomputed selectively.
    """
    names = tuple(cast("Sequence[object]", given)) if isinstance(given, list | tuple) else None
    if names is None or not all(isinstance(each, str) and "." in each for each in names):
        raise ValueError(
            f"expected recompute_keep to be a list of operators such as 'aten.bmm', got {given!r}"
        )
    if names and "selective" not in _said(recompute):
        raise ValueError(
            "recompute_keep is of blocks with recompute 'selective': expected recompute to say so "
            f"of some, got {recompute!r}"
        )
    return cast("tuple[str, ...]", names)


def recomputes(recompute: Recompute) -> bool:
    """Return whether any block may run again in backward."""
    return any(mode != "none" for mode in _said(recompute))


def keeps_some(recompute: Recompute) -> bool:
    """Return whether any block may run again selectively."""
    return "selective" in _said(recompute)


def recompute_by_block(recompute: Recompute, blocks: Sequence[str]) -> dict[str, RecomputeMode]:
    """Return how each block runs again.

    Raises:
        ValueError: If a pattern is of no block, or two of different modes are of one.
    """
    if not isinstance(recompute, Mapping):
        return dict.fromkeys(blocks, recompute)
    found = by_block("recompute", recompute, blocks)
    return {block: found.get(block, "none") for block in blocks}


def _said(recompute: Recompute) -> tuple[str, ...]:
    return tuple(recompute.values()) if isinstance(recompute, Mapping) else (recompute,)
