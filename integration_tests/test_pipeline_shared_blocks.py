"""Pipelines of models that call a block more than once, compared with one device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import vescale
from vescale_dtensor import DTensor
from vescale_parallel import check_pipeline
from vescale_testing import World

from .crossing_models import ROWS, tokens
from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .shared_blocks import make
from .test_pipeline_cuts import GlobalMeans, loss_of
from .test_pipeline_schedules import constraints_of
from .training import whole

STEPS, MAX_NORM = 3, 0.5
CALLS = "pipeline_parallel.block_calls"
BEHIND = "pipeline_parallel.called_behind"
# A weight with two calls on a stage has its gradient with that of the input.
APART = "pipeline_parallel.schedule"


# Gradients of a block are summed over its calls on every stage first: in another order.
def close(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def example(dropout: float) -> dict[str, Tensor]:
    batch = tokens()
    if dropout:  # all targets count, so that one device need not count them beforehand
        batch["labels"] = batch["input_ids"].roll(-1, 1)
    return batch


def on_one_device(
    model: nn.Module, batch: Mapping[str, Tensor], microbatches: int, steps: int
) -> dict[str, Any]:
    """Accumulate micro-batches, clip and step; what came of it."""
    optimizer, losses, norms = adamw(model), list[Tensor](), list[Tensor]()
    grads = dict[str, Tensor]()
    torch.manual_seed(3)
    for _ in range(steps):
        means = GlobalMeans(microbatches)
        with means, torch.no_grad(), torch.random.fork_rng():
            model(**batch)
        means.is_counting, found = False, list[Tensor]()
        for part in zip(*(x.chunk(microbatches) for x in batch.values()), strict=True):
            with means:
                loss = loss_of(model(**dict(zip(batch, part, strict=True))))
            (loss / microbatches).backward()
            found.append(loss.detach())
        grads = grads or {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        losses.append(torch.stack(found).mean())
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "draws": torch.rand(3),
    }


def in_pipeline(
    model: nn.Module, optimizer: Optimizer, batch: Mapping[str, Tensor], steps: int
) -> dict[str, Any]:
    losses, norms, grads = list[Tensor](), list[Tensor](), dict[str, Tensor]()
    torch.manual_seed(3)
    for _ in range(steps):
        loss = loss_of(model(**batch))
        loss.backward()
        named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        grads = grads or {n: whole(p.grad).clone() for n, p in named if p.grad is not None}
        losses.append(loss.detach())
        norms.append(whole(clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    state = {key: whole(x).clone() for key, x in model.state_dict().items()}
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "state": state,
        "draws": torch.rand(3),
    }


def part_of(plan: vescale.ParallelPlan, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    size = plan.data_parallel.size
    rank = torch.distributed.get_rank() % size
    return {key: x.chunk(size)[rank] for key, x in batch.items()}


def compared(name: str, constraints: Constraints, dropout: float = 0.0, depth: int = 0) -> None:
    """Three steps of a pipeline, what they report, and what an evaluation returns."""
    plan, batch = make_plan({**constraints, "batch.global_size": ROWS}), example(dropout)
    depth = depth or max(6, plan.pipeline_parallel.num_stages)
    parts = plan.pipeline_parallel.microbatches * plan.data_parallel.size
    reference = make(name, depth, dropout)
    expected = on_one_device(reference, batch, parts, STEPS)
    model = make(name, depth, dropout)
    model, optimizer, _ = vescale.parallelize(plan, model, adamw, dataset=Rows(batch))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", APART)
        found = in_pipeline(model, optimizer, part_of(plan, batch), STEPS)
    close(found, expected)
    model.eval()
    reference.eval()
    with torch.no_grad():
        logits = model(**part_of(plan, batch))["logits"]
        wanted = reference(**part_of(plan, batch))["logits"]
    close(whole(logits), wanted)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of a batch, of which parallelize sees what forward is called with."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {key: x[row] for key, x in self.batch.items()}


NAMES = ("universal", "in_turns", "around_again", "albert", "albert_two_groups", "albert_inner")


@pytest.mark.by_day("in_turns-interleaved_1f1b")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("universal", "1f1b"), ("in_turns", "interleaved_1f1b"), ("albert_two_inner", "1f1b")],
)
def test_two_ranks_train_as_one_device_does(world2: World, name: str, schedule: str) -> None:
    world2.run(compared, name, constraints_of(schedule, 2, 4))


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("name", NAMES)
def test_every_model_does_under_every_kind_of_schedule(
    world2: World, name: str, schedule: str
) -> None:
    world2.run(compared, name, constraints_of(schedule, 2, 4))


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("name", ["universal", "in_turns", "albert", "albert_two_groups"])
def test_four_ranks_do_too(world4: World, name: str, schedule: str) -> None:
    world4.run(compared, name, constraints_of(schedule, 4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["around_again"])
def test_dropout_is_that_of_one_device(world2: World, name: str) -> None:
    world2.run(compared, name, constraints_of("interleaved_1f1b", 2, 4), 0.1)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("name", ["universal", "in_turns", "albert", "albert_inner"])
def test_dropout_of_every_model_is(world2: World, name: str, schedule: str) -> None:
    world2.run(compared, name, constraints_of(schedule, 2, 4), 0.1)


@pytest.mark.nightly
@pytest.mark.slow
def test_shards_of_shared_blocks_train_as_one_device_does(world4: World) -> None:
    world4.run(compared, "universal", {PP: 2, PARTS: 2, DP: 2, ZERO: 3})


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["in_turns", "albert", "around_again"])
def test_every_zero_stage_does(world4: World, name: str, stage: int) -> None:
    world4.run(compared, name, {PP: 2, PARTS: 2, DP: 2, ZERO: stage})
    if stage > 1:
        reduces = {"pipeline_parallel.reduce_every": "microbatch"}
        world4.run(compared, name, {PP: 2, PARTS: 2, DP: 2, ZERO: stage, **reduces})


@pytest.mark.nightly
@pytest.mark.parametrize("every", ["step", "microbatch"])
def test_blocks_that_one_rank_calls_on_two_stages_are_sharded(world4: World, every: str) -> None:
    reduces = {"pipeline_parallel.reduce_every": every}
    options = {**constraints_of("interleaved_1f1b", 2, 2), DP: 2, ZERO: 3, **reduces}
    world4.run(compared, "around_again", options, 0.0, 5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [{TP: 2}, {"recompute": "full", DP: 2}, {DP: 2, ZERO: 2, "recompute": "full"}]
)
def test_other_parallelism_does(world4: World, options: Constraints) -> None:
    world4.run(compared, "in_turns", {PP: 2, PARTS: 2, **options})


def resumed(name: str, path: Path, before: Constraints, then: Constraints) -> None:
    """One step of one plan, two of another one from its checkpoint."""
    batch, depth = example(0.0), 6
    expected, found = on_one_device(make(name, depth), batch, 4, STEPS), dict[str, Any]()
    for number, constraints in enumerate((before, then)):
        plan = make_plan({**constraints, "batch.global_size": ROWS})
        model, optimizer, _ = vescale.parallelize(
            plan, make(name, depth), adamw, dataset=Rows(batch)
        )
        if number == 1:
            vescale.load(path, {"model": model, "optimizer": optimizer})
        found = in_pipeline(model, optimizer, part_of(plan, batch), 1 + number)
        if number == 0:
            vescale.save(path, {"model": model, "optimizer": optimizer})
    close(found["state"], expected["state"])
    close(found["losses"], expected["losses"][1:])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_plan_of_another_size_goes_on(world4: World, tmp_path: Path) -> None:
    world4.run(resumed, "in_turns", tmp_path, {PP: 2, PARTS: 2, DP: 2, ZERO: 1}, {PP: 4, PARTS: 4})


@pytest.mark.nightly
def test_an_albert_goes_on_too(world4: World, tmp_path: Path) -> None:
    world4.run(resumed, "albert", tmp_path, {PP: 4, PARTS: 4}, {PP: 2, PARTS: 2, DP: 2, ZERO: 3})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owned_once(constraints: Constraints) -> None:
    """Every rank has the block's parameters in a step; one of them owns each element."""
    batch = example(0.0)
    model = make("universal", 6)
    total = sum(p.numel() for p in model.parameters())
    behind = {"step": ["", "block", *(f"block#{call}" for call in range(2, 6))]}
    tail = {"pipeline_parallel.tail_modules": ["norm", "head"]}
    plan = make_plan({**constraints, **tail, CALLS: ["block"] * 6, BEHIND: behind})
    model, optimizer = vescale.parallelize(plan, model, adamw)
    for _ in range(2):
        loss_of(model(**batch)).backward()
        optimizer.step()
    held = [_local(p.grad).numel() for p in model.parameters() if p.grad is not None]
    states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    sizes = torch.tensor([sum(held), sum(_local(x).numel() for x in states)])
    torch.distributed.all_reduce(sizes)
    assert sizes.tolist() == [total, 2 * total]


