"""The data loader of one device, of which every rank reads its rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vescale_dtensor import announced_failures
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import pytree

# So that the epochs of one seed are not those of the next.
_EPOCH_SEEDS = 1_000_003


class ParallelLoader:
    """Iterates over one epoch of this rank's rows of the global batches.

    The global order and the global batches depend on the plan's ``batch`` section alone.
    Data-parallel rank r of R gets the r-th of R equal consecutive parts of each batch;
    tensor- and pipeline-parallel ranks of one part get the same rows. Tensors are put on the
    rank's device. :meth:`state_dict` counts samples of the global order, so it continues
    under any number of ranks.

    Args:
        plan: The plan; ``batch.global_size`` must be set.
        dataset: A map-style data set of equal length on every rank.
        mesh: The plan's mesh.

    Raises:
        ValueError: If the global batch size is missing, larger than the data set, or
            ``drop_last`` is False and samples would be left over.
        TypeError: If the data set is an iterable or a loader already.
    """

    def __init__(self, plan: ParallelPlan, dataset: Any, mesh: DeviceMesh) -> None:
        if isinstance(dataset, DataLoader | IterableDataset) or not hasattr(
            dataset, "__getitem__"
        ):
            raise TypeError(
                "expected a map-style data set (with __len__ and __getitem__), got "
                f"{type(dataset).__name__}"
            )
        size = plan.batch.global_size
        if size is None:
            raise ValueError(
                "a data set needs batch.global_size in the plan, got None; set it to the number "
                "of rows of one step over all ranks"
            )
        count = len(dataset)
        if size > count:
            raise ValueError(
                f"expected batch.global_size of at most the {count} samples of the data set, "
                f"got {size}"
            )
        if not plan.batch.drop_last and count % size:
            raise ValueError(
                f"{count} samples do not fill batches of {size} and batch.drop_last is False; "
                "set it to True, or choose a batch.global_size that divides the data set"
            )
        self._batch, self._size, self._count = plan.batch, size, count
        self._dataset = cast("Dataset[Any]", dataset)
        self._device = torch.device(mesh.device_type)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        ranks = DataRanks(mesh)
        self._rows = slice(ranks.rank * size // ranks.size, (ranks.rank + 1) * size // ranks.size)
        self._epoch = 0
        self._taken = 0
        self._given: dict[int, weakref.ref[Tensor]] = {}

    def gave(self, tree: Any) -> bool:
        """Whether any tensor of a tree is of a batch that this loader has given."""
        return any(id(leaf) in self._given for leaf in pytree.tree_leaves(tree))

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._count // self._size

    def __iter__(self) -> Iterator[Any]:
        """Go on where the last batch or the loaded state left off, to the end of the epoch."""
        order = self._order()
        starts = range(self._taken, len(self) * self._size, self._size)
        batches = [order[start : start + self._size][self._rows] for start in starts]
        source = iter(DataLoader(self._dataset, batch_sampler=batches))
        for _ in batches:
            with announced_failures():
                batch = next(source)
            # Counted before the batch is handed out: a state saved after its step is past it.
            self._taken += self._size
            batch = pytree.tree_map_only(Tensor, lambda x: x.to(self._device), batch)
            self._note(batch)
            yield batch
        self._epoch += 1
        self._taken = 0

    def _note(self, batch: Any) -> None:
        # Programs may hold many batches at once, to prefetch for example.
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, Tensor):
                key = id(leaf)
                self._given[key] = weakref.ref(leaf, lambda _, key=key: self._given.pop(key, None))

    def state_dict(self) -> dict[str, int]:
        """Return where in the global order the loader is."""
        if self._taken == len(self) * self._size:
            return {"epoch": self._epoch + 1, "samples": 0}
        return {"epoch": self._epoch, "samples": self._taken}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go to where another loader of the same data and batch section was.

        Raises:
            ValueError: If the position is not between two of this loader's batches.
        """
        samples = state_dict["samples"]
        if samples % self._size or samples > self._count:
            raise ValueError(
                f"the saved position, {samples} samples into an epoch, does not lie between "
                f"two batches of {self._size} out of {self._count} samples"
            )
        self._epoch, self._taken = state_dict["epoch"], samples

    def _order(self) -> list[int]:
        if not self._batch.shuffle:
            return list(range(self._count))
        generator = torch.Generator().manual_seed(self._batch.seed + _EPOCH_SEEDS * self._epoch)
        return torch.randperm(self._count, generator=generator).tolist()
