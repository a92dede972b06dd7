"""Every rank's rows, put together, are the batches of one device."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from vescale_parallel import ParallelLoader, ParallelPlan, with_constraints
from vescale_parallel._mesh.mesh import build_mesh
from vescale_testing import World

BATCHES = {"batch.global_size": 4, "batch.shuffle": True, "batch.seed": 3}
COUNT = 18


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(COUNT))


def loader_of(constraints: dict[str, Any]) -> ParallelLoader:
    plan = with_constraints(ParallelPlan(), {**BATCHES, **constraints})
    return ParallelLoader(plan, dataset(), build_mesh(plan))


def _rows(constraints: dict[str, Any], epochs: int = 1) -> list[list[int]]:
    loader = loader_of(constraints)
    return [batch[0].tolist() for _ in range(epochs) for batch in loader]


def one_device(epochs: int = 1) -> list[list[int]]:
    batches: list[list[int]] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(3 + 1_000_003 * epoch)
        order = torch.randperm(COUNT, generator=generator).tolist()
        batches += [order[i : i + 4] for i in range(0, COUNT - 3, 4)]
    return batches


def test_data_parallel_ranks_share_the_rows_of_a_batch(world4: World) -> None:
    found = world4.run(_rows, {"data_parallel.size": 4, "data_parallel.zero_stage": 1}, 2)
    together = [list(chain(*parts)) for parts in zip(*found, strict=True)]
    assert together == one_device(2)


def test_ranks_of_one_part_get_the_same_rows(world4: World) -> None:
    constraints = {
        "tensor_parallel.size": 2, "pipeline_parallel.size": 2,
        "tensor_parallel.sharding_policy": "fsdp-only",
    }  # fmt: skip
    assert world4.run(_rows, constraints) == [one_device()] * 4


def _resumed() -> tuple[list[list[int]], dict[str, int]]:
    first, second = loader_of({"data_parallel.size": 2}), loader_of({"data_parallel.size": 2})
    batches = iter(first)
    seen = [next(batches)[0].tolist() for _ in range(2)]
    state = first.state_dict()
    second.load_state_dict(state)
    return seen + [batch[0].tolist() for batch in second], state


def test_a_loader_goes_on_where_another_was(world2: World) -> None:
    found = world2.run(_resumed)
    together = [a + b for a, b in zip(found[0][0], found[1][0], strict=True)]
    assert together == one_device()
    assert found[0][1] == {"epoch": 0, "samples": 8}


def _known_of_loaders() -> tuple[list[Any], list[Any]]:
    ready = DataLoader(dataset(), batch_size=6, shuffle=True)
    given = ParallelLoader(ParallelPlan(), ready, build_mesh(ParallelPlan()))
    planned = loader_of({})
    same = given.sampler is ready.sampler and given.batch_sampler is ready.batch_sampler
    return (
        [len(given.dataset), given.batch_size, same],
        [len(planned.dataset), planned.batch_size, planned.sampler, planned.batch_sampler],
    )


def test_a_loader_has_what_scripts_ask_one_of_torch_for(world1: World) -> None:
    [(given, planned)] = world1.run(_known_of_loaders)
    assert given == [COUNT, 6, True]
    assert planned == [COUNT, 4, None, None]


def _after_an_epoch() -> dict[str, int]:
    loader = loader_of({})
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    return loader.state_dict()


def test_the_end_of_an_epoch_is_the_start_of_the_next(world1: World) -> None:
    assert world1.run(_after_an_epoch) == [{"epoch": 1, "samples": 0}]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


def _refused() -> list[str]:
    messages: list[str] = []
    plan = with_constraints(ParallelPlan(), BATCHES)
    mesh: DeviceMesh = build_mesh(plan)
    cases: list[tuple[ParallelPlan, Any]] = [
        (plan, Stream()),
        (plan, iter(range(COUNT))),
        (plan, DataLoader(dataset(), batch_size=4)),
        (with_constraints(ParallelPlan(), {"batch.global_size": 4}), DataLoader(dataset())),
        (ParallelPlan(), DataLoader(dataset(), batch_size=None)),
        (ParallelPlan(), DataLoader(dataset(), sampler=DistributedSampler(dataset(), 2, 0))),
        (ParallelPlan(), DataLoader(dataset(), num_workers=1, in_order=False)),
        (ParallelPlan(), dataset()),
        (with_constraints(plan, {"batch.global_size": 20}), dataset()),
    ]
    for bad_plan, data in cases:
        with pytest.raises((TypeError, ValueError)) as caught:
            ParallelLoader(bad_plan, data, mesh)
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="does not lie between two batches of 4") as caught:
        ParallelLoader(plan, dataset(), mesh).load_state_dict({"epoch": 0, "samples": 3})
    return messages


def test_data_that_cannot_be_shared_out_is_refused(world1: World) -> None:
    (messages,) = world1.run(_refused)
    expected = [
        "expected batch.shuffle False for an iterable data set",
        "an IterableDataset or a torch.utils.data.DataLoader, got range_iterator",
        "batch.shuffle is True, and a ready DataLoader decides that itself",
        "batch.global_size, 4 rows over all ranks, got 1",
        "got batch_size=None; give it a batch_size",
        "got one with a DistributedSampler; leave it out",
        "in_order=True, got False",
        "needs batch.global_size in the plan, got None",
        "at most the 18 samples of the data set, got 20",
    ]
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def _known() -> list[bool]:
    loader = loader_of({"data_parallel.size": 2})
    batches = list(loader)
    return [*map(loader.gave, batches), loader.gave([batch[0].clone() for batch in batches])]


def test_every_batch_that_a_program_holds_is_known(world2: World) -> None:
    assert world2.run(_known) == [[True] * 4 + [False]] * 2
