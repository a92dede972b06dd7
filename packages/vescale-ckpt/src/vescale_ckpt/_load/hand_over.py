"""Hand over: objects get their state, once its tensors are filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vescale_ckpt.exceptions import CheckpointError, MismatchError
from vescale_ckpt.types import Stateful


def hand_over(stateful: Sequence[tuple[str, Stateful, Any]]) -> None:
    """Give each object its state.

    Args:
        stateful: Keys, objects and their states.

    Raises:
        MismatchError: If what was saved belongs to another optimizer.
        CheckpointError: If an object does not take its state, with its key.
    """
    for key, given, filled in stateful:
        options = _options(given)
        try:
            given.load_state_dict(filled)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{key}: {type(given).__name__}.load_state_dict() failed on what the checkpoint "
                f"holds: {type(error).__name__}: {error}"
            ) from error
        _check_options(key, given, options)


def _options(given: Stateful) -> list[set[str]]:
    """Return the names of the options in each group of an optimizer of torch."""
    is_torchs = type(given).__module__.startswith("torch.optim.")
    if not isinstance(given, torch.optim.Optimizer) or not is_torchs:
        return []
    return [given.defaults.keys() & group.keys() for group in given.param_groups]


def _check_options(key: str, given: Stateful, options: Sequence[set[str]]) -> None:
    """Refuse the state of another optimizer.

    torch takes it, and fails at the next step. What an older version of torch has not saved yet
    its optimizers have added when they took their state.
    """
    for number, (before, after) in enumerate(zip(options, _options(given), strict=True)):
        if lacking := sorted(before - after):
            raise MismatchError(
                f"{key}.param_groups.{number} lacks {', '.join(map(repr, lacking))}: the "
                f"checkpoint holds the state of another optimizer than {type(given).__name__}"
            )
