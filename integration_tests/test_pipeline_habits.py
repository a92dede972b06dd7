"""Models as people write them, under a pipeline: right, or refused with what to do."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import vescale
from vescale_testing import World

from .plans import make_plan
from .programs import PIPELINE, WIDTH, Block, Plain, Program, Run, right, rows, sgd
from .short_group import in_short_group
from .test_bad_input import check


class MinBlock(nn.Module):
    """Calls its layers through a function that closes over them, as minGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 16), "down": nn.Linear(16, WIDTH)})
        mlp = self.mlp
        self.mlpf: Callable[[Tensor], Tensor] = lambda x: mlp["down"](mlp["up"](x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlpf(self.norm(x))


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, pair: bool) -> Tensor | tuple[Tensor, Tensor]:
        y = self.layer(x).tanh()
        return (y, y.mean()) if pair else y


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, batch: Mapping[str, Tensor], *flags: bool) -> Tensor:
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x, *flags)
            if any(flags):
                assert isinstance(x, tuple)
                x = x[0]
        return F.mse_loss(x, batch["y"])


class Reports(Plain):
    """Returns scalars beside its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        y = self.logits(batch)
        loss, norm = F.mse_loss(y, batch["y"]), y.abs().mean()
        outputs: dict[str, Any] = {
            "named": {"aux_loss": norm, "loss": loss},
            "detached": (norm.detach(), loss),
            "ambiguous": (norm, loss),
        }
        return outputs[self.kind]


class Reentrant(Block):
    """Runs again in backward, by the older of torch's ways."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=True)


def reentrant(run: Run) -> None:
    """Does not warn that nothing has a gradient where blocks are run for their shapes."""
    model = Plain()
    model.blocks = nn.ModuleList(Reentrant() for _ in range(4))
    run.train(model)


def closures(run: Run) -> None:
    run.train(Stack(MinBlock))


