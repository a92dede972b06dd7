"""Where generators and samplers were when an epoch began, so that its middle is found again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Beginning:
    """The states of generators and samplers when an epoch began.

    A sampler that has a state says by it which epoch it draws. What it says of how far it has come
    in that counts for nothing: it draws the epoch from its beginning, and what was taken is passed
    over.

    Args:
        generators: By name; None for torch's default generator.
        samplers: By name; those that have no ``state_dict`` and ``load_state_dict`` do not count.
    """

    def __init__(
        self,
        generators: Mapping[str, torch.Generator | None],
        samplers: Mapping[str, Any],
    ) -> None:
        self._generators = dict(generators)
        self._samplers = {name: each for name, each in samplers.items() if _has_state(each)}
        self._states = self.present()
        self._of_samplers = self.present_samplers()

    @property
    def states(self) -> dict[str, Tensor]:
        """Return the states, to be saved."""
        return dict(self._states)

    def present(self) -> dict[str, Tensor]:
        """Return the states that the generators have now."""
        return {name: _state_of(each) for name, each in self._generators.items()}

    @property
    def of_samplers(self) -> dict[str, Any]:
        """Return the states of samplers, to be saved."""
        return dict(self._of_samplers)

    def present_samplers(self) -> dict[str, Any]:
        """Return the states that the samplers have now."""
        return {name: copy.deepcopy(each.state_dict()) for name, each in self._samplers.items()}

    def load_samplers(self, states: Mapping[str, Any]) -> None:
        """Put the samplers there, at once: a program may set their epoch behind that."""
        known = {name: states[name] for name in self._samplers if name in states}
        self._of_samplers |= copy.deepcopy(known)
        for name, state in known.items():
            self._samplers[name].load_state_dict(copy.deepcopy(state))

    def is_now(self) -> bool:
        """Whether the generators are where they were."""
        return all(torch.equal(self._states[name], now) for name, now in self.present().items())

    def note(self) -> None:
        """Begin an epoch here."""
        self._states, self._of_samplers = self.present(), self.present_samplers()

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Have the states of another process, of the generators that there are here."""
        known = {name: states[name].clone() for name in self._generators if name in states}
        self._states |= known

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw from where the epoch began.

        A loader's or a sampler's own generators are left where they get to, for they belong to
        the order; torch's default generator goes back to where it was.
        """
        with torch.random.fork_rng(devices=[]):
            self.set(self._states)
            yield

    def set(self, states: Mapping[str, Tensor]) -> None:
        """Put the generators into some states."""
        for name, generator in self._generators.items():
            if generator is None:
                torch.set_rng_state(states[name])
            else:
                generator.set_state(states[name])


def _has_state(sampler: object) -> bool:
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(sampler, name, None)) for name in names)


def _state_of(generator: torch.Generator | None) -> Tensor:
    return torch.get_rng_state() if generator is None else generator.get_state()
