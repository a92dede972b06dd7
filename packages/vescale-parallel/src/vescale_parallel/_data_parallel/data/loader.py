"""The data loader of one device, of which every rank reads its rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

from vescale_dtensor import announced_failures, profiler_range
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._plan.config import Batch
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import pytree

from .map_style import MapStyle
from .options import Options
from .order import PlannedOrder, SampledOrder
from .share import Share
from .stream import Stream


class ParallelLoader:
    """Iterates over one epoch of this rank's rows of the global batches.

    The global order and the global batches are those of one device: of the plan's ``batch``
    section, or of a ready ``DataLoader``, whose batch size is that of the global batch.
    Data-parallel rank r of R gets the r-th of R equal consecutive parts of each batch;
    tensor-, pipeline- and context-parallel ranks of one part get the same rows. Tensors are put
    on the rank's device. :meth:`state_dict` counts samples of the global order, so it continues
    under any number of ranks, and with any number of workers.

    Args:
        plan: The plan. ``batch.global_size`` must be set for a data set; of a ``DataLoader`` it
            must be the batch size, if it is set.
        dataset: A map-style data set of equal length on every rank, an iterable one, or a
            ``torch.utils.data.DataLoader`` of either.
        mesh: The plan's mesh.

    Attributes:
        dataset: The whole data set, as a ``DataLoader`` has it.
        sampler, batch_sampler: Those of a ready ``DataLoader``, whose order this one has; None
            where the plan orders the samples.
        batch_size: Number of rows of a global batch.
        is_at_uneven: Whether ranks have other numbers of rows of the latest batch.

    Raises:
        ValueError: If the global batch size is missing, larger than the data set, or does not
            divide over ranks; if a ``DataLoader`` hands out no batches in one order; or if the
            plan says what a ``DataLoader`` or an iterable decides itself.
        TypeError: If the data set is none of these.
    """

    def __init__(self, plan: ParallelPlan, dataset: Any, mesh: DeviceMesh) -> None:
        ranks = DataRanks(mesh, plan.context_parallel.size)
        pipelined = plan.pipeline_parallel.size > 1
        self._share = Share(
            part=ranks.part,
            num_parts=ranks.num_parts,
            num_microbatches=plan.num_microbatches,
            is_pipelined=pipelined,
        )
        self._source = _source_of(plan.batch, dataset, self._share)
        if self._source.size is not None:
            self._share.check_size(self._source.size)
        self._device = torch.device(mesh.device_type)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._epoch = 0
        self._taken = self._last_end = 0
        ready = cast("DataLoader[Any]", dataset) if isinstance(dataset, DataLoader) else None
        self._begins_anew, self._is_loaded = ready is not None, False
        self.dataset: Any = dataset if ready is None else ready.dataset
        self.sampler: Any = None if ready is None else ready.sampler
        self.batch_sampler: Any = None if ready is None else ready.batch_sampler
        self.batch_size: int | None = self._source.size
        self.is_at_uneven = False
        self._given: dict[int, tuple[weakref.ref[Tensor], bool]] = {}

    def gave(self, tree: Any) -> bool:
        """Whether any tensor of a tree is of a batch that this loader has given."""
        return any(id(leaf) in self._given for leaf in pytree.tree_leaves(tree))

    def put_apart(self, tree: Any) -> bool:
        """Whether it is one whose rows are in another order than one device's, put together."""
        given = (self._given.get(id(leaf)) for leaf in pytree.tree_leaves(tree))
        return any(is_apart for _, is_apart in filter(None, given))

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: If the data set does not say.
        """
        number = self._source.order.num_batches if isinstance(self._source, MapStyle) else None
        if number is None:
            raise TypeError("the data set, or its batch sampler, has no length")
        return number

    def __iter__(self) -> Iterator[Any]:
        """Go on where the loaded state left off, to the end of the epoch; then the next begins.

        Every rank must call this. After a ``break`` a ready ``DataLoader`` begins anew, as on one
        device; the plan's order goes on behind the last batch.
        """
        if self._begins_anew and not self._is_loaded:
            self._taken = 0
        self._is_loaded = False
        taken = self._taken
        yield from self._rest_of_epoch()
        if taken and taken == self._last_end:
            # Nothing was left: that was the end of an epoch already.
            yield from self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[Any]:
        with announced_failures():
            batches = self._source.begin(self._epoch, self._taken)
        while True:
            with announced_failures(), profiler_range("load data"):
                found = next(batches, None)
                if found is None:
                    break
                num_rows, batch = found
                self._share.check_rows(num_rows, trains=torch.is_grad_enabled())
                # Counted before the batch is handed out: a state saved after its step is past it.
                self._taken += num_rows
                self.is_at_uneven = not self._share.is_even(num_rows)
                batch = self._moved(batch)
                self._note(batch, is_apart=self._source.is_apart)
            yield batch
        self._last_end, self.is_at_uneven = self._taken, False
        self._epoch += 1
        self._taken = 0

    def _moved(self, tree: Any) -> Any:
        def move(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.to(self._device, non_blocking=leaf.is_pinned())
            # Mappings that pytree does not open: transformers' BatchEncoding, for example.
            if isinstance(leaf, Mapping) and callable(getattr(leaf, "to", None)):
                return leaf.to(self._device)  # pyright: ignore[reportAttributeAccessIssue]: looked up
            return leaf

        return pytree.tree_map(move, tree)

    def _note(self, batch: Any, *, is_apart: bool) -> None:
        # Programs may hold many batches at once, to prefetch for example.
        for leaf in _leaves(batch):
            if isinstance(leaf, Tensor):
                key = id(leaf)
                held = weakref.ref(leaf, lambda _, key=key: self._given.pop(key, None))
                self._given[key] = held, is_apart

    def state_dict(self) -> dict[str, Any]:
        """Return where in the global order the loader is."""
        position = {"epoch": self._epoch, "samples": self._taken}
        if not isinstance(self._source, MapStyle):
            return {**position, **self._source.state()}
        order = self._source.order
        if isinstance(order, PlannedOrder) and self._taken == order.num_samples:
            position = {"epoch": self._epoch + 1, "samples": 0}
        return {**position, **order.state(self._taken)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to where another loader of the same data and batch section was.

        Raises:
            ValueError: If the position is not between two of this loader's batches.
        """
        samples, size = state_dict["samples"], self._source.size
        count = None
        if isinstance(self._source, MapStyle):
            count = self._source.order.num_samples
        is_between = size is None or samples % size == 0 or samples == count
        if not is_between or (count is not None and samples > count):
            raise ValueError(
                f"the saved position, {samples} samples into an epoch, does not lie between "
                f"two batches of {size}" + ("" if count is None else f" out of {count} samples")
            )
        self._epoch, self._taken = state_dict["epoch"], samples
        self._is_loaded = True
        source = self._source
        (source.order if isinstance(source, MapStyle) else source).load_state(state_dict)


