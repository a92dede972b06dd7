"""Pipelines of models that return no loss: the loop computes it, and calls backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .families import make
from .plans import DP, PARTS, PP, SCHEDULE, TP, VIRTUAL, ZERO, Constraints, make_plan
from .programs import PIPELINE, WIDTH, Block, Run, right, rows, sgd

RECOMPUTE, EVERY = "recompute", "pipeline_parallel.reduce_every"
PLANS: dict[str, Constraints] = {
    "1f1b": {PP: 2, PARTS: 4},
    "one-part": {PP: 2},
    "uneven-parts": {PP: 2, PARTS: 3},
    "interleaved": {PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2},
    "zero-bubble": {PP: 2, PARTS: 2, SCHEDULE: "interleaved_zero_bubble"},
    "v": {PP: 2, PARTS: 4, SCHEDULE: "zbv", VIRTUAL: 2},
    "recompute": {PP: 2, PARTS: 4, RECOMPUTE: "full"},
    "offload": {PP: 2, PARTS: 4, "pipeline_parallel.offload_activations": True},
}
FOUR: dict[str, Constraints] = {
    "4-stages": {PP: 4, PARTS: 4},
    "dp": {PP: 2, PARTS: 2, DP: 2},
    "zero2": {PP: 2, PARTS: 2, DP: 2, ZERO: 2, EVERY: "microbatch"},
    "zero3": {PP: 2, PARTS: 2, DP: 2, ZERO: 3},
    "tp": {PP: 2, PARTS: 2, TP: 2},
}


class Scores(nn.Module):
    """Returns what a loop computes its loss from, and more."""

    def __init__(self, *, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(self.drop(x))
        return {"hidden": x, "scores": self.head(x), "top": self.head(x).argmax(-1)}


def gradients(run: Run, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            run.keep(parameter.grad)


def ordinary(run: Run, build: Any = Scores) -> None:
    model, optimizer = run.start(build())
    for batch in map(run.part, rows()):
        loss = F.mse_loss(model(batch["x"])["scores"], batch["y"])
        optimizer.zero_grad()
        loss.backward()
        gradients(run, model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    run.finish(model)


@pytest.mark.by_day("one-part")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_of_the_loop_trains_as_on_one_device(world2: World, plan: str) -> None:
    right(world2, partial(ordinary, build=partial(Scores, tied=True)), PLANS[plan])


@pytest.mark.by_day("4-stages")
@pytest.mark.slow
@pytest.mark.parametrize("plan", FOUR)
def test_a_loss_of_the_loop_trains_over_several_axes(world4: World, plan: str) -> None:
    right(world4, ordinary, FOUR[plan])


def of_several_outputs(run: Run) -> None:
    model, optimizer = run.start(Scores())
    for batch in rows():
        found = model(batch["x"])
        loss = F.mse_loss(found["scores"], batch["y"]) + found["hidden"].square().mean()
        assert not found["top"].is_floating_point()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def of_the_hidden_states_alone(run: Run) -> None:
    model, _ = run.start(Scores())
    model(rows()[0]["x"])["hidden"].square().mean().backward()
    assert model.head.weight.grad is None
    gradients(run, model)


def of_two_calls(run: Run) -> None:
    model, _ = run.start(Scores())
    first, second = rows(2)
    near, far = model(first["x"])["scores"], model(second["x"])["scores"]
    (near - far).square().mean().backward()
    gradients(run, model)


def accumulated(run: Run) -> None:
    model, optimizer = run.start(Scores())
    for batch in rows(2):
        (F.mse_loss(model(batch["x"])["scores"], batch["y"]) / 2).backward()
    optimizer.step()
    run.finish(model)


def scaled_in_place_and_hooked(run: Run) -> None:
    model, _ = run.start(Scores())
    batch = rows()[0]
    scores = model(batch["x"])["scores"]
    scores.register_hook(lambda grad: grad * 2)
    scores.div_(3)
    (F.mse_loss(scores, batch["y"]) * 1024).backward()
    gradients(run, model)


def frozen(run: Run) -> None:
    model = Scores()
    for module in (model.embed, *model.blocks[:3]):
        module.requires_grad_(False)
    model, _ = run.start(model)
    F.mse_loss(model(rows()[0]["x"])["scores"], rows()[0]["y"]).backward()
    gradients(run, model)


def evaluated_between(run: Run) -> None:
    model, optimizer = run.start(Scores())
    for batch in rows():
        run.keep(model(batch["y"])["scores"])  # with a graph that nobody uses
        F.mse_loss(model(batch["x"])["scores"], batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            run.keep(model(batch["x"])["scores"])
    run.finish(model)


def with_dropout(run: Run) -> None:
    model, optimizer = run.start(Scores(dropout=0.5))
    for batch in rows():
        # One device that runs the same micro-batches.
        parts = [batch["x"]] if run.constraints else batch["x"].chunk(2)
        scores = torch.cat([model(part)["scores"] for part in parts])
        F.mse_loss(scores, batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(torch.rand(3))
    run.finish(model)


def with_a_head_of_its_own(run: Run) -> None:
    model, optimizer = run.start(Scores())
    head = nn.Linear(WIDTH, WIDTH).double()
    own = sgd(head)
    for batch in rows():
        F.mse_loss(head(model(batch["x"])["hidden"]), batch["y"]).backward()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    run.finish(model)
    run.finish(head)


HABITS = (
    of_several_outputs,
    of_the_hidden_states_alone,
    of_two_calls,
    accumulated,
    scaled_in_place_and_hooked,
    frozen,
    evaluated_between,
    with_dropout,
    with_a_head_of_its_own,
)


@pytest.mark.by_day("accumulated")
@pytest.mark.slow
@pytest.mark.parametrize("program", HABITS, ids=lambda program: program.__name__)
def test_habits_of_loops_are_one_devices(world2: World, program: Any) -> None:
    right(world2, program, PIPELINE)


def causal(run: Run, family: str) -> None:
    """Compute a language model's loss from its logits, as many public loops do."""
    made, batch = make(family, "eager")
    model, optimizer = run.start(made)
    for ids in (batch["input_ids"], batch["input_ids"].flip(0)):
        # One device that runs the same micro-batches: with dropout they draw one after the other.
        parts = [ids] if run.constraints else ids.chunk(2)
        logits = torch.cat([model(input_ids=part).logits for part in parts])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


@pytest.mark.by_day("gpt2")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_of_public_models_train_as_on_one_device(world2: World, family: str) -> None:
    right(world2, partial(causal, family=family), PIPELINE)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "opt", "gpt_neox"])
def test_logits_of_more_public_models_train_as_on_one_device(world2: World, family: str) -> None:
    right(world2, partial(causal, family=family), PIPELINE)


def differentiated_twice() -> None:
    model: Any = vescale.parallelize(make_plan({PP: 2, PARTS: 4}), Scores().double())
    loss = model(rows()[0]["x"])["scores"].square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time on the loss of one pipeline step"):
        loss.backward()


@pytest.mark.slow
def test_a_second_backward_of_one_call_is_refused(world2: World) -> None:
    world2.run(differentiated_twice)
