"""How samples are fetched: workers, pinned memory, and what makes a batch of samples."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from vescale_parallel._plan.config import Batch

from .share import Share


@dataclass(frozen=True, kw_only=True)
class Options:
    """What of a ``DataLoader`` does not say which samples there are, nor in which order.

    Attributes:
        settings: Keyword arguments of a ``DataLoader``.
        collate_fn: Makes a batch of a list of samples.
        worker_init_fn: Called in every worker with its number.
        generator: What seeds workers; None for torch's default generator.
    """

    settings: dict[str, Any]
    collate_fn: Callable[[list[Any]], Any]
    worker_init_fn: Callable[[int], None] | None
    generator: torch.Generator | None

    @classmethod
    def of_plan(cls, batch: Batch) -> Options:
        """Return what a plan says."""
        settings: dict[str, Any] = {
            "num_workers": batch.num_workers,
            "pin_memory": batch.pin_memory,
            "prefetch_factor": batch.prefetch_factor,
        }
        return cls(
            settings=settings, collate_fn=default_collate, worker_init_fn=None, generator=None
        )

    @classmethod
    def of_loader(cls, loader: DataLoader[Any]) -> Options:
        """Return what a ready loader says.

        Raises:
            ValueError: If it hands out batches as they come, whose order is no one device's.
        """
        if loader.num_workers > 0 and not getattr(loader, "in_order", True):
            raise ValueError(
                "expected a DataLoader with in_order=True, got False: batches as they come have "
                "another order on every rank"
            )
        names = ("num_workers", "pin_memory", "timeout", "prefetch_factor", "persistent_workers")
        settings = {name: getattr(loader, name) for name in names}
        if loader.num_workers > 0:
            settings["multiprocessing_context"] = loader.multiprocessing_context
        else:
            settings["prefetch_factor"] = None
        return cls(
            settings=settings,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
        )

    @property
    def num_workers(self) -> int:
        """Return how many processes fetch; 0 for this one."""
        return self.settings["num_workers"]

    @property
    def keeps_workers(self) -> bool:
        """Whether workers live from epoch to epoch."""
        return bool(self.settings.get("persistent_workers"))


class Seeds:
    """Seeds what fetching samples draws: in workers, or in this process.

    A ``DataLoader`` draws one number at the start of an epoch. It is drawn here instead, so that
    the generators go on as on one device, and a generator of our own gives the inner loader the
    same number if one rank has all rows. Else it is seeded for this part, for equal draws for
    different rows would not be chance: by the seed of the drawn-from generator, the epoch and the
    place in it, so that a run resumed there draws the same.

    Args:
        options: Of the loader.
        share: This rank's.
        alike: Whether ranks draw the same: they read one stream, each all of it.

    Attributes:
        generator: What the inner loader draws from.
        base: The number of this epoch.
    """

    def __init__(self, options: Options, share: Share, *, alike: bool) -> None:
        self._options, self._share = options, share
        self._is_own = share.num_parts > 1 and not alike
        self.generator, self.base = torch.Generator(), 0
        self._epoch = (0, 0)

    def draw(self, epoch: int) -> None:
        """Draw the number of an epoch that begins."""
        source = self._options.generator
        state = torch.get_rng_state() if source is None else source.get_state()
        self.base = int(torch.empty((), dtype=torch.int64).random_(generator=source).item())
        self.go_on(epoch, 0)
        if not self._is_own:
            self.generator.set_state(state)

    def go_on(self, epoch: int, taken: int) -> None:
        """Seed for the rest of an epoch, whose number has been drawn before."""
        source = self._options.generator
        seed = torch.initial_seed() if source is None else source.initial_seed()
        self._epoch = (seed, epoch)
        # Not as at the beginning: workers would draw the same for other samples.
        self.generator.manual_seed(self._at(taken))

    @contextlib.contextmanager
    def fetching(self, taken: int) -> Iterator[None]:
        """Fetch the batch at a place; what is drawn for it here are numbers of this part."""
        if not self._is_own or self._options.num_workers > 0:
            yield
            return
        with own_draws(self._at(taken)):
            yield

    def _at(self, taken: int) -> int:
        return mixed(*self._epoch, self._share.part if self._is_own else 0, taken)


def mixed(*numbers: int) -> int:
    """Return a seed made of some numbers; others of them make an unrelated one."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest())


@contextlib.contextmanager
def own_draws(seed: int) -> Iterator[None]:
    """Draw from a stream of its own, and leave torch's default generator as it is."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed all devices as well.
        torch.default_generator.manual_seed(seed)
        yield
