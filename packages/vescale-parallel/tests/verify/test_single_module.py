"""Modules of a hand-written plan that are run alone, for want of an example of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding, shard
from vescale_parallel._verify.single_module import contradicted_module

SEQUENCE = {
    "mlp.<enter>": "Shard(1)", "mlp.down.<leave>": "Shard(1)",
    "mlp.down.bias.<grad>": "Partial()",
}  # fmt: skip


class Gated(nn.Module):
    """Two linear layers packed in one, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x_BSF: Tensor) -> Tensor:
        gate, up = self.up(x_BSF).chunk(2, -1)
        return self.down(torch.sigmoid(gate) * up)


def plan_of(up: str) -> dict[str, str]:
    return {"mlp.up.weight": up, "mlp.up.bias": up, "mlp.down.weight": "Shard(1)"}


def contradicted_in(model: nn.Module, sharding: TensorSharding) -> str | None:
    found = contradicted_module(model, sharding)
    return None if found is None else found.fqn


@pytest.mark.parametrize("more", [{}, SEQUENCE])
def test_a_packed_layer_is_sharded_part_by_part(more: dict[str, str]) -> None:
    model = nn.ModuleDict({"mlp": Gated()})
    right = shard({**plan_of("InterleavedShard(0, 2)"), **more}, model, 2)
    assert contradicted_module(model, right) is None
    wrong = shard({**plan_of("Shard(0)"), **more}, model, 2)
    assert contradicted_in(model, wrong) == "mlp"


def test_a_bias_of_a_whole_sequence_has_no_partial_gradient() -> None:
    model = nn.ModuleDict({"mlp": Gated()})
    plan = {**plan_of("InterleavedShard(0, 2)"), "mlp.down.bias.<grad>": "Partial()"}
    assert contradicted_in(model, shard(plan, model, 2)) == "mlp"
