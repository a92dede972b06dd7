"""Many models in one process whose blocks are compiled: their code is shared."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale
from vescale_parallel import compile_report
from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan

COMPILED: Constraints = {"compile": "blocks", "compile_backend": "eager"}
WIDTH = 8


class Breaks(nn.Module):
    """The graph breaks in the first thing that a block does, as where ranks share a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x)


def wrapped(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap as transformers wraps the forward of all blocks of all models, by one function."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, *args, **kwargs)

    return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = Breaks(), nn.Linear(WIDTH, WIDTH)

    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(self.first(x)))


class Whole(Block):
    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(x) + self.first.linear(x))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def made(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net(kind).double()


def rows(length: int) -> Tensor:
    torch.manual_seed(length)
    return torch.randn(4, length, WIDTH, dtype=torch.float64)


def step(model: Any, x: Tensor) -> float:
    loss = model(x)
    loss.backward()
    model.zero_grad()
    return loss.item()


def parallel(model: nn.Module, constraints: Constraints) -> nn.Module:
    return vescale.parallelize(make_plan({**constraints, **COMPILED}), model)


def part(model: nn.Module, x: Tensor, constraints: Constraints) -> Tensor:
    if DP not in constraints:
        return x
    return x.chunk(constraints[DP])[vescale.data_parallel_rank(model)]


def several(kind: type[nn.Module], constraints: Constraints, *, resets: bool) -> None:
    """Train one model after the other, of several lengths."""
    for seed in range(4):
        plain = made(kind, seed)
        model = parallel(copy.deepcopy(plain), constraints)
        for length in (3, 5):
            x = rows(length)
            found = step(model, part(model, x, constraints))
            if DP not in constraints:
                # float64; ranks add up in another order.
                assert found == pytest.approx(step(plain, x), rel=1e-12)
            with torch.no_grad():
                model(part(model, x, constraints))
            if resets:
                torch._dynamo.reset()
        first, second = compile_report(model).values()
        if PP in constraints:
            first = second = (first, second)[dist.get_rank()]
        for block in (first, second):
            assert not block.eager
            assert block.num_graphs >= 2


PLANS: dict[str, Constraints] = {
    "zero0": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Block, Whole])
def test_blocks_of_each_of_many_models_are_compiled(
    world2: World, plan: str, kind: type[nn.Module]
) -> None:
    world2.run(functools.partial(several, kind, PLANS[plan], resets=False))


@pytest.mark.nightly
def test_programs_may_reset_the_compiler(world2: World) -> None:
    world2.run(functools.partial(several, Block, {DP: 2}, resets=True))


class Turns(Whole):
    """Its arguments are of another kind in each call."""

    @wrapped
    def forward(self, x: Tensor, kind: str = "") -> Tensor:
        return super().forward(x) * (2.0 if kind else 1.0)


class Kinds(Net):
    def forward(self, x: Tensor, kind: str = "") -> Tensor:
        for block in self.blocks:
            x = block(x, kind)
        return self.head(x).mean()


def called_in_turns() -> list[str]:
    torch.manual_seed(0)
    model = Kinds(Turns).double()
    model = parallel(model, {DP: 2})
    own = part(model, rows(3), {DP: 2})
    message = "'blocks.[01]' runs as it is written .* it was compiled [0-9]+ times for this block"
    with pytest.warns(UserWarning, match=message) as seen:
        found = {step_of_kind(model, own, str(n)) for n in range(1, 11)}
    assert len(found) == 1
    assert len([x for x in seen if re.search(message, str(x.message))]) == 2  # once a block
    several(Block, {DP: 2}, resets=False)  # what those gave up others do not
    return [block.eager for block in compile_report(model).values()]


def step_of_kind(model: Any, x: Tensor, kind: str) -> float:
    loss = model(x, kind)
    loss.backward()
    return loss.item()


def test_a_block_that_is_compiled_too_often_says_so_and_keeps_no_other_from_it(
    world2: World,
) -> None:
    for eager in world2.run(called_in_turns):
        assert all("recompile_limit is 8" in why for why in eager)


def not_compiled() -> list[str]:
    model = parallel(made(Block), {DP: 2})
    message = "'blocks.[01]' runs as it is written .* torch.compile made no graph of it"
    with torch.compiler.set_stance("force_eager"), pytest.warns(UserWarning, match=message):
        step(model, part(model, rows(3), {DP: 2}))
    return [block.eager for block in compile_report(model).values()]


def test_blocks_of_which_nothing_is_compiled_say_so(world2: World) -> None:
    for eager in world2.run(not_compiled):
        assert all(eager)
