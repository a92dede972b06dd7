"""Blocks that are given and return objects of a class of their own, which torch leaves shut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .contexts import VOCABULARY, batch_of
from .plans import CP, DP, PARTS, PP, TP, ZERO, Constraints
from .programs import Block, Program, Run, right, rows
from .short_group import in_short_group
from .test_bad_input import check


@dataclass(slots=True)
class Made:
    x: Tensor
    note: str | None = None


KINDS: dict[str, Any] = {"dataclass": Made, "namespace": lambda x: SimpleNamespace(x=x)}


class Box:
    """No dataclass: what it holds, nobody but its code knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


SHUT = {**KINDS, "class": Box}


class Boxing(nn.Module):
    """A block whose argument and result are objects."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, given: Any) -> Any:
        return SHUT[self.kind](x=self.block(given.x))


class Unboxing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.kind = nn.ModuleList(Boxing(kind) for _ in range(4)), kind

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        made = SHUT[self.kind](x=batch["x"])
        for block in self.blocks:
            made = block(made)
        return F.mse_loss(made.x, batch["y"])


def trained(kind: str, run: Run) -> None:
    run.train(Unboxing(kind))


def program(kind: str) -> Program:
    return partial(trained, kind)


PLANS: dict[str, Constraints] = {
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
    "zero3, again": {DP: 2, ZERO: 3, "recompute": "full"},
}


@pytest.mark.by_day("zero3, again-dataclass")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_in_objects_has_the_numbers_of_one_device(
    world2: World, plan: str, kind: str
) -> None:
    right(world2, program(kind), PLANS[plan])


class Writing(nn.Module):
    """Returns nothing, but writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: Any) -> None:
        state["x"] = self.block(state["x"])


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writing() for _ in range(4))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        state = {"x": batch["x"]}
        for block in self.blocks:
            block(state)
        return F.mse_loss(state["x"], batch["y"])


@dataclass(frozen=True)
class Answer:
    """What a model of research returns."""

    loss: Tensor | None
    logits: Tensor
    layers: list[Made]
    label: str = "answer"


class Answering(nn.Module):
    """A model that is given a dataclass and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxing("dataclass") for _ in range(4))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Answer:
        layers = [Made(x)]
        for block in self.blocks:
            layers.append(block(layers[-1]))
        logits = layers[-1].x
        return Answer(None if y is None else F.mse_loss(logits, y), logits, layers[1:])


def answered(run: Run, *, outside: bool) -> None:
    """Train with the loss of the answer, or with one that the loop computes of its logits."""
    model, optimizer = run.start(Answering())
    for batch in rows():
        part = run.part(batch)
        answer = model(part["x"]) if outside else model(**part)
        assert isinstance(answer, Answer)
        assert answer.label == "answer"
        loss = F.mse_loss(answer.logits, part["y"]) if outside else answer.loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not outside:  # else it is of a rank's rows
            run.keep(loss)
    run.finish(model)


ANSWERED: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
    "tp x accumulated": {TP: 2, "batch.gradient_accumulation": 2},
}


@pytest.mark.by_day("pp", "tp x accumulated")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ANSWERED)
def test_a_model_that_returns_a_dataclass_has_the_numbers_of_one_device(
    world2: World, plan: str
) -> None:
    right(world2, partial(answered, outside=False), ANSWERED[plan])


@pytest.mark.by_day("zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3", "tp", "pp"])
def test_a_loop_has_its_loss_of_what_is_in_a_dataclass(world2: World, plan: str) -> None:
    right(world2, partial(answered, outside=True), ANSWERED[plan])


class BoxedAttention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(32, 32), kind

    def forward(self, x_BSF: Tensor) -> Any:
        y_BHSF = self.layer(x_BSF).unflatten(-1, (2, -1)).transpose(1, 2)
        y_BHSF = F.scaled_dot_product_attention(y_BHSF, y_BHSF, y_BHSF, is_causal=True)
        return SHUT[self.kind](x=x_BSF + y_BHSF.transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """Its blocks attend, and return objects."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(BoxedAttention(kind) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BSF = self.embed(input_ids)
        for block in self.blocks:
            x_BSF = block(x_BSF).x
        return x_BSF.square().mean()


def attended(run: Run, kind: str) -> None:
    model, _ = run.start(Positions(kind))
    loss = model(batch_of(0, 12, "causal")["input_ids"])
    loss.backward()
    run.keep(loss)
    for parameter in model.parameters():
        run.keep(parameter.grad)


@pytest.mark.by_day("dataclass-{'context_parallel.size': 2}")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{CP: 2}, {CP: 2, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("kind", ["dataclass", "namespace"])
def test_objects_of_blocks_on_slices_have_the_numbers_of_one_device(
    world2: World, kind: str, plan: Constraints
) -> None:
    right(world2, partial(attended, kind=kind), plan)


def refused(name: str) -> Any:
    if name == "positions":
        model, _ = Run({CP: 2}).start(Positions("class"))
        return model(batch_of(0, 12, "causal")["input_ids"])
    constraints = {PP: 2, PARTS: 2} if name == "stages" else {DP: 2, ZERO: 3}
    run = Run(constraints)
    model, _ = run.start(Unboxing("class") if name == "stages" else Written())
    model(run.part(rows(1)[0]))
    return None


REFUSED = {
    "nothing": r"expected a block \(Writing\) to return tensors, got NoneType",
    "stages": r"pipeline_parallel: expected 'blocks.\d' to return tensors, .* got a Box",
    "positions": r"context_parallel: expected 'blocks.\d' to return tensors, .* got a Box",
}


@pytest.mark.by_day("nothing")
@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_to_be_found_is_asked_for(world2: World, tmp_path: Path, name: str) -> None:
    kind = ValueError if name == "positions" else TypeError
    check(world2, kind, REFUSED[name], in_short_group, str(tmp_path), refused, name)
    world2.close()
