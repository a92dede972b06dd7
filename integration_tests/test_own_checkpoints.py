"""A program's own activation checkpoints, under every axis, with one device's numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_testing import World

from .families import make
from .plans import DP, EP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .training import whole

PLANS: dict[str, Constraints] = {
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "pp": {PP: 2, PARTS: 2},
    "pp-gpipe": {PP: 2, PARTS: 2, "pipeline_parallel.schedule": "gpipe"},
    "ep": {DP: 2, EP: 2},
}
Grads = dict[str, Tensor]


def enabled(family: str, reentrant: bool | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model whose blocks its own switch has checkpointed, and its batch."""
    torch.manual_seed(0)
    model, call = make(family)
    if reentrant is not None:
        options = {"use_reentrant": reentrant}
        # Renamed in transformers 5, where the old name warns.
        old, new = "gradient_checkpointing_enable", "activation_checkpointing_enable"
        has_new = hasattr(model, new)
        getattr(model, new if has_new else old)(options)
    return model.train(), call


def checkpoint_calls(model: nn.Module, reentrant: bool) -> None:
    """Checkpoint what a block's largest part computes, as a hand-written model may do."""
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            own = module.forward
            module.forward = lambda *args, own=own: checkpoint(own, *args, use_reentrant=reentrant)


def run(family: str, constraints: Constraints, reentrant: bool | None, inner: bool) -> Grads:
    model, call = enabled(family, None if inner else reentrant)
    if inner and reentrant is not None:
        checkpoint_calls(model, reentrant)
    plan = make_plan(constraints)
    model = vescale.parallelize(plan, model)
    parts = plan.data_parallel.size
    part = dist.get_rank() // plan.tensor_parallel.size % parts
    found: Grads = {}
    for step in range(2):  # the second one's form of call is known
        loss = model(**{name: x.chunk(parts)[part] for name, x in call.items()}).loss
        loss.backward()
        found |= {
            f"{step} {n}": whole(p.grad) for n, p in model.named_parameters() if p.grad is not None
        }
        found[f"{step} loss"] = loss.detach()
        model.zero_grad()
    return found


def runs(
    family: str, constraints: Constraints, inner: bool, modes: tuple[bool, ...]
) -> list[Grads]:
    with warnings.catch_warnings():
        # Of use_reentrant=True, where a pipeline runs a block on shapes, without gradients.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad", UserWarning)
        return [run(family, constraints, mode, inner) for mode in (None, *modes)]


def same(world: World, family: str, plan: str, inner: bool, *modes: bool) -> None:
    for plain, *checkpointed in world.run(runs, family, PLANS[plan], inner, modes):
        assert len(plain) > 10
        for found in checkpointed:
            assert found.keys() == plain.keys()
            for name, value in plain.items():
                assert torch.equal(found[name], value), name


DENSE = ("zero2", "zero3", "tp", "tp-sequence", "pp", "pp-gpipe")


@pytest.mark.by_day("tp")
@pytest.mark.parametrize("plan", DENSE)
def test_the_switch_of_transformers_changes_no_bit(world2: World, plan: str) -> None:
    same(world2, "llama", plan, False, True, False)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", DENSE)
def test_the_switch_of_models_with_absolute_positions_changes_no_bit(
    world2: World, plan: str
) -> None:
    same(world2, "gpt2", plan, False, True, False)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", ["ep", "zero3"])
def test_a_mixture_that_is_checkpointed_has_the_same_bits(world2: World, plan: str) -> None:
    same(world2, "mixtral", plan, False, True, False)


@pytest.mark.by_day("zero3")
@pytest.mark.parametrize("plan", DENSE)
def test_a_part_of_a_block_that_is_checkpointed_changes_no_bit(world2: World, plan: str) -> None:
    same(world2, "llama", plan, True, True, False)


class DroppedPaths(nn.Module):
    """Leaves the branch of a block out for some rows, by a mask that it draws in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.down(functional.gelu(self.up(self.norm(x))))
        kept = branch.new_empty((len(x), 1, 1)).bernoulli_(0.7)
        return x + branch * kept / 0.7


class Deep(nn.Module):
    """Checkpoints its blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(DroppedPaths() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return functional.cross_entropy(self.head(x.mean(1)), y)


def _deep(constraints: Constraints | None, reentrant: bool) -> Grads:
    torch.manual_seed(0)
    model = Deep(reentrant).double()
    x, y = torch.randn(8, 6, 4).double(), torch.randint(0, 5, (8,))
    rank, parts = 0, 1
    if constraints is not None:
        plan = vescale.generate_plan(model, constraints, example_batch=(x, y))
        if plan.tensor_parallel.size > 1:
            assert "blocks.*.up.weight" in (plan.tensor_parallel.sharding_plan or {})
        model = vescale.parallelize(plan, model)
        rank, parts = vescale.data_parallel_rank(model), plan.data_parallel.size
    loss = model(x.chunk(parts)[rank], y.chunk(parts)[rank])
    loss.backward()
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach()}


def _deep_both(constraints: Constraints, reentrant: bool) -> tuple[Grads, Grads]:
    return _deep(constraints, reentrant), _deep(None, reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plan", [{TP: 2}, {DP: 2, ZERO: 3}])
def test_blocks_that_draw_in_place_run_again_with_one_device_s_masks(
    world2: World, plan: Constraints, reentrant: bool
) -> None:
    for found, expected in world2.run(_deep_both, plan, reentrant):
        # Rounding of float64 in sums over ranks.
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
