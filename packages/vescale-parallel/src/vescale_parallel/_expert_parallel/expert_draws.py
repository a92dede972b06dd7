"""Random numbers of experts, and of code that runs twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn

from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._trace.generators import GeneratorStates, forked_generators

Back = Callable[[], None]  # has generators be where they were


def mark() -> Back:
    """Return what has the generators be where they are now."""
    return GeneratorStates().put_back


class DrawsOfModel(Protocol):
    """What has modules of a model draw their part of random numbers."""

    def mark(self) -> Back:
        """Return what has the module that runs draw once more what it draws from now on."""
        ...

    def undivided(self) -> contextlib.AbstractContextManager[None]:
        """Have modules draw as if they were alone."""
        ...


class ExpertDraws:
    """Draws of the experts of one model: rows come from all ranks, so a rank has its own stream.

    Attributes:
        of_model: Set once the model draws in parts.
    """

    def __init__(self) -> None:
        self.of_model: DrawsOfModel | None = None
        self._warned = False

    def mark(self) -> Back:
        """Return what has the module that runs draw once more what it draws from now on."""
        return mark() if self.of_model is None else self.of_model.mark()

    def seed(self, fqn: str, experts: nn.Module) -> int | None:
        """Return a number that all ranks draw alike for a call of experts; None if none draw.

        Args:
            fqn: Of what has the experts.
            experts: Some of them, which draw if they are trained.
        """
        if not any(module.training for module in experts.modules()):
            return None
        if not self._warned:
            self._warned = True
            warn_at_user_line(
                f"expert_parallel: the experts of {fqn!r} draw random numbers, for dropout for "
                "example, for rows of all ranks; each rank draws from a stream of its own, so "
                "these are others than one device would draw"
            )
        with self._undivided():
            return int(torch.randint(2**62, ()))

    @contextlib.contextmanager
    def of_experts(self, seed: int | None, rank: int) -> Iterator[None]:
        """Have a rank's experts draw from its own stream of a call; from none if none draw."""
        if seed is None:
            yield
            return
        undivided = (
            contextlib.nullcontext() if self.of_model is None else self.of_model.undivided()
        )
        with undivided, forked_generators(seed + rank, cuda=torch.cuda.is_available()):
            yield

    def _undivided(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.of_model is None else self.of_model.undivided()
