"""Gradients of what regions are given, where an example lets none of them reach a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._verify.dry_runs import DryRuns
from vescale_parallel._verify.equivalence import CheckResult, Contradiction, check_plan

from .one_device import check_against_one_device

TOKENS, WIDTH, HIDDEN, EXPERTS = 32, 8, 12, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_EDH = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down_EHD = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x_SD: Tensor, expert_SK: Tensor, weights_SK: Tensor) -> Tensor:
        total_SD = torch.zeros_like(x_SD)
        for choice in range(expert_SK.shape[1]):
            of_SK = nn.functional.one_hot(expert_SK[:, choice], EXPERTS).to(x_SD.dtype)
            hidden_ESH = (x_SD @ self.up_EDH).relu()
            each_ESD = hidden_ESH @ self.down_EHD
            y_SD = torch.einsum("se,esd->sd", of_SK, each_ESD)
            total_SD = total_SD + y_SD * weights_SK[:, choice, None]
        return total_SD


class ByTable(nn.Module):
    """Experts by a table of tokens; what is learned weighs them, and weights add up to one.

    The table is a checkpoint's: until that is read it names the same expert twice, whose two
    weights are a half each, whatever the gate is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()
        self.expert_VK = nn.Buffer(torch.zeros(TOKENS, 2, dtype=torch.long))

    def forward(self, x_SD: Tensor, ids_S: Tensor) -> Tensor:
        expert_SK = self.expert_VK[ids_S]
        scores_SK = self.gate(x_SD).sigmoid().gather(1, expert_SK)
        return self.experts(x_SD, expert_SK, scores_SK / scores_SK.sum(-1, keepdim=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), ByTable()

    def forward(self, x_SD: Tensor, ids_S: Tensor) -> Tensor:
        return x_SD + self.mixture(self.norm(x_SD), ids_S)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, ids_S: Tensor) -> Tensor:
        x_SD = self.embed(ids_S)
        for block in self.blocks:
            x_SD = block(x_SD, ids_S)
        return x_SD


def read_tables(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ByTable):
            module.expert_VK.copy_(torch.randint(0, EXPERTS, (TOKENS, 2)))


@pytest.mark.parametrize("size", [2, 3])
def test_a_router_that_is_constant_in_the_example_is_trained_as_on_one_device(size: int) -> None:
    torch.manual_seed(0)
    model, ids_S = Model().double(), torch.randint(0, TOKENS, (10,))
    plan = dict(propose_sharding(model, "auto", size, example_batch=(ids_S,)).plan)
    assert plan["blocks.*.mixture.experts.down_EHD"] == "Shard(1)"
    read_tables(model)
    check_against_one_device(model, (ids_S,), plan, size)


_OF_EXPERTS = {
    "blocks.*.mixture.experts.up_EDH": "Shard(2)",
    "blocks.*.mixture.experts.down_EHD": "Shard(1)",
    "blocks.*.mixture.experts.<leave>": "Replicate()",
}


def checked(plan: dict[str, str]) -> CheckResult:
    torch.manual_seed(0)
    model, ids_S = Model().double(), torch.randint(0, TOKENS, (10,))
    return check_plan(DryRuns(model, (ids_S,)), shard(_OF_EXPERTS | plan, model, 2))


def test_weights_that_do_not_enter_are_a_contradiction() -> None:
    with pytest.raises(Contradiction, match=r"mixture.experts: .* argument 'weights_SK' differs"):
        checked({"blocks.*.mixture.experts.<enter>": "Replicate()"})


def test_a_router_within_a_region_has_a_partial_gradient_though_it_is_zero() -> None:
    result = checked({"blocks.*.mixture.<enter>": "Replicate()"})
    gates = ("blocks.0.mixture.gate", "blocks.1.mixture.gate")
    assert result.partial_grads == {
        f"{fqn}.{name}" for fqn in gates for name in ("weight", "bias")
    }


def test_a_router_outside_of_a_region_does_not() -> None:
    marks = ("<enter>", "<enter:weights_SK>")
    result = checked({f"blocks.*.mixture.experts.{mark}": "Replicate()" for mark in marks})
    assert not result.partial_grads
