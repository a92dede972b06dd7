"""Losses and other outputs of a pipeline's step: which is which, and who gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import vescale
from vescale_testing import World

from .plans import PARTS, PP, SCHEDULE, VIRTUAL, Constraints, make_plan
from .test_pipeline_schedules import SCHEDULES
from .training import whole

WIDTH, CLASSES, STEPS = 8, 5, 2
LOSS, OUTPUTS = "pipeline_parallel.loss", "pipeline_parallel.outputs"
ACCUMULATE = "batch.gradient_accumulation"
PIPELINE: Constraints = {PP: 2, PARTS: 2}


class Scores(nn.Module):
    """Returns scores; its loss is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Several(nn.Module):
    """Returns several scalars, and tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.scores, self.kind = Scores(), kind

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        scores = self.scores(x)
        if y is None:
            return {"scores": scores, "best": scores.argmax(-1)}
        ce, size = F.cross_entropy(scores, y), scores.square().mean()
        if self.kind == "tuple":
            return size, ce
        names = ("ce", "size") if self.kind == "named" else ("loss", "ce")
        total = {names[0]: ce, names[1]: size}
        return {**total, "scores": scores, "best": scores.argmax(-1)}


def built(make: Any, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(*args).double()


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, 8, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (steps, 8), generator=generator)
    y[:, :3] = -100
    return list(zip(x, y, strict=True))


def by_count(scores: Tensor, y: Tensor, whole_y: Tensor, parts: int) -> Tensor:
    """A micro-batch's share of a mean over the targets that count in all of them."""
    counted = (whole_y != -100).sum()
    return F.cross_entropy(scores, y, reduction="sum") * parts / counted


def alone(model: nn.Module, parts: int) -> list[Tensor]:
    """Train on one device in micro-batches; return losses, and parameters."""
    optimizer, kept = SGD(model.parameters(), lr=0.1), list[Tensor]()
    for x, y in batches():
        losses: list[Tensor] = []
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            losses.append(by_count(model(x_part), y_part, y, parts))
            (losses[-1] / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(torch.stack(losses).detach().sum() / parts)
    return [*kept, *(p.detach() for p in model.parameters())]


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def outside(constraints: Constraints, by_position: bool = False) -> list[Tensor]:
    model, optimizer = vescale.parallelize(
        make_plan(constraints), built(Scores), sgd, loss_fn=F.cross_entropy
    )
    kept: list[Tensor] = []
    for x, y in batches():
        loss = model(x, y) if by_position else model(x, target=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.detach())
    kept += [whole(p).detach() for p in model.parameters()]
    model.eval()
    with torch.no_grad():
        assert model(batches()[0][0]).shape == (8, CLASSES)
    return kept


@pytest.mark.by_day("gpipe", "looped_bfs", "interleaved_zero_bubble")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_outside_of_the_model_has_the_bits_of_one_device(
    world2: World, schedule: str
) -> None:
    constraints = {PP: 2, PARTS: 4, SCHEDULE: schedule, VIRTUAL: SCHEDULES[schedule]}
    expected = alone(built(Scores), 4)
    for found in world2.run(outside, constraints, schedule == "1f1b"):
        assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_a_loss_outside_of_the_model_is_accumulated_in_one_call(world1: World) -> None:
    expected = alone(built(Scores), 4)
    for found in world1.run(outside, {ACCUMULATE: 4}):
        assert all(map(torch.equal, found, expected))


def loss_and_others(kind: str, at: str | int, constraints: Constraints) -> list[Any]:
    """One step; the other outputs of it, the gradients, and outputs in evaluation."""
    model = vescale.parallelize(make_plan(constraints), built(Several, kind))
    x, y = batches(1)[0]
    output = model(x, y)
    output[at].backward()
    found = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    others = [output[at].detach(), output["scores"], output["best"]] if kind != "tuple" else []
    with torch.no_grad():
        return [found, others, list(model(x).values())]


@pytest.mark.by_day(
    "False-named-ce-ce",
    "False-tuple-1-1",
    "True-loss-loss-None",
    "True-named-ce-ce",
    "True-tuple-1-1",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "at", "named"),
    [("loss", "loss", None), ("named", "ce", "ce"), ("tuple", 1, 1)],
)
@pytest.mark.parametrize("accumulates", [False, True])
def test_the_loss_is_the_one_that_is_named(
    world1: World, world2: World, kind: str, at: str | int, named: Any, accumulates: bool
) -> None:
    model = built(Several, kind)
    x, y = batches(1)[0]
    model(x, y)[at].backward()
    constraints: dict[str, Any] = {ACCUMULATE: 2} if accumulates else {**PIPELINE}
    world = world1 if accumulates else world2
    for grads, _, _ in world.run(loss_and_others, kind, at, {**constraints, LOSS: named}):
        for found, parameter in zip(grads, model.parameters(), strict=True):
            # Sums of two micro-batches in another order, of float64.
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["last", "broadcast"])
def test_other_outputs_of_a_step_are_those_of_one_device(world2: World, outputs: str) -> None:
    model = built(Several, "loss")
    x, y = batches(1)[0]
    with torch.no_grad():
        expected = model(x, y)
    constraints = {**PIPELINE, OUTPUTS: outputs}
    ranks = world2.run(loss_and_others, "loss", "loss", constraints)
    for rank, (_, (loss, scores, best), predicted) in enumerate(ranks):
        # A mean of two micro-batches' means, and products of fewer rows, of float64.
        torch.testing.assert_close(loss, expected["loss"], rtol=1e-12, atol=0)
        for found in ([scores, best], predicted):
            if outputs == "last" and rank == 0:
                with pytest.raises(ValueError, match="'broadcast' gives it to all ranks"):
                    found[0].argmax(-1)
                continue
            torch.testing.assert_close(found[0], expected["scores"], rtol=1e-12, atol=1e-14)
            assert torch.equal(found[1], expected["best"])


