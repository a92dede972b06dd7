"""Where the generators were that an epoch is drawn from, so that its middle is found again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class Beginning:
    """The states of generators when an epoch began.

    Args:
        generators: By name; None for torch's default generator.
    """

    def __init__(self, generators: Mapping[str, torch.Generator | None]) -> None:
        self._generators = dict(generators)
        self._states = self.present()

    @property
    def states(self) -> dict[str, Tensor]:
        """Return the states, to be saved."""
        return dict(self._states)

    def present(self) -> dict[str, Tensor]:
        """Return the states that the generators have now."""
        return {name: _state_of(each) for name, each in self._generators.items()}

    def is_now(self) -> bool:
        """Whether the generators are where they were."""
        return all(torch.equal(self._states[name], now) for name, now in self.present().items())

    def note(self) -> None:
        """Begin an epoch here."""
        self._states = self.present()

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


def _state_of(generator: torch.Generator | None) -> Tensor:
    return torch.get_rng_state() if generator is None else generator.get_state()
