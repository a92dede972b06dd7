"""Compiled blocks write in place into what tensor-parallel ranks share, as one device does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import CompiledBlock, compile_report
from vescale_testing import World

from .plans import SEQUENCE, TP, Constraints

PLANS: dict[str, Constraints] = {"tp": {TP: 2}, "tp-sequence": {TP: 2, SEQUENCE: True}}
WIDTH = 8


class Block(nn.Module):
    """Two layers read one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        normed = self.norm(x_BSF)
        return x_BSF + self.down(self.up(normed) * self.gate(normed).sigmoid())


class Before(Block):
    """Writes into an activation before any layer reads it."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        normed = self.norm(x_BSF).mul_(2.0)
        normed[..., :1] = 0.5
        return x_BSF + self.down(self.up(normed) * self.gate(normed).sigmoid())


class Between(Block):
    """Writes between two layers that read it, where no gradient needs what was there."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        normed = self.norm(x_BSF)
        up = self.up(normed)
        normed = normed * 2.0 if torch.is_grad_enabled() else normed.mul_(2.0)
        return x_BSF + self.down(up * self.gate(normed).sigmoid())


class ThroughAView(Block):
    """As between, through a view; what was there is read by two layers, and so is what is."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        normed = self.norm(x_BSF)
        first = self.up(normed) * self.gate(normed).sigmoid()
        normed = normed.clone() if torch.is_grad_enabled() else normed
        normed[..., 1:].add_(1.0)
        return x_BSF + self.down(first + self.up(normed) * self.gate(normed).sigmoid())


class Behind(Block):
    """Writes behind the last layer that reads it: a residual that is added in place."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF.clone()
        made = self.down(self.up(x_BSF) * self.gate(x_BSF).sigmoid())
        return x_BSF + made if torch.is_grad_enabled() else x_BSF.add_(made)


class BehindABreak(Block):
    """Writes where the graph has ended, before another layer reads it."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        normed = self.norm(x_BSF)
        up = self.up(normed)
        torch._dynamo.graph_break()
        normed = normed * 2.0 if torch.is_grad_enabled() else normed.mul_(2.0)
        return x_BSF + self.down(up * self.gate(normed).sigmoid())


class BreaksFirst(Between):
    """Writes in a graph behind one that has run."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF * 2.0
        torch._dynamo.graph_break()
        return super().forward(x_BSF)


KINDS = (Before, Between, ThroughAView, Behind, BehindABreak, BreaksFirst)


class Net(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSF = self.embed(ids_BS)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return nn.functional.cross_entropy(self.head(x_BSF).flatten(0, 1), ids_BS.flatten())


def net(kind: type[Block]) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind).double()


def ids(length: int) -> Tensor:
    return torch.arange(4 * length).view(4, length) * 7 % 16


def passes(model: nn.Module) -> list[float]:
    """Return the losses of training, of evaluation, and of inference, at two lengths each."""
    found: list[float] = []
    for length in (6, 6, 10):
        loss = model(ids(length))
        loss.backward()
        found.append(loss.item())
    for mode in (torch.no_grad, torch.inference_mode):
        for length in (6, 10):
            with mode():
                found.append(model(ids(length)).item())
    return found


def compiled_passes(
    kind: type[Block], plan: str
) -> tuple[list[float], dict[str, CompiledBlock], list[str]]:
    """Return the losses of compiled blocks, what was compiled, and what was warned of."""
    constraints = {**PLANS[plan], "compile": "blocks", "compile_backend": "aot_eager"}
    model = net(kind)
    made = vescale.generate_plan(model, constraints, example_batch=ids(6))
    model = vescale.parallelize(made, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = passes(model)
    said = [str(each.message) for each in caught if "compile" in str(each.message)]
    return found, compile_report(model), said


@pytest.mark.by_day("Between-tp-sequence")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_in_place_enters_as_it_is_then(
    world2: World, kind: type[Block], plan: str
) -> None:
    expected = passes(net(kind))
    for found, report, said in world2.run(compiled_passes, kind, plan):
        # Two halves of a sum that one device adds up at once.
        assert found == pytest.approx(expected, rel=1e-12)
        assert not said
        assert all(block.num_graphs and not block.eager for block in report.values())


def passes_of_own_compile(kind: type[Block], plan: str) -> list[float]:
    """Return the losses of a program that compiles the blocks of a parallelized model itself."""
    model: Any = net(kind)
    model = vescale.parallelize(
        vescale.generate_plan(model, PLANS[plan], example_batch=ids(6)), model
    )
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it does not follow
        return passes(model)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Before, Between, BehindABreak])
def test_so_it_does_where_a_program_compiles_its_blocks_itself(
    world2: World, kind: type[Block], plan: str
) -> None:
    expected = passes(net(kind))
    for found in world2.run(passes_of_own_compile, kind, plan):
        # As above.
        assert found == pytest.approx(expected, rel=1e-12)
