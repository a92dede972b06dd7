"""How many forwards on fake tensors a plan takes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from vescale_parallel import parallelize
from vescale_parallel._trace.fake_run import FakeRun  # noqa: PLC2701 - counted here
from vescale_planner import Cluster, generate_plan
from vescale_testing import World


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.dropout(self.down(F.relu(self.up(self.norm(x_BSD)))))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(x_BSD)


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


IDS_BS = torch.arange(64).view(4, 16) % 32


def on_rank_count(name: str) -> tuple[int, int]:
    """Return the fake forwards of generate_plan and of parallelize."""
    made: list[FakeRun] = []
    forward = FakeRun.forward

    def counted(run: FakeRun, *args: Any) -> Any:
        made.append(run)
        return forward(run, *args)

    batch = {"input_ids": IDS_BS} if name == "llama" else (IDS_BS,)
    model = llama() if name == "llama" else Written()
    with mock.patch.object(FakeRun, "forward", counted):
        plan = generate_plan(
            model,
            {"tensor_parallel.size": 2, "batch.global_size": 4},
            world_size=2,
            cluster=Cluster.preset("h200"),
            example_batch=batch,
        )
        num_planned = len(made)
        parallelize(plan, model, dataset=TensorDataset(IDS_BS) if name == "written" else None)
    return num_planned, len(made) - num_planned


# What is observed, which axes there are, the whole model, one rank's part of it; and for a model
# that draws twice as many rows. The batch that is observed is not the small one of a proof. Of a
# model whose code asks whether it is in training one more in each mode.
@pytest.mark.by_day("written-expected1")
@pytest.mark.parametrize(("name", "expected"), [("llama", (6, 1)), ("written", (5, 3))])
def test_a_plan_takes_one_fake_forward_for_each_thing_that_it_shows(
    world2: World, name: str, expected: tuple[int, int]
) -> None:
    assert world2.run(on_rank_count, name) == [expected] * 2
