"""Samples that only come one after the other: every rank reads all, and keeps its own.

[Note: what a stream costs] A stream has one order for all ranks only if every rank runs all of it:
whatever it shuffles or packs depends on what came before. So a rank reads, decodes and throws
away what others train on: the reading of the whole global batch, of R data-parallel ranks R times.
It makes batches, ``collate_fn``, of its own rows alone. To find a saved position it reads up to
there again. ``split_dataset_by_node`` of HuggingFace reads less, in another order; and the
``state_dict`` of its data sets loses what lies in a shuffle buffer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vescale_parallel._mesh.agreement import check_agreement

from .beginning import Beginning
from .collated import Collate
from .options import Options, Seeds, mixed, own_draws
from .share import Share


class Stream:
    """Fetches from an iterable data set.

    Args:
        dataset: The data set.
        size: Rows of a global batch.
        options: How to fetch.
        share: Which rows of a batch.
        drop_last: Whether a last batch with fewer rows is left out.

    Attributes:
        is_apart: Whether rows of a sample are apart in the latest batch.
    """

    def __init__(
        self, dataset: Any, size: int, options: Options, share: Share, *, drop_last: bool
    ) -> None:
        self.size, self._options = size, options
        self._seeds = Seeds(options, share, alike=True)
        self._rows = _RowsOfStream(dataset, size, share, drop_last=drop_last)
        start = None
        if options.worker_init_fn is not None and options.num_workers > 0:
            start = _InitWorker(options.worker_init_fn, dataset)
        self._loader: DataLoader[Any] = DataLoader(
            self._rows,
            batch_size=None,
            collate_fn=cast("Any", _Collate(Collate(options.collate_fn), share)),  # of one element
            worker_init_fn=start,
            generator=self._seeds.generator,
            **options.settings,
        )
        self._has_begun = self.is_apart = False
        self._beginning = Beginning({"loader": options.generator}, {})

    def begin(self, epoch: int, taken: int) -> Iterator[tuple[int, Any]]:
        """Yield the rows of every batch that all ranks have, and this rank's batch."""
        with contextlib.ExitStack() as stack:
            if taken > 0:
                stack.enter_context(self._beginning.again())
            else:
                self._beginning.note()
            if not (self._options.keeps_workers and self._has_begun):
                self._seeds.draw(epoch)
                self._check_agreement()
            self._has_begun = True
            self._rows.seed, self._rows.num_made = self._seeds.base, 0
            # Workers take turns. One whose stream ends early has its turns taken by the others.
            self._rows.num_skipped = taken // self.size
            batches = iter(self._loader)
            while taken > 0:
                num_rows, _ = next(batches, (taken, None))
                taken -= num_rows
        for num_rows, made in batches:
            self.is_apart, batch = made or (False, None)
            yield num_rows, batch

    def state(self) -> dict[str, Any]:
        """Return what else than the epoch and the samples taken of it says what comes."""
        return {"generators": self._beginning.states}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Have the epoch that goes on be that of a saved state."""
        self._beginning.load(state.get("generators", {}))

    def _check_agreement(self) -> None:
        try:
            check_agreement(seed={"it": str(self._seeds.base)})
        except ValueError as error:
            raise ValueError(
                "ranks drew different seeds for a data set that every rank goes through, so one "
                "that shuffles would have another order on each. Seed all ranks alike, "
                "torch.manual_seed(0), or give a DataLoader with a generator, "
                f"torch.Generator().manual_seed(0): {error}"
            ) from None


@dataclass(frozen=True)
class _Rows:
    """This rank's samples of a global batch; None where it is not wanted."""

    num_rows: int
    samples: list[Any] | None
    seed: int


class _RowsOfStream(IterableDataset[_Rows]):
    """Goes through a stream, this process's or a worker's, batch by batch.

    Attributes:
        num_skipped: Batches, of all workers, that the next iteration need not make.
        seed: Of what making batches draws.
        num_made: Batches of this seed so far; of a worker that lives on those of all epochs.
    """

    def __init__(self, dataset: Any, size: int, share: Share, *, drop_last: bool) -> None:
        self._dataset, self._size, self._share = dataset, size, share
        self._drop_last = drop_last
        self.num_skipped = self.seed = self.num_made = 0

    def __iter__(self) -> Iterator[_Rows]:
        worker = get_worker_info()
        streams = (self.seed, self._share.part, worker.id + 1 if worker else 0)
        skipped, self.num_skipped = self.num_skipped, 0  # once: workers may live on
        if worker is not None:
            skipped = max(0, -(-(skipped - worker.id) // worker.num_workers))
        samples = iter(self._dataset)
        for index in itertools.count():
            batch = list(itertools.islice(samples, self._size))
            if not batch or (len(batch) < self._size and self._drop_last):
                return
            mine = None
            if index >= skipped and len(batch) >= self._share.num_parts:
                mine = batch[self._share.rows(len(batch))]
            self.num_made += 1
            yield _Rows(len(batch), mine, mixed(*streams, self.num_made))


@dataclass(frozen=True)
class _Collate:
    """Makes a batch of samples; in a worker, so it has to be picklable."""

    collate_fn: Collate
    share: Share

    def __call__(self, rows: _Rows) -> tuple[int, Any]:
        if rows.samples is None:
            return rows.num_rows, None
        if self.share.num_parts == 1:
            return rows.num_rows, self.collate_fn(rows.samples)
        # What it draws for these rows must not move the stream, which is one for all ranks.
        with own_draws(rows.seed):
            return rows.num_rows, self.collate_fn(rows.samples)


@dataclass(frozen=True)
class _InitWorker:
    """Shows a user's ``worker_init_fn`` the data set that it knows."""

    worker_init_fn: Callable[[int], None]
    dataset: Any

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        held = info.dataset
        # Frozen by torch. The copy that the worker runs is the one inside of its own.
        vars(info)["dataset"] = held._dataset
        self.worker_init_fn(worker)
        held._dataset = info.dataset
