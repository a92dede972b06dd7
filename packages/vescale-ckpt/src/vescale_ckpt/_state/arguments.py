"""The arguments of a save or a load: a path, and a dict of what it is about."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from vescale_ckpt.exceptions import CheckpointError

T = TypeVar("T")


def check_arguments(name: str, path: object, state: object) -> None:
    """Refuse a path that is none, and a state that is one thing rather than a dict of things.

    Raises:
        CheckpointError: With how the function is called.
    """
    usage = f"{name}(path, {{'model': model}})"
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"expected path to be a path, got {type(path).__name__}; call {usage}"
        )
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"expected state to be a dict of what to {name} by name, got "
            f"{_kind(state)}; call {usage}"
        )


def checked(chosen: Callable[[], T]) -> T:
    """Return what a user has chosen; what is wrong with it every rank has to hear of.

    Raises:
        CheckpointError: With what was wrong.
    """
    try:
        return chosen()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _kind(state: object) -> str:
    return f"the class {state.__name__}" if isinstance(state, type) else type(state).__name__
