"""Steps of training, from forward to optimizer, that a program compiles as one function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_testing import World

from .families import make, tokens
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .test_own_compile import blocks_of

QUICK = "aot_eager"  # all of torch.compile but machine code
RECOMPUTE, BLOCKS, BACKEND = "recompute", "compile", "compile_backend"

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero1": {DP: 2, ZERO: 1},
    "zero3": {DP: 2, ZERO: 3},
    "zero2-recompute": {DP: 2, ZERO: 2, RECOMPUTE: "full"},
    "zero2-accumulation": {DP: 2, ZERO: 2, "batch.gradient_accumulation": 2},
    "zero3-blocks": {DP: 2, ZERO: 3, BLOCKS: "blocks", BACKEND: QUICK},
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "tp-recompute": {TP: 2, RECOMPUTE: "full"},
    "tp-blocks": {TP: 2, BLOCKS: "blocks", BACKEND: QUICK},
    "pp": {PP: 2, PARTS: 2},
}

Step = Callable[[], Tensor]
Program = Callable[[nn.Module, torch.optim.Optimizer, Any], Step]


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    def step() -> Tensor:
        loss: Tensor = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach() + norm.item()

    return step


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    def step() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(2):
            loss: Tensor = model(**batch) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    train = usual(model, optimizer, batch)

    def step() -> Tensor:
        train()
        model.eval()
        with torch.no_grad():
            loss: Tensor = model(**batch)
        model.train()
        return loss

    return step


def hooked(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    def double(_: nn.Module, grads: Any) -> Any:
        return tuple(None if grad is None else grad * 2 for grad in grads)

    for block in blocks_of(model):
        block.register_full_backward_pre_hook(double)
    return usual(model, optimizer, batch)


class Checkpointed(nn.Module):
    """Calls its blocks through ``torch.utils.checkpoint``."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(2)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model_of(family: str) -> tuple[nn.Module, dict[str, Any]]:
    if family.startswith("checkpoint"):
        return Checkpointed(use_reentrant=family == "checkpoint-reentrant").double(), tokens()
    return make(family)


def trained(
    family: str, program: Program, constraints: Constraints | None, *, is_compiled: bool
) -> tuple[list[float], int]:
    """Return the losses of some steps, and how many graphs were compiled."""
    torch.compiler.reset()
    counted: Any = torch._dynamo.utils.counters
    counted.clear()
    with warnings.catch_warnings():
        # Of torch's own, and that of the model nothing is compiled.
        warnings.simplefilter("ignore")
        model, batch = model_of(family)
        if constraints is not None:
            plan = vescale.generate_plan(
                model, constraints, example_batch=batch, cluster="cpu", world_size=2
            )
            model = vescale.parallelize(plan, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = program(model, optimizer, batch)
        if is_compiled:
            step = torch.compile(step, backend=QUICK)
        losses = [step().item() for _ in range(3)]
    return losses, counted["stats"]["unique_graphs"]


def compiled(family: str, program: Program, plan: str) -> tuple[list[float], int]:
    return trained(family, program, PLANS[plan], is_compiled=True)


def assert_right(world: World, family: str, program: Program, plan: str) -> None:
    expected, _ = trained(family, program, None, is_compiled=False)
    for losses, graphs in world.run(compiled, family, program, plan):
        # float64 over three steps: compiled operators and sums over ranks round in another order.
        assert losses == pytest.approx(expected, rel=1e-10)
        # The optimizer's and what is around it; none that begins in a hook.
        assert 0 < graphs <= 8


@pytest.mark.by_day("evaluated-pp")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plan"),
    [
        (usual, "zero3"),
        (clipped, "tp"),
        (hooked, "dp"),
        (evaluated, "pp"),
    ],
)
def test_a_compiled_step_has_the_losses_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    assert_right(world2, "nanogpt", program, plan)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan"), [("checkpoint", "zero3"), ("checkpoint-reentrant", "tp")]
)
def test_so_it_has_where_blocks_run_again_in_backward(
    world2: World, family: str, plan: str
) -> None:
    assert_right(world2, family, usual, plan)


BY_NIGHT = [
    (program, plan)
    for program in (usual, clipped, accumulated, evaluated, hooked)
    for plan in PLANS
]


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "plan"), BY_NIGHT)
def test_so_it_has_of_every_program_and_plan(world2: World, program: Program, plan: str) -> None:
    assert_right(world2, "nanogpt", program, plan)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plan", sorted(PLANS.keys() - {"tp-sequence", "pp"})
)  # whose models are others
@pytest.mark.parametrize("family", ["checkpoint", "checkpoint-reentrant"])
def test_so_it_has_of_every_plan_where_blocks_run_again(
    world2: World, family: str, plan: str
) -> None:
    assert_right(world2, family, usual, plan)


def compile_whole(fullgraph: bool) -> None:
    model, batch = model_of("nanogpt")
    plan = vescale.generate_plan(model, {DP: 2}, cluster="cpu", world_size=2)
    torch.compile(vescale.parallelize(plan, model), backend=QUICK, fullgraph=fullgraph)(**batch)


def test_a_whole_model_as_one_graph_says_what_to_do(world2: World) -> None:
    # Up to torch 2.11 it runs as it is written, with the warning.
    message = r"(with fullgraph=True, but|compiles nothing:) between .*; compile the blocks: give"
    with pytest.raises(Exception, match=message):
        world2.run(compile_whole, True)


def step_as_one_graph() -> None:
    model, batch = model_of("nanogpt")
    plan = vescale.generate_plan(model, {DP: 2}, cluster="cpu", world_size=2)
    step = usual(vescale.parallelize(plan, model), torch.optim.SGD(model.parameters()), batch)
    torch.compile(step, backend=QUICK, fullgraph=True)()


def test_a_step_as_one_graph_says_what_to_do(world2: World) -> None:
    message = r"it calls a parallelized model: between .*; compile the blocks: give"
    with pytest.raises(Exception, match=message):
        world2.run(step_as_one_graph)
