"""Modules that hook layers within them and read in forward what these returned."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .plans import TP
from .programs import ALL, WIDTH, Plain, Run, right, rows, sgd

Batch = dict[str, Tensor]
Register = Callable[["Probed"], None]


def when_made(model: Probed) -> None:
    model.layer.register_forward_hook(model.keep)


def by_a_function(model: Probed) -> None:
    model.add_function()


def with_more(model: Probed) -> None:
    model.layer.register_forward_hook(functools.partial(model.keep_as, "x"))


class Probed(nn.Module):
    """Computes from what a layer of another model returned, as extractors of features do.

    Args:
        place: The layer.
        register: Adds the hook; by default forward does, once.
        centers: Whether it keeps the mean of the features over the rows of the batch.
    """

    def __init__(
        self, place: str, register: Register | None = None, *, centers: bool = False
    ) -> None:
        super().__init__()
        self.net, self.centers = Plain(), centers
        self.layer_name, self.is_hooked = place, register is not None
        self.features: dict[Any, Tensor] = {}
        self.register_buffer("center", torch.zeros(WIDTH))
        self.head = nn.Linear(2 * WIDTH if place.endswith("up") else WIDTH, WIDTH)
        if register is not None:
            register(self)

    @property
    def layer(self) -> nn.Module:
        return self.net.get_submodule(self.layer_name)

    def keep(self, _: nn.Module, given: tuple[Tensor, ...], returned: Tensor) -> None:
        self.features[given[0].device] = returned.tanh()

    def keep_as(self, name: str, *given: Any) -> None:
        assert name == "x"
        self.keep(*given)

    def add_function(self) -> None:
        def keep(_: nn.Module, given: tuple[Tensor, ...], returned: Tensor) -> None:
            self.features[given[0].device] = returned.tanh()

        self.layer.register_forward_hook(keep)

    def forward(self, batch: Batch) -> Tensor:
        if not self.is_hooked:
            self.layer.register_forward_hook(self.keep)
            self.is_hooked = True
        logits = self.net.logits(batch)
        features = self.features.pop(batch["x"].device)
        found = self.head(features)
        if self.centers:
            self.get_buffer("center").copy_(found.detach().mean(0))
        return F.mse_loss(logits + found, batch["y"])


def trained(model: Callable[[], Probed], run: Run) -> None:
    made = model()
    run.train(made)
    run.keep(made.get_buffer("center"))


HOW: dict[str, Register | None] = {
    "when made": when_made,
    "by a function": by_a_function,
    "with more": with_more,
    "in forward": None,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_what_a_layer_returned_is_read_on_the_rows_of_all_ranks(
    world2: World, how: str, plan: str
) -> None:
    model = functools.partial(Probed, "blocks.2", HOW[how], centers=True)
    right(world2, functools.partial(trained, model), ALL[plan])


def planned(model: Callable[[], Probed], run: Run) -> None:
    made = model().double()
    if run.constraints is None:
        optimizer: Any = sgd(made)
    else:
        example = (run.part(rows(1)[0]),)
        plan = vescale.generate_plan(made, run.constraints, world_size=2, example_batch=example)
        made, optimizer = vescale.parallelize(plan, made, sgd)
    for batch in rows():
        loss = made(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(made)


@pytest.mark.parametrize("how", HOW)
def test_a_plan_that_is_found_shards_around_what_a_hook_keeps(world2: World, how: str) -> None:
    model = functools.partial(Probed, "blocks.1", HOW[how])
    right(world2, functools.partial(planned, model), {TP: 2})


class Collecting(Plain):
    """Has a hook of its own keep what a layer returned for the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.get_submodule("blocks.1.up").register_forward_hook(self.keep)

    def keep(self, _: nn.Module, given: Any, returned: Tensor) -> None:
        self.kept.append(returned)


def penalized(run: Run) -> None:
    made: Any = Collecting().double()
    optimizer: Any = sgd(made)
    if run.constraints is not None:
        example = (run.part(rows(1)[0]),)
        plan = vescale.generate_plan(made, run.constraints, world_size=2, example_batch=example)
        made, optimizer = vescale.parallelize(plan, made, sgd)
    for batch in rows():
        loss = made(run.part(batch))
        kept = made.kept.pop()
        (loss + 0.1 * kept.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(kept)
    run.finish(made)


def test_what_a_hook_of_the_model_keeps_for_the_loop_is_whole(world2: World) -> None:
    right(world2, penalized, {TP: 2})


def copied(run: Run) -> None:
    """Train a model, and have a copy of it say what it does then: a teacher."""
    model, optimizer = run.start(Probed("blocks.2", when_made))
    for batch in rows():
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            run.keep(teacher(run.part(batch)))
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(teacher(run.part(batch)).detach())
    run.finish(model)


@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_a_copy_of_a_model_has_hooks_of_its_own(world2: World, plan: str) -> None:
    right(world2, copied, ALL[plan])


def notes_of_a_pipeline(place: str) -> list[str]:
    model, _ = Run(ALL["pp"]).start(Probed(place, when_made))
    with pytest.raises(KeyError) as raised:
        model(Run(ALL["pp"]).part(rows(1)[0]))
    return raised.value.__notes__


@pytest.mark.parametrize("place", ["blocks.1", "blocks.1.up"])
def test_what_a_layer_returned_is_not_there_on_another_stage(world2: World, place: str) -> None:
    for notes in world2.run(notes_of_a_pipeline, place):
        assert any("is not there for code of this stage" in note for note in notes)
