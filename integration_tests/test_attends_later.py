"""Blocks on slices that attend where they did not in the first call of a form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .contexts import batch_of
from .plans import CP, Constraints, make_plan
from .test_bad_input import check as refused
from .test_compile_context import COMPILED, METHOD, Attention, Block, Net

# Length of a sequence, and whether the schedule is on.
Calls = tuple[tuple[int, bool], ...]
NOT_AT_FIRST: Calls = ((12, False), (12, False), (12, True))


class Twice(Block):
    """Of two modules that attend, the second one does when a schedule says so."""

    is_on = False

    def __init__(self) -> None:
        super().__init__()
        self.second = Attention()

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = super().forward(x_BSF)
        return x_BSF + self.second(x_BSF) if self.is_on else x_BSF


class ByNumber(Twice):
    """Whose schedule is a number, of which no call is compared anew: it may count calls."""

    is_on = 0


class Gated(Block):
    """Attends when a schedule says so."""

    is_on = False

    def forward(self, x_BSF: Tensor) -> Tensor:
        return super().forward(x_BSF) if self.is_on else x_BSF + self.down(self.up(x_BSF))


def losses(
    kind: type[Twice | Gated], constraints: Constraints | None, calls: Calls = NOT_AT_FIRST
) -> list[float]:
    """Return losses of calls that attend by a schedule."""
    torch.manual_seed(0)
    model: Any = Net()
    model.blocks = nn.ModuleList(kind() for _ in range(2))
    model = model.double()
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    found: list[float] = []
    for length, is_on in calls:
        for block in model.blocks:
            block.is_on = type(kind.is_on)(is_on)
        loss = model(**batch_of(0, length, ""))
        loss.backward()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("method", ["all_to_all", "ring"])
def test_blocks_may_attend_once_more(world2: World, method: str) -> None:
    expected = losses(Twice, None)
    for found in world2.run(losses, Twice, {CP: 2, METHOD: method}):
        # float64; slices are added up in another order.
        assert found == pytest.approx(expected, rel=1e-12)


# Too short to be shared: in such calls all that attends is compiled.
SHORT: Calls = ((3, True), (2, True))


@pytest.mark.nightly
@pytest.mark.parametrize("calls", [NOT_AT_FIRST, SHORT + NOT_AT_FIRST])
def test_compiled_blocks_may_attend_once_more_by_a_flag(world2: World, calls: Calls) -> None:
    expected = losses(Twice, None, calls)
    for found in world2.run(losses, Twice, {CP: 2, **COMPILED}, calls):
        # float64; slices are added up in another order.
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("calls", [NOT_AT_FIRST, SHORT + NOT_AT_FIRST])
def test_compiled_blocks_that_attend_once_more_are_refused_by_name(
    world2: World, calls: Calls
) -> None:
    message = "'blocks.0' is compiled and calls attention in a module in which it called none"
    refused(world2, ValueError, message, losses, ByNumber, {CP: 2, **COMPILED}, calls)


def test_blocks_that_do_not_attend_at_first_are_refused(world2: World) -> None:
    refused(
        world2, ValueError, "is not one device's on slices", losses, Gated, {CP: 2, **COMPILED}
    )
