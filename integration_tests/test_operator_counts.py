"""What a step dispatches does not grow with the ranks, and is no more than FSDP2 dispatches.

One rank of many runs alone: its process group is torch's fake one, whose collectives return at
once. What is counted is every operator and collective of a forward and backward pass, an AdamW
step and ``zero_grad``, of a Llama of four layers. One device dispatches 1,013 operators and FSDP2
1,317 with 14 collectives, at any number of ranks (torch 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701 (as torch's tests)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)
from transformers import LlamaConfig, LlamaForCausalLM

import vescale
from vescale_parallel import ParallelPlan, with_constraints

pytestmark = [
    pytest.mark.slow,
    # All ranks of a fake process group say what this one says.
    pytest.mark.filterwarnings("ignore:.* data-parallel ranks were called with 1 different"),
]

_WARM_UP = 5  # what ranks are called with is compared in the first calls
_IDS = torch.zeros(1, 8, dtype=torch.long)


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


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int], None]]:
    """Return what makes this process rank 0 of many."""

    def start(ranks: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    yield start
    dist.destroy_process_group()


def _llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def _counted(model: Any, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    def step() -> None:
        model(input_ids=_IDS, labels=_IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(_WARM_UP):
        step()
    with Operators() as operators:
        step()
    return operators.counts.total(), operators.collectives()


def _of_plan(constraints: dict[str, Any]) -> tuple[int, int]:
    plan = with_constraints(ParallelPlan(), constraints)
    return _counted(*vescale.parallelize(plan, _llama(), _optimizer))


def _of_fsdp2(ranks: int) -> tuple[int, int]:
    model, mesh = _llama(), init_device_mesh("cpu", (ranks,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _counted(model, _optimizer(model))


# Collectives: of five groups of parameters a gather and a reduction, four gathers again in
# backward at stage 3; the count of targets, the mean of the loss, and which parameters were used.
# A sum over copies is two collectives, a reduction and a gather.
@pytest.mark.parametrize(
    ("stage", "collectives"),
    [
        (0, 5 + 5 + 3),
        pytest.param(1, 5 + 5 + 3, marks=pytest.mark.nightly),
        pytest.param(2, 5 + 5 + 3, marks=pytest.mark.nightly),
        (3, 9 + 5 + 3),
    ],
)
def test_operators_and_collectives_do_not_depend_on_the_number_of_ranks(
    fake_ranks: Callable[[int], None], stage: int, collectives: int
) -> None:
    found: dict[int, tuple[int, int]] = {}
    for ranks in (8, 64):
        fake_ranks(ranks)
        constraints = {"data_parallel.size": ranks, "data_parallel.zero_stage": stage}
        found[ranks] = _of_plan(constraints)
    assert found[8] == found[64]
    assert found[8][1] == collectives
    assert found[8][0] <= 1280  # 1,272 at stage 3


@pytest.mark.parametrize("ranks", [16, pytest.param(256, marks=pytest.mark.nightly)])
def test_a_step_of_zero_3_dispatches_no_more_than_one_of_fsdp2(
    fake_ranks: Callable[[int], None], ranks: int
) -> None:
    fake_ranks(ranks)
    ours = _of_plan({"data_parallel.size": ranks, "data_parallel.zero_stage": 3})
    assert ours[0] <= _of_fsdp2(ranks)[0]


def test_copies_of_shards_do_not_add_operators_per_rank(
    fake_ranks: Callable[[int], None],
) -> None:
    found: set[tuple[int, int]] = set()
    for ranks in (32, 128):
        fake_ranks(ranks)
        found.add(
            _of_plan(
                {
                    "data_parallel.size": ranks,
                    "data_parallel.zero_stage": 3,
                    "data_parallel.replicate_size": ranks // 8,
                }
            )
        )
    assert len(found) == 1