TOUCHES: list[Callable[[Any], object]] = [
    lambda output: output["scores"].shape,
    lambda output: torch.softmax(output["scores"], -1),
    lambda output: 2 * output["best"],
    lambda output: output["best"] == 0,
    lambda output: output["scores"].sum().backward(),
]


def messages_of_steps(outputs: str | None) -> list[str]:
    model = vescale.parallelize(make_plan({**PIPELINE, OUTPUTS: outputs}), built(Several, "loss"))
    found: list[str] = []
    for x, y in batches(2):
        output = model(x, y)
        for touch in TOUCHES:
            try:
                touch(output)
            except (ValueError, RuntimeError) as error:
                found.append(str(error))
        output["loss"].backward()
        assert {k: v for k, v in output.items() if isinstance(v, Tensor)}.keys() >= {"loss", "ce"}
    return found


@pytest.mark.slow
def test_an_output_that_was_not_asked_for_says_which_option_gives_it(world2: World) -> None:
    for found in world2.run(messages_of_steps, None):
        assert len(found) == 2 * 5
        assert all("pipeline_parallel.outputs" in message for message in found)
    for found in world2.run(messages_of_steps, "broadcast"):
        assert len(found) == 2, "others cannot be differentiated"
        assert all("the loss that forward returns" in message for message in found)


# Habits of loops


def model_of(kind: str) -> nn.Module:
    if kind == "dict":
        return built(Several, "loss")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32,
                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
                  "num_attention_heads": 2, "num_key_value_heads": 2},
    }[kind]  # fmt: skip
    config = AutoConfig.for_model(kind, vocab_size=40, bos_token_id=1, eos_token_id=2, **sizes)
    return built(AutoModelForCausalLM.from_config, config)


def inputs_of(kind: str, step: int, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind == "dict":
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (rows,), generator=generator)
        return {"x": x, "y": y}
    ids = torch.randint(3, 40, (rows, 6), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 12, -100)}


def habits(kind: str, constraints: Constraints | None) -> list[Tensor]:
    """A loop that accumulates, scales, reads its loss early, and evaluates odd batches."""
    model, kept = model_of(kind), list[Tensor]()
    if constraints is None:
        optimizer = sgd(model)
    else:
        model, optimizer = vescale.parallelize(make_plan(constraints), model, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)  # pyright: ignore[reportPrivateImportUsage]
    for step in range(4):
        loss = model(**inputs_of(kind, step))["loss"]
        kept.append(torch.tensor(loss.item()))
        scaler.scale(loss / 2).backward()
        if step % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            model.eval()
            given = inputs_of(kind, step, rows=3)
            with torch.no_grad():
                kept.append(model(**given)["loss"])
                given.popitem()
                kept.append(next(iter(model(**given).values())))
            model.train()
    if kind != "dict":
        ids = inputs_of(kind, 9)["input_ids"]
        tokens: Any = model.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)  # pyright: ignore[reportCallIssue]: transformers'
        kept.append(tokens)
    return [*kept, *(whole(p).detach() for p in model.parameters())]


@pytest.mark.by_day("dict")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "dict"])
def test_a_loop_of_one_device_runs_unchanged(world2: World, kind: str) -> None:
    expected = habits(kind, None)
    for found in world2.run(habits, kind, PIPELINE):
        for ours, plain in zip(found, expected, strict=True):
            # transformers' loss is in float32, whose sums over micro-batches round otherwise.
            exact = kind == "dict" or not ours.is_floating_point()
            tolerance = 1e-12 if exact else 1e-6
            torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
