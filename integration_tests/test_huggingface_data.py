"""HuggingFace data sets and torchdata's loader; the oracle is a DataLoader of one device."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import vescale
from vescale_parallel import with_constraints
from vescale_testing import World

COUNT, ROWS = 26, 4
Rows = list[list[int]]


def table() -> Any:
    import datasets

    numbers = {"id": [*range(COUNT)], "text": [f"row {index}" for index in range(COUNT)]}
    return datasets.Dataset.from_dict(numbers)


def mixed() -> Any:
    import datasets

    other = table().map(_later, keep_in_memory=True).to_iterable_dataset(num_shards=2)
    parts = [table().to_iterable_dataset(num_shards=2), other]
    return datasets.interleave_datasets(parts, probabilities=[0.3, 0.7], seed=1)


def _later(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"] + 100}


def shuffled() -> Any:
    return table().to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=6)


DATA: dict[str, Callable[[], Any]] = {
    "torch": lambda: table().with_format("torch"),
    "columns": lambda: table().with_format("torch", columns=["id"]),
    "python": table,
    "mapped": lambda: (
        table().map(_later, keep_in_memory=True).shuffle(seed=2, keep_in_memory=True)
    ),
    "stream": lambda: table().to_iterable_dataset(num_shards=3).with_format("torch"),
    "shuffled stream": lambda: shuffled().with_format("torch"),
    "mapped stream": lambda: shuffled().map(_later).filter(_is_even),
    "interleaved": mixed,
}


def _is_even(row: dict[str, Any]) -> bool:
    return row["id"] % 2 == 0


def rows_of(loader: Any, dataset: Any, epochs: int) -> Rows:
    found: Rows = []
    for epoch in range(epochs):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        found += [batch["id"].tolist() for batch in loader]
    return found


def one_device(dataset: Any, epochs: int, **settings: Any) -> Rows:
    loader: Any = DataLoader(dataset, batch_size=ROWS, drop_last=True, **settings)
    return rows_of(loader, dataset, epochs)


def parallel(dataset: Any, ranks: int, **batch: Any) -> Any:
    said = {"batch.global_size": ROWS} if not isinstance(dataset, DataLoader) else {}
    constraints = {"data_parallel.size": ranks, **said, **batch}
    plan = with_constraints(vescale.ParallelPlan(), constraints)
    return vescale.parallelize(plan, nn.Linear(1, 1), dataset=dataset)[1]


def _rows(name: str, epochs: int) -> Rows:
    dataset = DATA[name]()
    return rows_of(parallel(dataset, dist.get_world_size()), dataset, epochs)


@pytest.mark.by_day("mapped stream")
@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_ranks_share_the_batches_of_one_device(world2: World, name: str) -> None:
    parts = world2.run(_rows, name, 2)
    expected = one_device(DATA[name](), 2)
    assert [list(chain(*rows)) for rows in zip(*parts, strict=True)] == expected


def _begin(name: str, taken: int) -> dict[str, Any]:
    dataset = DATA[name]()
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(1)
    loader = parallel(dataset, dist.get_world_size())
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    return loader.state_dict()


def _go_on(name: str, state: dict[str, Any]) -> Rows:
    dataset = DATA[name]()
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(1)
    loader = parallel(dataset, dist.get_world_size())
    loader.load_state_dict(state)
    return [batch["id"].tolist() for batch in loader]


@pytest.mark.by_day("mapped stream")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "shuffled stream", "mapped stream", "interleaved"])
def test_an_epoch_goes_on_under_another_number_of_ranks(
    world1: World, world2: World, name: str
) -> None:
    dataset = DATA[name]()
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(1)
    expected = [batch["id"].tolist() for batch in DataLoader(dataset, ROWS, drop_last=True)]
    state, _ = world2.run(_begin, name, 2)
    (found,) = world1.run(_go_on, name, state)
    assert found == expected[2:]


@pytest.fixture(autouse=True)
def collected() -> None:
    """Destroy process groups of tests before here: a forked worker that did so would hang."""
    gc.collect()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A world of this process: one that is a rank of a pool may start no workers."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.by_day("shuffled stream")
@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["torch", "shuffled stream"])
def test_workers_read_in_the_order_of_one_device(name: str) -> None:
    dataset = DATA[name]()
    loader = parallel(dataset, 1, **{"batch.num_workers": 2})
    assert rows_of(loader, dataset, 2) == one_device(DATA[name](), 2, num_workers=2)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_stream_of_files_is_read_as_on_one_device(tmp_path: Path) -> None:
    import datasets

    files = [str(tmp_path / f"{index}.jsonl") for index in range(3)]
    for index, file in enumerate(files):
        lines = [json.dumps({"id": 10 * index + row}) for row in range(9)]
        Path(file).write_text("\n".join(lines), encoding="utf-8")
    options: dict[str, Any] = {"data_files": files, "split": "train", "streaming": True}
    found = [datasets.load_dataset("json", **options).shuffle(seed=4) for _ in range(2)]
    assert rows_of(parallel(found[0], 1), found[0], 2) == one_device(found[1], 2)


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        # Of torchdata 0.11 with torch 2.13: its constructor counts its calls.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(
            DATA["torch"](),
            batch_size=ROWS,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(5),
        )


def _stateful(state: dict[str, Any] | None, stop: int) -> tuple[Rows, dict[str, Any]]:
    loader = parallel(stateful(), dist.get_world_size())
    if state is not None:
        loader.load_state_dict(state)
    found: Rows = []
    for batch in loader:
        found.append(batch["id"].tolist())
        if len(found) == stop:
            break
    return found, loader.state_dict()


@pytest.mark.slow
def test_a_stateful_loader_is_shared_and_goes_on(world1: World, world2: World) -> None:
    expected = [batch["id"].tolist() for batch in stateful()]
    (first, state), (second, _) = world2.run(_stateful, None, 3)
    ((rest, _),) = world1.run(_stateful, state, -1)
    assert [*(a + b for a, b in zip(first, second, strict=True)), *rest] == expected
