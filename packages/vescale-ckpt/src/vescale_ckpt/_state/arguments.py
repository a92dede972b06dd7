"""The arguments of a save or a load: a path, and a dict of what it is about."""

from __future__ import annotations

import os
from collections.abc import Mapping

from vescale_ckpt.exceptions import CheckpointError


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


def _kind(state: object) -> str:
    return f"the class {state.__name__}" if isinstance(state, type) else type(state).__name__
