"""What a step dispatches does not grow with the ranks, and is no more than FSDP2 dispatches.

One rank of many runs alone: its process group is torch's fake one, whose collectives return at
once. What is counted is every operator and collective of a forward and backward pass, an AdamW
step and ``zero_grad``, of a Llama of four layers. One device dispatches 1,013 operators and FSDP2
1,317 with 14 collectives, at any number of ranks (torch 2.13).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)

import vescale
from vescale_parallel import ParallelPlan, with_constraints

from .fake_ranks import IDS, WARM_UP, adamw, llama, rank_0_of

pytestmark = [
    pytest.mark.slow,
    # All ranks of a fake process group say what this one says.
    pytest.mark.filterwarnings("ignore:.* data-parallel ranks were called with 1 different"),
]


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def collectives(self) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith("c10d"))


def _counted(model: Any, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    def step() -> None:
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    with Operators() as operators:
        step()
    return operators.counts.total(), operators.collectives()


def _of_plan(constraints: dict[str, Any]) -> tuple[int, int]:
    plan = with_constraints(ParallelPlan(), constraints)
    return _counted(*vescale.parallelize(plan, llama(), adamw))


def _of_fsdp2(ranks: int) -> tuple[int, int]:
    model, mesh = llama(), init_device_mesh("cpu", (ranks,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _counted(model, adamw(model))


# Collectives: of five groups of parameters a gather and a reduction, three gathers again in
# backward at stage 3, which begins with what forward ended with; the count of targets, the
# mean of the loss, and which parameters were used. At stages 1 and 2 ranks also tell each other,
# a byte a group, which groups some rank has to gather. A sum over copies is two collectives, a
# reduction and a gather.
@pytest.mark.by_day("0-13")
@pytest.mark.parametrize(
    ("stage", "collectives"),
    [
        (0, 5 + 5 + 3),
        (1, 5 + 5 + 4),
        (2, 5 + 5 + 4),
        (3, 8 + 5 + 3),
    ],
)
def test_operators_and_collectives_do_not_depend_on_the_number_of_ranks(
    stage: int, collectives: int
) -> None:
    found: dict[int, tuple[int, int]] = {}
    for ranks in (8, 64):
        constraints = {"data_parallel.size": ranks, "data_parallel.zero_stage": stage}
        with rank_0_of(ranks):
            found[ranks] = _of_plan(constraints)
    assert found[8] == found[64]
    assert found[8][1] == collectives
    assert found[8][0] <= 1280  # 1,272 at stage 3


@pytest.mark.by_day("16")
@pytest.mark.parametrize("ranks", [16, 256])
def test_a_step_of_zero_3_dispatches_no_more_than_one_of_fsdp2(
    ranks: int,
) -> None:
    with rank_0_of(ranks):
        ours = _of_plan({"data_parallel.size": ranks, "data_parallel.zero_stage": 3})
        assert ours[0] <= _of_fsdp2(ranks)[0]


def test_copies_of_shards_do_not_add_operators_per_rank() -> None:
    found: set[tuple[int, int]] = set()
    for ranks in (32, 128):
        constraints = {
            "data_parallel.size": ranks,
            "data_parallel.zero_stage": 3,
            "data_parallel.replicate_size": ranks // 8,
        }
        with rank_0_of(ranks):
            found.add(_of_plan(constraints))
    assert len(found) == 1


def _micro_batches(model: Any, parts: int) -> int:
    """Count operators of forward and backward over a batch in equal parts, one by one."""
    ids = IDS.expand(4, -1)

    def step() -> None:
        for each in ids.chunk(parts):
            (model(input_ids=each, labels=each).loss / parts).backward()

    for _ in range(WARM_UP):
        step()
    with Operators() as operators:
        step()
    return operators.counts.total()


def test_accumulation_counts_targets_without_a_second_forward() -> None:
    plan = with_constraints(ParallelPlan(), {"batch.gradient_accumulation": 4})
    alone = llama()
    with rank_0_of(1):
        found = _micro_batches(vescale.parallelize(plan, llama()), 1)
    # For each micro-batch its rows, the targets that count and the loss; the parameters, once.
    constant = 4 * 25 + 3 * len([*alone.parameters()])
    # A forward is 370 operators, without layers 40.
    assert found <= _micro_batches(alone, 4) + constant