def _leaves(tree: Any) -> list[Any]:
    leaves = pytree.tree_leaves(tree)
    opened = [dict(leaf) if isinstance(leaf, Mapping) else leaf for leaf in leaves]
    return pytree.tree_leaves(opened)


def _source_of(batch: Batch, dataset: Any, share: Share) -> MapStyle | Stream:
    """Return what fetches from a data set or a ready loader."""
    if isinstance(dataset, DataLoader):
        return _of_loader(batch, dataset, share)
    size, options = batch.global_size, Options.of_plan(batch)
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            "expected a map-style data set (with __len__ and __getitem__), an IterableDataset or "
            f"a torch.utils.data.DataLoader, got {type(dataset).__name__}"
        )
    if size is None:
        raise ValueError(
            "a data set needs batch.global_size in the plan, got None; set it to the number "
            "of rows of one step over all ranks"
        )
    if is_stream:
        if batch.shuffle:
            raise ValueError(
                "expected batch.shuffle False for an iterable data set, which has an order of "
                "its own, got True; shuffle the data set (.shuffle(seed=..., buffer_size=...) of "
                "HuggingFace's)"
            )
        return Stream(dataset, size, options, share, drop_last=batch.drop_last)
    count = len(dataset)
    if size > count:
        raise ValueError(
            f"expected batch.global_size of at most the {count} samples of the data set, "
            f"got {size}"
        )
    return MapStyle(dataset, PlannedOrder(batch, size, count), options, share)


def _of_loader(batch: Batch, loader: DataLoader[Any], share: Share) -> MapStyle | Stream:
    plain = Batch()
    # drop_last is True unless a plan says otherwise, which cannot be told from a wish.
    said = [
        name
        for name in ("shuffle", "seed", "num_workers", "pin_memory", "prefetch_factor")
        if getattr(batch, name) != getattr(plain, name)
    ]
    if said:
        raise ValueError(
            f"the plan's batch.{said[0]} is {getattr(batch, said[0])!r}, and a ready DataLoader "
            "decides that itself; leave it out of the plan"
        )
    options = Options.of_loader(loader)
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise ValueError(
                "expected a DataLoader that makes batches, got batch_size=None; give it a "
                "batch_size, that of the global batch"
            )
        source: MapStyle | Stream = Stream(
            loader.dataset, loader.batch_size, options, share, drop_last=loader.drop_last
        )
    else:
        source = MapStyle(loader.dataset, SampledOrder(loader), options, share)
    if batch.global_size not in (None, source.size):
        raise ValueError(
            f"expected a DataLoader whose batch_size is the plan's batch.global_size, "
            f"{batch.global_size} rows over all ranks, got {source.size}; set one of them to the "
            "other, or leave batch.global_size out"
        )
    return source
