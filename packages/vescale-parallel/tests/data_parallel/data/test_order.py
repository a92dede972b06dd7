"""The oracle is a plain ``DataLoader`` in one process: the rows of all parts are its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from vescale_parallel import ParallelLoader, ParallelPlan, with_constraints
from vescale_parallel._data_parallel.data.loader import _source_of
from vescale_parallel._data_parallel.data.share import Share
from vescale_parallel._mesh.mesh import build_mesh
from vescale_parallel._plan.config import Batch
from vescale_testing import World

COUNT = 22
Rows = list[list[int]]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


class Counts(IterableDataset[int]):
    """Of which every worker goes through its own part, if there are any."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, COUNT, step))


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).tolist())


class Eager:
    """A batch sampler of the user's, with batches of several sizes and eager draws."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(COUNT).tolist()
        return iter([order[:4], order[4:12], order[12:16]])


class Position:
    """A sampler that knows its epoch, and how much of it it has handed out."""

    def __init__(self) -> None:
        self.epoch = self.given = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(COUNT, generator=generator).tolist()
        while self.given < COUNT:
            self.given += 1
            yield order[self.given - 1]
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class PositionOfBatches(Position):
    """A batch sampler that does."""

    def __iter__(self) -> Iterator[Any]:
        yield from BatchSampler(super().__iter__(), 4, drop_last=False)  # pyright: ignore[reportArgumentType]: torch takes iterators


class Counter(RandomSampler):
    """A sampler that counts its epochs, and tells nobody."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(COUNT, generator=generator).tolist())


@pytest.fixture
def alone(world_of_one: None) -> None:
    """A world of this process: one that is a rank of a pool may start no workers."""


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


READY: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=seeded()),
    "workers": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=seeded(), num_workers=2,
        persistent_workers=True, prefetch_factor=3,
    ),
    "own generator": lambda: DataLoader(
        Numbers(), batch_size=8, sampler=RandomSampler(Numbers(), generator=seeded())
    ),
    "replacement": lambda: DataLoader(
        Numbers(), batch_size=4,
        sampler=RandomSampler(Numbers(), replacement=True, num_samples=16, generator=seeded()),
    ),
    "weighted": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 20)
    ),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(range(COUNT), 4, drop_last=True)
    ),
    "stateful": lambda: DataLoader(Numbers(), batch_size=4, sampler=Position()),
    "stateful batches": lambda: DataLoader(Numbers(), batch_sampler=PositionOfBatches()),
    "eager": lambda: DataLoader(Numbers(), batch_sampler=Eager()),
    "stream": lambda: DataLoader(Counts(), batch_size=4),
    "stream dropped": lambda: DataLoader(Counts(), batch_size=4, drop_last=True),
    "stream of workers": lambda: DataLoader(Counts(), batch_size=4, num_workers=2),
    "shuffled stream": lambda: DataLoader(Shuffled(), batch_size=4),
    "shuffled stream of workers": lambda: DataLoader(
        Shuffled(), batch_size=4, num_workers=2, generator=seeded()
    ),
}  # fmt: skip


def of_one_device(name: str, epochs: int) -> tuple[Rows, Tensor]:
    """Return the batches, and what torch's generator then draws."""
    torch.manual_seed(7)
    loader = READY[name]()
    rows = [batch.tolist() for _ in range(epochs) for batch in loader]
    return rows, torch.rand(2)


def of_parts(name: str, epochs: int, num_parts: int) -> tuple[list[Rows], Tensor]:
    found: list[Rows] = []
    drawn = torch.empty(0)
    for part in range(num_parts):
        torch.manual_seed(7)
        source = _source_of(Batch(), READY[name](), Share(part=part, num_parts=num_parts))
        batches = [batch for epoch in range(epochs) for _, batch in source.begin(epoch, 0)]
        found.append([[] if batch is None else batch.tolist() for batch in batches])
        drawn = torch.rand(2)
    return found, drawn


def joined(parts: Sequence[Rows]) -> Rows:
    return [list(chain(*rows)) for rows in zip(*parts, strict=True)]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", READY)
def test_parts_of_a_ready_loader_are_the_batches_of_one_device(name: str) -> None:
    expected, drawn = of_one_device(name, 2)
    for num_parts in (1, 2):
        parts, then = of_parts(name, 2, num_parts)
        assert joined(parts) == expected, num_parts
        assert torch.equal(then, drawn), num_parts


def resumed(name: str, num_parts: int, taken: int, epoch: int) -> Rows:
    """Return the rest of an epoch, of a loader that got the state of another one."""
    torch.manual_seed(7)
    first = loader_of(name)
    for each in range(epoch + 1):
        given = 0
        for batch in first:
            given += len(batch)
            if each == epoch and given == taken:
                break
    state = first.state_dict()
    assert (state["epoch"], state["samples"]) == (epoch, taken)
    parts: list[Rows] = []
    for part in range(num_parts):
        torch.manual_seed(1234 if "generator" not in name else 7)
        second = loader_of(name)
        second._share = Share(part=part, num_parts=num_parts)
        second._source = _source_of(Batch(), READY[name](), second._share)
        second.load_state_dict(state)
        with torch.no_grad():  # parts of a short batch may be uneven then
            parts.append([batch.tolist() for batch in second])
    return joined(parts)


def loader_of(name: str) -> ParallelLoader:
    plan = ParallelPlan()
    return ParallelLoader(plan, READY[name](), build_mesh(plan))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", READY)