@pytest.mark.slow
def test_a_plan_says_what_is_called_and_one_rank_has_its_state(world2: World) -> None:
    world2.run(owned_once, {PP: 2, PARTS: 4})


@pytest.mark.parametrize("name", ["universal", "in_turns", "albert"])
def test_the_planner_sees_what_is_called(name: str) -> None:
    model = make(name, 6, dtype=torch.float32)
    only = {PP: 2, DP: 1, TP: 1}
    plan = vescale.generate_plan(model, only, world_size=2, cluster="cpu", example_batch=tokens())
    blocks = {
        "universal": ("block",) * 6,
        "in_turns": tuple(f"layers.{i}" for i in range(6)),
        "albert": ("albert.encoder.albert_layer_groups.0",) * 6,
    }[name]
    assert plan.pipeline_parallel.block_calls == blocks
    assert len(plan.pipeline_parallel.split_points) == 1
    assert vescale.ParallelPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (["blok"] * 6, "'blok' is no module of Universal"),
        (["block", "block.mlp"], r"'block.mlp' is a part of 'block'"),
        (["block.dropout"] * 2, "with parameters and a forward of their own, got 'block.dropout'"),
        (["block"] * 2, "at most 2 pipeline stages"),
        (
            ["block"] * 4,
            "needs the blocks to be called as its plan says, but 'block' was call num",
        ),
    ],
)
def test_calls_that_cannot_be_are_refused(calls: list[str], told: str) -> None:
    plan = make_plan({PP: 3, PARTS: 3, CALLS: calls})
    with pytest.raises(ValueError, match=told):
        check_pipeline(plan, make("universal", 6), tokens())