def flags(run: Run) -> None:
    """Calls with a flag that changes what blocks return."""
    model, optimizer = run.start(Stack(Flagged))
    for step, batch in enumerate(rows(4)):
        loss = model(run.part(batch), step % 2 == 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def reports(kind: str, place: Any, run: Run) -> None:
    model, optimizer = run.start(Reports(kind))
    for batch in rows():
        output = model(run.part(batch))
        output[place].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs = [output, model(run.part(batch))]
        for each in outputs:
            for scalar in each.values() if isinstance(each, dict) else each:
                run.keep(scalar)
    run.finish(model)


def reports_by_name(run: Run) -> None:
    reports("named", "loss", run)


def reports_without_gradient(run: Run) -> None:
    reports("detached", 1, run)


class Backwards(nn.Module):
    """Defines its modules in the opposite order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.norm(x), batch["y"])


def defined_backwards(run: Run) -> None:
    """The planner sees from an example batch what is called when."""
    model, example = Backwards(), rows(1)[0]
    if run.constraints is not None:
        plan = vescale.generate_plan(
            model.double(), {**run.constraints, "batch.global_size": 8}, example_batch=(example,)
        )
        found = plan.pipeline_parallel
        assert (found.head_modules, found.tail_modules) == (("embed",), ("norm",))
        names = {"head_modules": ("embed",), "tail_modules": ("norm",)}
        named = {f"pipeline_parallel.{key}": value for key, value in names.items()}
        run = replace(run, constraints={**run.constraints, **named})
    run.train(model)


def two_models(run: Run) -> None:
    first, of_first = run.start(Plain())
    second, of_second = run.start(Plain())
    for batch in rows():
        loss = first(run.part(batch)) + 2 * second(run.part(batch))
        loss.backward()
        for optimizer in (of_first, of_second):
            optimizer.step()
            optimizer.zero_grad()
        run.keep(loss)
    run.finish(first)
    run.finish(second)


def loop_draws(run: Run) -> None:
    """Takes its batches by torch's generator, as nanoGPT does, and evaluates between steps."""
    model, optimizer = run.start(Plain())
    data = rows(1)[0]
    for _ in range(3):
        picked = torch.randint(8, (8,))
        loss = model({name: tensor[picked] for name, tensor in data.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
        model.eval()
        with torch.no_grad():
            run.keep(model({name: tensor[picked] for name, tensor in data.items()}))
        model.train()
    run.keep(torch.default_generator.get_state())


def held_gradients(run: Run) -> None:
    """Keeps gradients of earlier steps, and adds those of two calls."""
    model, optimizer = run.start(Plain())
    held: list[Tensor] = []
    for step, batch in enumerate(rows(6)):
        loss = model(run.part(batch))
        (loss * 2 ** (step // 4)).backward()
        run.keep(loss)
        if step % 2:
            held += [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    for grad in held:
        run.keep(grad)
    run.finish(model)


def last_batch(run: Run) -> None:
    """An epoch whose last batch has 5 rows, in two micro-batches."""
    together = {name: torch.cat([batch[name] for batch in rows()]) for name in ("x", "y")}
    data = [{name: x[index] for name, x in together.items()} for index in range(21)]
    loader: Any = DataLoader(cast("Any", data), batch_size=8)
    model: Any = Plain().double()
    optimizer = sgd(model)
    if run.constraints is not None:
        model, optimizer, loader = vescale.parallelize(
            make_plan(run.constraints), model, sgd, dataset=loader
        )
    for batch in loader:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


@pytest.mark.by_day("closures", "defined_backwards", "last_batch", "reentrant")
@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        closures,
        defined_backwards,
        flags,
        held_gradients,
        last_batch,
        loop_draws,
        reentrant,
        reports_by_name,
        reports_without_gradient,
        two_models,
    ],
)
def test_a_pipeline_has_the_numbers_of_one_device(world2: World, program: Program) -> None:
    right(world2, program, PIPELINE)


def ambiguous() -> None:
    model, _ = Run(PIPELINE).start(Reports("ambiguous"))
    model(rows(1)[0])


def auxiliary() -> None:
    model, _ = Run(PIPELINE).start(Reports("named"))
    output = model(rows(1)[0])
    (output["loss"] + output["aux_loss"]).backward()


class LeavesOut(Plain):
    """LayerDrop: leaves out the third block, or the last one, for the whole batch."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for index, block in enumerate(self.blocks):
            if index != self.block or torch.rand(()) > 1:
                x = block(x)
        return self.head(x)


def leaves_out(block: int) -> None:
    model, _ = Run(PIPELINE).start(LeavesOut(block))
    model(rows(1)[0])


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "ambiguous": (ambiguous, "tuple holds 2 scalars, 2 of them with a gradient"),
    "left_out": (
        functools.partial(leaves_out, 2),
        "'blocks.3' was call number 2, before 'blocks.2'.*LayerDrop.* own forward and return",
    ),
    "left_out_last": (
        functools.partial(leaves_out, 3),
        "all 4 blocks .* got 3, and not 'blocks.3'.*LayerDrop",
    ),
    "auxiliary": (auxiliary, "differentiates the loss that forward returns, and no other scalar"),
}


@pytest.mark.by_day("left_out", "auxiliary")
@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_pipeline_cannot_run_is_refused(world2: World, tmp_path: Path, case: str) -> None:
    fn, message = REFUSED[case]
    check(world2, Exception, message, in_short_group, str(tmp_path), fn)
    world2.close()


class Drops(Plain):
    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.dropout(super().logits(batch), 0.5, self.training)


class Counts(Plain):
    """Draws in a way that depends on values."""

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = super().logits(batch)
        return logits + torch.poisson(logits.detach().abs())


def warned_of_draws() -> list[tuple[str, str]]:
    model, _ = Run(PIPELINE).start(Counts())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in rows(3):
            model(batch).backward()
    return [(str(each.message), Path(each.filename).name) for each in caught]


@pytest.mark.slow
def test_draws_that_cannot_be_known_beforehand_are_named(world2: World) -> None:
    # The stage that draws them is the last one.
    first, ((message, place),) = world2.run(warned_of_draws)
    assert not first
    assert place == "test_pipeline_habits.py"
    assert "how many numbers aten.poisson.default draws, in ''," in message


def masks_and_states() -> tuple[list[float], list[int]]:
    """Losses of one batch, of which each has a mask of its own, and the generator after each."""
    torch.manual_seed(0)
    model, _ = Run(PIPELINE).start(Drops())
    losses: list[float] = []
    drawn: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for evaluates in (False, True, False):
            model.train(not evaluates)
            losses.append(model(rows(1)[0]).item())
            drawn.append(hash(torch.get_rng_state().numpy().tobytes()))
    return losses, drawn


@pytest.mark.slow
def test_a_pipeline_that_draws_moves_the_generator_of_all_stages_alike(world2: World) -> None:
    (losses, drawn), others = world2.run(masks_and_states)
    assert (losses, drawn) == others
    assert losses[0] != losses[2]
    training, evaluation, again = drawn
    assert training == evaluation, "nothing is drawn in eval mode"
    assert again != training