def test_a_state_goes_on_under_other_parts_without_a_sample_twice(name: str) -> None:
    both, _ = of_one_device(name, 2)
    first, second = both[: len(both) // 2], both[len(both) // 2 :]
    assert resumed(name, 2, sum(map(len, first[:2])), 0) == first[2:]
    assert resumed(name, 2, sum(map(len, second[:1])), 1) == second[1:]


@pytest.mark.usefixtures("alone")
def test_a_sampler_that_draws_another_epoch_than_the_saved_one_is_refused() -> None:
    def counted() -> ParallelLoader:
        plan = ParallelPlan()
        ready = DataLoader(Numbers(), batch_size=4, sampler=Counter(Numbers()))
        return ParallelLoader(plan, ready, build_mesh(plan))

    first = counted()
    whole = [batch.tolist() for _ in range(2) for batch in first]
    third = [next(iter(first)).tolist()]
    state, again = first.state_dict(), counted()
    again.load_state_dict(state)
    message = r"another order than in the epoch that was saved.*state_dict.*set_epoch"
    with pytest.raises(ValueError, match=message):
        next(iter(again))
    told = counted()
    told.load_state_dict(state)
    told.sampler.epoch = 2
    assert third + [batch.tolist() for batch in told] == [
        batch.tolist() for batch in DataLoader(Numbers(), batch_size=4, sampler=at_epoch(2))
    ]
    assert whole[:6] != whole[6:]


def at_epoch(epoch: int) -> Counter:
    sampler = Counter(Numbers())
    sampler.epoch = epoch
    return sampler


def peeked(loader: Iterable[Tensor]) -> Rows:
    """Batches of a program that looks at one, breaks off an epoch, and then goes through one."""
    found = [next(iter(loader)).tolist()]
    for count, batch in enumerate(loader):
        found.append(batch.tolist())
        if count == 2:
            break
    return found + [batch.tolist() for batch in loader]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", READY)
def test_a_ready_loader_begins_anew_after_a_break_as_on_one_device(name: str) -> None:
    torch.manual_seed(7)
    expected, then = peeked(READY[name]()), torch.rand(2)
    torch.manual_seed(7)
    with torch.no_grad():
        assert peeked(loader_of(name)) == expected
    assert torch.equal(torch.rand(2), then)


class Sentences(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(1, index + 2)


def pad(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_samples_of_unequal_length_are_padded_by_the_users_function() -> None:
    ready = DataLoader(Sentences(), batch_size=4, collate_fn=pad, num_workers=1)
    for part in range(2):
        source = _source_of(Batch(), ready, Share(part=part, num_parts=2))
        found = [batch for _, batch in source.begin(0, 0)]
        whole = [pad([Sentences()[i] for i in range(4 * n, 4 * n + 4)]) for n in range(2)]
        for mine, every in zip(found, whole, strict=True):
            own = every[2 * part : 2 * part + 2]
            assert torch.equal(mine, own[:, : mine.shape[1]])
            assert not own[:, mine.shape[1] :].any()


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(3)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("workers", [0, 1])
def test_parts_draw_numbers_of_their_own(workers: int) -> None:
    found: list[Tensor] = []
    after: list[Tensor] = []
    for part in range(2):
        torch.manual_seed(3)
        ready = DataLoader(Noisy(), batch_size=4, num_workers=workers)
        source = _source_of(Batch(), ready, Share(part=part, num_parts=2))
        found.append(torch.cat([batch for _, batch in source.begin(0, 0)]))
        after.append(torch.rand(4))
    assert len({*found[0].flatten().tolist(), *found[1].flatten().tolist()}) == 2 * 4 * 3
    assert torch.equal(after[0], after[1])  # ranks keep one generator


def _differently_seeded(rank_seed: bool) -> str:
    torch.manual_seed(dist.get_rank() if rank_seed else 0)
    plan = with_constraints(ParallelPlan(), {"data_parallel.size": 2})
    loader = ParallelLoader(
        plan, DataLoader(Numbers(), batch_size=4, shuffle=True), build_mesh(plan)
    )
    try:
        next(iter(loader))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_would_draw_other_orders_are_told(world2: World) -> None:
    assert world2.run(_differently_seeded, False) == ["", ""]
    for message in world2.run(_differently_seeded, True):
        assert "samples on other ranks" in message
        assert "torch.manual_seed(0)" in message


def _short(trains: bool, count: int) -> tuple[list[int], str]:
    batch = {"batch.global_size": 8, "batch.drop_last": False, "data_parallel.size": 2}
    plan = with_constraints(ParallelPlan(), batch)
    found: list[int] = []
    loader = ParallelLoader(plan, torch.arange(count), build_mesh(plan))
    try:
        with torch.set_grad_enabled(trains):
            for batch in loader:
                found += [len(batch)]
    except ValueError as error:
        return found, str(error)
    return found, ""


def test_a_short_last_batch_is_shared_out_or_named_on_all_ranks(world2: World) -> None:
    assert world2.run(_short, True, 22) == [([4, 4, 3], "")] * 2
    assert world2.run(_short, False, 21) == [([4, 4, 2], ""), ([4, 4, 3], "")]
    for trains, count, text in (
        (True, 21, "has 5 rows, which do not divide over the 2 data-parallel ranks"),
        (False, 17, "has 1 rows, fewer than the 2 data-parallel ranks"),
    ):
        for rows, message in world2.run(_short, trains, count):
            assert rows == [4, 4]
            assert text in message
            assert "drop_last=True" in message
