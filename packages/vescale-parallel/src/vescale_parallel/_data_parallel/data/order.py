"""In which order one device draws the samples of a map-style data set, batch by batch."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from vescale_parallel._mesh.agreement import check_agreement
from vescale_parallel._plan.config import Batch

from .beginning import Beginning
from .options import Seeds

# So that the epochs of one seed are not those of the next.
_EPOCH_SEEDS = 1_000_003

Indices = Sequence[int] | Tensor


class Order(Protocol):
    """The global batches of every epoch, as indices."""

    @property
    def size(self) -> int | None:
        """Rows of a full global batch; None if they have no fixed number."""
        ...

    @property
    def num_batches(self) -> int | None:
        """Global batches of an epoch, None if that is not known."""
        ...

    @property
    def num_samples(self) -> int | None:
        """Samples that an epoch hands out, None if that is not known."""
        ...

    def begin(self, epoch: int, taken: int, seeds: Seeds) -> Iterator[Indices]:
        """Return the batches of an epoch that come after so many samples, in order."""
        ...

    def state(self, taken: int) -> dict[str, Any]:
        """Return what else than the epoch and the samples taken of it says what comes."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Have the next epoch that begins be that of a saved state."""
        ...


class PlannedOrder:
    """The order that a plan's ``batch`` section says: a function of its seed and the epoch."""

    def __init__(self, batch: Batch, size: int, count: int) -> None:
        self._batch, self._count, self.size = batch, count, size

    @property
    def num_batches(self) -> int:
        return -(-self.num_samples // self.size)

    @property
    def num_samples(self) -> int:
        return self._count // self.size * self.size if self._batch.drop_last else self._count

    def begin(self, epoch: int, taken: int, seeds: Seeds) -> Iterator[Indices]:
        if taken > 0:
            seeds.go_on(epoch, taken)
        else:
            seeds.draw(epoch)
        order: Indices = range(self._count)
        if self._batch.shuffle:
            generator = torch.Generator().manual_seed(self._batch.seed + _EPOCH_SEEDS * epoch)
            order = torch.randperm(self._count, generator=generator)
        end = self.num_samples
        return (
            order[start : min(start + self.size, end)] for start in range(taken, end, self.size)
        )

    def state(self, taken: int) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


class SampledOrder:
    """The order of a ready loader's sampler or batch sampler.

    What a sampler draws is drawn as on one device, from the loader's and the sampler's generator,
    or from torch's default one. An epoch can therefore be drawn again from the states that these
    had when it began, which is how the middle of one is found. So can that of a sampler that
    counts its epochs itself, if it has a ``state_dict``. The first batch tells if it is the same.

    Args:
        loader: The ready loader.

    Raises:
        ValueError: If it has no batches, or a sampler that gives ranks parts already.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches: Any = loader.batch_sampler
        if batches is None:
            raise ValueError(
                "expected a DataLoader that makes batches, got batch_size=None; give it a "
                "batch_size, that of the global batch, or a batch_sampler"
            )
        self._batches = batches
        self._sampler = getattr(batches, "sampler", None)
        if isinstance(self._sampler, DistributedSampler) or isinstance(
            batches, DistributedSampler
        ):
            raise ValueError(
                "expected a DataLoader of the global batches of one device, got one with a "
                "DistributedSampler; leave it out (shuffle=True instead): every data-parallel "
                "rank gets its rows of each batch"
            )
        samplers = {"sampler": self._sampler, "batch_sampler": batches}
        self._beginning = Beginning(_drawn_from(loader), samplers)
        self._is_loaded = False
        self._first: int | None = None
        self._keeps_workers, self._has_begun = loader.persistent_workers, False
        size = getattr(batches, "batch_size", None)
        self.size: int | None = size if isinstance(size, int) else None

    @property
    def num_batches(self) -> int | None:
        return len(self._batches) if isinstance(self._batches, Sized) else None

    @property
    def num_samples(self) -> int | None:
        if type(self._batches) is not BatchSampler or not isinstance(self._sampler, Sized):
            return None
        count, size = len(self._sampler), self._batches.batch_size
        return count // size * size if self._batches.drop_last else count

    def begin(self, epoch: int, taken: int, seeds: Seeds) -> Iterator[Indices]:
        is_loaded, self._is_loaded = self._is_loaded, False
        with contextlib.ExitStack() as stack:
            if taken > 0 or (is_loaded and not self._beginning.is_now()):
                stack.enter_context(self._beginning.again())
            else:
                self._beginning.note()
            batches = iter(self._global_batches())
            # Workers that live on are seeded once, when the first epoch begins.
            live_on = self._keeps_workers and self._has_begun
            if not (live_on and (epoch > 0 or not is_loaded)):
                self._seed(epoch, taken, seeds)
            self._has_begun = True
            return self._after(batches, taken)

    def _seed(self, epoch: int, taken: int, seeds: Seeds) -> None:
        before = self._beginning.present()
        seeds.draw(epoch)
        if taken > 0:
            seeds.go_on(epoch, taken)
        if self._keeps_workers and epoch > 0:
            self._beginning.set(before)

    def state(self, taken: int) -> dict[str, Any]:
        # Between epochs the next one will be drawn from the present states.
        is_begun = taken > 0 or self._is_loaded
        beginning = self._beginning
        return {
            "generators": beginning.states if is_begun else beginning.present(),
            "samplers": beginning.of_samplers if is_begun else beginning.present_samplers(),
            "first": self._first if taken > 0 else None,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        if "generators" in state:
            self._beginning.load(state["generators"])
            self._beginning.load_samplers(state.get("samplers", {}))
            self._is_loaded, self._first = True, state.get("first")

    def _after(self, batches: Iterator[Indices], taken: int) -> Iterator[Indices]:
        seen = 0
        while seen < taken:
            batch = next(batches, None)
            if batch is None:
                break
            if seen == 0:
                self._check_first(batch)
            seen += len(batch)
        if seen != taken:
            raise ValueError(
                f"the saved position, {taken} samples into an epoch, does not lie between two "
                f"batches of the DataLoader; {seen} is the next place that does"
            )
        first = next(batches, None)
        if taken == 0:
            self._first = None if first is None else _digest(first)
        if not isinstance(self._sampler, SequentialSampler):
            self._check_agreement(first)
        return iter(()) if first is None else itertools.chain([first], batches)

    def _check_first(self, batch: Indices) -> None:
        if self._first not in (None, _digest(batch)):
            sampler = self._batches if self._sampler is None else self._sampler
            raise ValueError(
                f"the DataLoader's {type(sampler).__name__} draws another order than in the epoch "
                "that was saved, so samples would count twice or never. Give it state_dict() and "
                "load_state_dict(), which the loader saves and loads, or have it draw the epoch "
                "that was saved, by loader.sampler.set_epoch(..) for example, before the loop; to "
                "begin another epoch, leave the loader out of what is loaded"
            )

    def _check_agreement(self, first: Indices | None) -> None:
        try:
            samples = "none" if first is None else repr(list(first)[:64])
            check_agreement(batch={"its samples": samples})
        except ValueError as error:
            raise ValueError(
                "the DataLoader's sampler draws other samples on other ranks, so rows would "
                "count twice and others never. Give the DataLoader a generator, "
                "torch.Generator().manual_seed(0), or seed all ranks alike, torch.manual_seed(0), "
                f"before the loop: {error}"
            ) from None

    def _global_batches(self) -> Iterator[Indices]:
        """Return the batches as the batch sampler does, with indices in tensors where it can."""
        sampler, batches = self._sampler, self._batches
        if type(batches) is not BatchSampler or type(sampler) is not RandomSampler:
            return iter(batches)
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            return iter(batches)
        return _shuffled(sampler, batches.batch_size, drop_last=batches.drop_last)


def _digest(batch: Indices) -> int:
    """Return a number that tells batches apart."""
    indices = batch.tolist() if isinstance(batch, Tensor) else [*batch]
    return zlib.crc32(repr([_plain(index) for index in indices]).encode())


def _plain(index: Any) -> Any:
    return index.item() if isinstance(index, Tensor) and not index.dim() else index


def _drawn_from(loader: DataLoader[Any]) -> dict[str, torch.Generator | None]:
    """Return the generators that may say what comes; None for torch's default one."""
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    own = getattr(sampler, "generator", None)
    found = {
        "loader": loader.generator,
        "sampler": own if isinstance(own, torch.Generator) else loader.generator,
    }
    known = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
    has_own = type(sampler) in known and isinstance(own, torch.Generator)
    if type(batches) is BatchSampler and (type(sampler) is SequentialSampler or has_own):
        # The default generator says nothing then, and ranks may have seeded theirs differently.
        return {name: each for name, each in found.items() if each is not None}
    return found


def _shuffled(sampler: RandomSampler, size: int, *, drop_last: bool) -> Iterator[Tensor]:
    """Yield the batches of a ``RandomSampler``, which would make a Python list of all indices."""
    count, generator = sampler.num_samples, sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    full = count // size * size
    yield from order[:full].split(size)
    # It draws an order that it needs nothing of when it is asked for more than there is.
    torch.randperm(count, generator=generator)
    if full < count and not drop_last:
        yield order[full:]
