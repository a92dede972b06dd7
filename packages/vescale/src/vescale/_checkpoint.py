"""Save and load what training consists of, the plan included."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import vescale_ckpt
from vescale_dtensor import profiler_range
from vescale_parallel import ParallelPlan


def save(
    path: str | os.PathLike[str], state: Mapping[str, Any], *, keep_last: int | None = None
) -> None:
    """Write a checkpoint, replacing one that is there. Every rank must call this.

    The directory appears whole or not at all, and a checkpoint that it replaces stays until
    it does. It does not depend on the plan: any other plan and number of ranks can load it.

    Args:
        path: The checkpoint's directory, shared by all ranks.
        state: What to save, by name: a :class:`ParallelPlan`; models, optimizers, schedulers
            and loaders (anything with ``state_dict()``); tensors; plain values.
        keep_last: Delete all but so many of the newest checkpoints beside this one, once it is
            written.

    Raises:
        vescale.CheckpointError: If it could not be written on some rank, ranks disagree, or
            a value is of a kind that checkpoints do not hold.
    """
    with profiler_range("save checkpoint"):
        vescale_ckpt.save(path, _plans_as_text(state), keep_last=keep_last)


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    only: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint into what it was saved from. Every rank must call this.

    Models and optimizers are filled in place, every rank reading the parts it owns under its
    own plan.

    Args:
        path: A checkpoint's directory.
        state: What to fill, with the keys that were saved.
        strict: Whether keys that only one side has are an error.
        only: What of ``state`` to fill, as regular expressions for dotted keys.
        rename: Regular expressions for keys of the checkpoint, and what they are called here.
        cast: Whether to convert tensors that have another dtype here.

    Returns:
        A dict like ``state`` with the loaded values; a plan is the one that was saved.

    Raises:
        vescale.CheckpointError: If there is no checkpoint, it is damaged, or it does not fit.
    """
    with profiler_range("load checkpoint"):
        loaded = vescale_ckpt.load(
            path, _plans_as_text(state), strict=strict, only=only, rename=rename, cast=cast
        )
    return {
        key: ParallelPlan.from_json(value) if isinstance(state.get(key), ParallelPlan) else value
        for key, value in loaded.items()
    }


def _plans_as_text(state: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]: user input
        return state  # vescale-ckpt says what it expects
    return {
        key: value.to_json() if isinstance(value, ParallelPlan) else value
        for key, value in state.items()
    }
