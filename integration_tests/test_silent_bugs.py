"""Programs that were once silently wrong: each equals one device or is refused on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from vescale_dtensor import distribute_tensor
from vescale_testing import World

from .models import HandWritten, batches, build
from .programs import (
    ALL,
    PIPELINE,
    TENSOR,
    WIDTH,
    Program,
    Run,
    aten,
    penalty_first,
    penalty_last,
    right,
    right_or_refused,
)
from .training import whole


class Between(nn.Module):
    """Four linear blocks and something between them."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = self.between(x, block(x))
        return F.mse_loss(x, batch["y"])


class LongSkip(nn.Module):
    """The input of the first block is used again after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        first = x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x + first), batch["y"])


class Activated(nn.Module):
    """An ``nn.Sequential`` with an activation between its two linears."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), activation, nn.Linear(2 * WIDTH, WIDTH)
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(self.out(self.net(batch["x"])), batch["y"])


def residual_outside(run: Run) -> None:
    run.train(Between(lambda x, y: x + y.tanh()))


def relu_outside(run: Run) -> None:
    run.train(Between(lambda _, y: y.relu()))


def long_skip(run: Run) -> None:
    run.train(LongSkip())


def sequential(run: Run) -> None:
    run.train(Activated(nn.GELU()))


@pytest.mark.by_day("residual_outside", "relu_outside", "sequential")
@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [residual_outside, relu_outside, long_skip, sequential, penalty_first, penalty_last],
)
def test_a_pipeline_drops_nothing_that_lies_outside_the_blocks(
    world2: World, program: Program
) -> None:
    right_or_refused(world2, program, PIPELINE)


def frozen_below(run: Run) -> None:
    model = HandWritten()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.2.mlp" in name)
    run.train(model, given=batches(3))


@pytest.mark.by_day("zero2", "zero3", "pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ALL)
def test_all_but_a_few_parameters_may_be_frozen(world2: World, plan: str) -> None:
    right(world2, frozen_below, ALL[plan])


# What tensor parallelism certifies


class Gate(nn.Module):
    """Between its linears it uses something that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * x.mean(-1, keepdim=True))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.gate = Gate()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.gate(self.embed(batch["x"]).unsqueeze(1)).squeeze(1)
        return F.mse_loss(self.out(x), batch["y"])


def learned_activation(run: Run) -> None:
    run.train(Activated(nn.PReLU()))


def gated(run: Run) -> None:
    run.train(Gated())


@pytest.mark.slow
@pytest.mark.parametrize("program", [learned_activation, gated])
def test_what_is_certified_has_the_gradients_of_one_device(
    world2: World, program: Program
) -> None:
    right(world2, program, TENSOR)


def hand_written(run: Run) -> None:
    run.train(HandWritten(), given=batches(3))


def gpt2(run: Run) -> None:
    run.train(build("gpt2"), given=batches(3))


WRONG_PLANS: dict[str, tuple[Program, dict[str, str]]] = {
    "qkv_not_interleaved": (
        hand_written,
        {
            "blocks.*.attention.qkv.weight": "Shard(0)",
            "blocks.*.attention.proj.weight": "Shard(1)",
            "blocks.*.attention.<attr:heads>": "Shard(0)",
        },
    ),
    "one_block_forgotten": (
        hand_written,
        {
            "blocks.*.attention.qkv.weight": "InterleavedShard(0, 3)",
            "blocks.*.attention.proj.weight": "Shard(1)",
            "blocks.0.attention.<attr:heads>": "Shard(0)",
        },
    ),
    "uneven_gather": (
        hand_written,
        {"head.weight": "Shard(0)", "head.<out>": "Replicate()"},
    ),
    "head_without_gather": (gpt2, {"model.lm_head.weight": "Shard(0)"}),
    "tied_head": (
        gpt2,
        {"model.lm_head.weight": "Shard(0)", "model.lm_head.<out>": "Replicate()"},
    ),
    "output_of_whole": (hand_written, {"norm.<out>": "Replicate()"}),
    "output_not_replicated": (hand_written, {"head.<out>": "Shard(1)"}),
    "grad_replicated": (hand_written, {"norm.weight.<grad>": "Replicate()"}),
}


@pytest.mark.by_day(
    "qkv_not_interleaved",
    "one_block_forgotten",
    "head_without_gather",
    "tied_head",
    "output_of_whole",
    "output_not_replicated",
    "grad_replicated",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_PLANS)
def test_a_wrong_sharding_plan_is_refused(world2: World, name: str) -> None:
    program, plan = WRONG_PLANS[name]
    right_or_refused(world2, program, {**TENSOR, "tensor_parallel.sharding_plan": plan})


def written(name: str) -> tuple[Tensor, Tensor]:
    """Run an operator on a plain tensor and a distributed one; return what it should give too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inputs may be gathered
        return _written(name)


def _written(name: str) -> tuple[Tensor, Tensor]:
    mesh, full = init_device_mesh("cpu", (2,)), torch.arange(24.0).view(4, 6)
    cut, plain = distribute_tensor(full, mesh, [Shard(0)]), torch.ones(4, 6)
    one = torch.ones(4, 6)
    match name:
        case "add_":
            return plain.add_(cut), one + full
        case "lerp_":
            return plain.lerp_(cut, 0.5), one.lerp(full, 0.5)
        case "out":
            torch.add(cut, cut, out=plain)
            return plain, full * 2
        case "foreach_copy":
            aten._foreach_copy_([plain], [cut])
            return plain, full
        case "foreach_lerp":
            aten._foreach_lerp_([plain], [cut], 0.5)
            return plain, one.lerp(full, 0.5)
        case "foreach_max":
            return whole(aten._foreach_max([cut])[0]), full.max()
        case "foreach_norm":
            (norm,) = aten._foreach_norm([cut], 2.0, dtype=torch.float64)
            return whole(norm), full.double().norm()
        case "keepdim":
            return (
                whole(torch.linalg.vector_norm(cut, keepdim=True)),
                torch.linalg.vector_norm(full, keepdim=True),
            )
        case _:
            raise ValueError(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "add_", "lerp_", "out", "foreach_copy", "foreach_lerp", "foreach_max", "foreach_norm",
        "keepdim",
    ],
)  # fmt: skip
def test_an_operator_writes_the_whole_tensor(world2: World, name: str) -> None:
    for found, expected in world2.run(written, name):
        # One rounding of float32 in a norm; everything else is exact.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
