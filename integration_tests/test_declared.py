"""``tensor_parallel.communication = "declared"``: what a plan does not name is not moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .plans import SEQUENCE, TP
from .test_tensor_parallel import check

COMMUNICATION = "tensor_parallel.communication"
CUT: Mapping[str, str] = {"head.weight": "Shard(0)", "head.<out>": "Shard(-1)"}
GATHERED: Mapping[str, str] = {"head.weight": "Shard(0)", "head.<out>": "Replicate()"}


class Ranked(nn.Module):
    """Its loss sorts the classes, which takes all of them in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids_BS: Tensor) -> Tensor:
        logits_BSV = self.head(self.embed(ids_BS))
        ordered_BSV, _ = logits_BSV.sort(-1)
        return (ordered_BSV * torch.linspace(0, 1, 16)).mean()


class Scaled(nn.Module):
    """A parameter that is whole is used on activations that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BF)) * self.scale)


def parallelized(model: nn.Module, sharding_plan: Mapping[str, str], **given: Any) -> nn.Module:
    constraints = {TP: 2, "tensor_parallel.sharding_plan": sharding_plan, "batch.global_size": 4}
    plan = vescale.generate_plan(model, constraints, world_size=2)
    section = replace(plan.tensor_parallel, communication="declared")
    return vescale.parallelize(replace(plan, tensor_parallel=section), model, **given)


def ranked_loss(sharding_plan: Mapping[str, str]) -> float:
    torch.manual_seed(0)
    return parallelized(Ranked(), sharding_plan)(torch.arange(6).view(2, 3)).item()


def test_a_gather_that_the_plan_does_not_name_is_refused(world2: World) -> None:
    with pytest.raises(Exception, match=r"would gather a cut tensor; .*'<out>': 'Replicate\(\)'"):
        world2.run(ranked_loss, CUT)


def test_a_gather_that_the_plan_names_is_not(world2: World) -> None:
    torch.manual_seed(0)
    expected = Ranked()(torch.arange(6).view(2, 3)).item()
    # float32, the product summed in another order.
    assert world2.run(ranked_loss, GATHERED) == [pytest.approx(expected, rel=1e-6)] * 2


def scaled(plan: Mapping[str, str]) -> float:
    torch.manual_seed(0)
    data = [torch.randn(8) for _ in range(4)]
    model, *_ = parallelized(Scaled(), plan, dataset=_Samples(data))  # pyright: ignore[reportGeneralTypeIssues]
    model(torch.stack(data)).sum().backward()
    return model.scale.grad.full_tensor().item()


class _Samples:
    def __init__(self, data: list[Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


PAIR = {"up.weight": "Shard(0)", "down.weight": "Shard(1)"}


def test_a_sum_of_gradients_that_the_plan_does_not_name_is_refused(world2: World) -> None:
    with pytest.raises(Exception, match=r"gradient of 'scale'; add 'scale.<grad>': 'Partial\(\)'"):
        world2.run(scaled, PAIR)


def test_a_sum_of_gradients_that_the_plan_names_is_one_device_s(world2: World) -> None:
    torch.manual_seed(0)
    data, model = torch.stack([torch.randn(8) for _ in range(4)]), Scaled()
    model(data).sum().backward()
    assert model.scale.grad is not None
    found = world2.run(scaled, {**PAIR, "scale.<grad>": "Partial()"})
    # float32, two ranks' sums.
    assert found == [pytest.approx(model.scale.grad.item(), rel=1e-5)] * 2


@pytest.mark.by_day("bert")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_plans_that_were_found_name_all_that_is_moved(world2: World, family: str) -> None:
    check(world2, family, "sdpa", {TP: 2, SEQUENCE: True, COMMUNICATION: "declared"})
