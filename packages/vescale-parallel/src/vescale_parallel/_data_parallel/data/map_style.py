"""Samples that have a number: this rank fetches its own of every global batch, and no others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .collated import Collate
from .options import Options, Seeds
from .order import Indices, Order
from .share import Share


class MapStyle:
    """Fetches this rank's share of every global batch from a map-style data set.

    Attributes:
        is_apart: Whether rows of a sample are apart in the latest batch.
    """

    def __init__(self, dataset: Any, order: Order, options: Options, share: Share) -> None:
        self.order, self._share = order, share
        self._seeds = Seeds(options, share, alike=False)
        self._rows, self.is_apart = _RowsOfBatches(share), False
        self._loader: DataLoader[Any] = DataLoader(
            cast("Dataset[Any]", dataset),
            batch_sampler=cast("Sampler[list[int]]", self._rows),
            collate_fn=Collate(options.collate_fn),
            worker_init_fn=options.worker_init_fn,
            generator=self._seeds.generator,
            **options.settings,
        )

    @property
    def size(self) -> int | None:
        """Rows of a full global batch; None if they have no fixed number."""
        return self.order.size

    def begin(self, epoch: int, taken: int) -> Iterator[tuple[int, Any]]:
        """Yield the rows of every batch that all ranks have, and this rank's batch."""
        self._rows.begin(self.order.begin(epoch, taken, self._seeds))
        batches = iter(self._loader)
        while True:
            with self._seeds.fetching(taken):
                made = next(batches, _END)
            if made is _END:
                break
            self.is_apart, batch = cast("tuple[bool, Any]", made)
            num_rows = self._rows.sizes.popleft()
            taken += num_rows
            yield num_rows, batch
        if self._rows.sizes:  # one that cannot be shared out
            yield self._rows.sizes.popleft(), None


_END = object()


class _RowsOfBatches:
    """A batch sampler: this rank's indices of global batches.

    Attributes:
        sizes: Rows over all ranks, of the batches that were asked for and not yet handed out.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self._batches: Iterator[Indices] = iter(())
        self.sizes: deque[int] = deque()

    def begin(self, batches: Iterator[Indices]) -> None:
        """Go through some global batches next."""
        self._batches = batches
        self.sizes.clear()

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self._batches:
            self.sizes.append(len(indices))
            if len(indices) < self._share.num_parts:
                return
            rows: Sequence[int] | Tensor = indices[self._share.rows(len(indices))]
            yield rows.tolist() if isinstance(rows, Tensor) else list(rows)
