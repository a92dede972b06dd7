"""Hooks of users in which the rows of a batch meet: functions that only compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_testing import RankError, World

from .plans import DP, TP
from .programs import ALL, DATA, WIDTH, Block, Program, Run, right, right_or_refused, rows

Batch = Mapping[str, Tensor]


class Chain(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.checkpoints = checkpoints

    def forward(self, batch: Batch) -> Tensor:
        x = self.first(batch["x"])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return F.mse_loss(self.head(x), batch["y"])


def centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


def take_off(_: nn.Module, given: tuple[Tensor], returned: Tensor) -> Tensor:
    return centered(returned)


def take_off_before(_: nn.Module, given: tuple[Tensor]) -> Tensor:
    return centered(given[0])


def take_off_in_place(_: nn.Module, given: tuple[Tensor], returned: Tensor) -> None:
    returned.sub_(returned.mean(0, keepdim=True))


def behind(run: Run) -> None:
    model = Chain()
    model.blocks[1].register_forward_hook(lambda _, given, returned: returned - returned.mean(0))
    run.train(model)


def before(run: Run) -> None:
    model = Chain()
    model.head.register_forward_pre_hook(take_off_before)
    run.train(model)


def in_place(run: Run) -> None:
    model = Chain()
    model.first.register_forward_hook(take_off_in_place)
    run.train(model)


def with_names(run: Run) -> None:
    def before(_: nn.Module, given: Any, named: Any) -> Any:
        return (centered(given[0]),), named

    def behind(_: nn.Module, given: Any, named: Any, returned: Tensor) -> Tensor:
        return centered(returned) + direction

    model, direction = Chain(), torch.linspace(0, 1, WIDTH)
    model.blocks[0].register_forward_pre_hook(before, with_kwargs=True)
    model.blocks[1].register_forward_hook(behind, with_kwargs=True)
    run.train(model)


def tracked(run: Run) -> None:
    def track(module: Any, given: Any, returned: Tensor) -> Tensor:
        module.center = 0.5 * getattr(module, "center", 0) + returned.detach().mean(0)
        return returned - module.center

    model = Chain()
    model.blocks[2].register_forward_hook(track)
    run.train(model)


def of_the_model(run: Run) -> None:
    def center(_: nn.Module, given: tuple[Batch]) -> tuple[Batch]:
        return ({name: x - x.mean(0) for name, x in given[0].items()},)

    model = Chain()
    model.register_forward_pre_hook(center)
    run.train(model)


def within_checkpoints(run: Run) -> None:
    model = Chain(checkpoints=True)
    model.blocks[0].register_forward_pre_hook(take_off_before)
    model.blocks[2].register_forward_hook(take_off)
    run.train(model)


def between_steps(run: Run) -> None:
    """One is there in the third step alone."""
    chain = Chain()
    model, optimizer = run.start(chain)
    for step, batch in enumerate(rows(4)):
        if step == 2:
            handle = chain.blocks[1].register_forward_hook(take_off)
            model(run.part(batch)).backward()
            handle.remove()
        else:
            loss = model(run.part(batch))
            loss.backward()
            run.keep(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def evaluated(run: Run) -> None:
    chain = Chain()
    chain.blocks[1].register_forward_hook(take_off)
    model, optimizer = run.start(chain)
    for batch in rows():
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.keep(model(run.part(batch)))
        model.train()


def scaled_backward(run: Run) -> None:
    def scale(_: nn.Module, grads: Any, of_output: Any) -> tuple[Tensor]:
        return (grads[0] / grads[0].norm(),)

    model = Chain()
    model.blocks[1].register_full_backward_hook(scale)
    run.train(model)


def scaled_before_backward(run: Run) -> None:
    model = Chain()
    model.blocks[1].register_full_backward_pre_hook(lambda _, grads: (grads[0] / grads[0].norm(),))
    run.train(model)


def reversed_backward(run: Run) -> None:
    model = Chain()
    model.blocks[1].register_full_backward_hook(lambda _, grads, of_output: (-grads[0],))
    run.train(model)


def row_by_row(run: Run) -> None:
    model = Chain()
    for block in model.blocks:
        block.register_forward_hook(lambda _, given, x: x / 2 + x.mean(-1, keepdim=True))
    run.train(model)


COUPLED: list[Program] = [
    *(behind, before, in_place, with_names, tracked),
    *(of_the_model, within_checkpoints, between_steps, evaluated),
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
@pytest.mark.parametrize("program", COUPLED)
def test_a_hook_that_computes_gets_the_rows_of_all_ranks(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, DATA[plan])


@pytest.mark.slow
@pytest.mark.by_day("behind", "before")
@pytest.mark.parametrize("program", COUPLED)
def test_it_gets_them_beside_tensor_parallel_layers(world4: World, program: Program) -> None:
    right(world4, program, {DP: 2, TP: 2})


@pytest.mark.slow
@pytest.mark.by_day("behind")
@pytest.mark.parametrize("program", COUPLED)
def test_a_pipeline_of_parts_of_the_batch_refuses_it(program: Program) -> None:
    right_or_refused(World(2), program, ALL["pp"])


@pytest.mark.slow
@pytest.mark.by_day("dp-*", "pp-row_by_row")
@pytest.mark.parametrize("program", [row_by_row, reversed_backward])
@pytest.mark.parametrize("plan", ALL)
def test_a_hook_that_treats_each_row_alone_is_left_alone(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, ALL[plan])


@pytest.mark.slow
@pytest.mark.parametrize("program", [scaled_backward, scaled_before_backward])
def test_gradients_that_meet_in_a_hook_are_refused(world2: World, program: Program) -> None:
    with pytest.raises(RankError, match=r"gradient of .* is not the sum over"):
        right(world2, program, DATA["dp"])


@pytest.mark.parametrize("kind", ["appends", "prints"])
def test_no_hook_that_keeps_or_writes_something_runs_in_a_check(world2: World, kind: str) -> None:
    assert world2.run(_times_called, kind) == [3, 3]


def _times_called(kind: str) -> int:
    seen: list[Tensor] = []
    hooks: dict[str, Callable[..., Any]] = {
        "appends": lambda _, given, returned: seen.append(returned.detach()),
        "prints": lambda _, given, returned: print(len(returned)) or seen.append(returned),
    }
    model = Chain()
    model.blocks[1].register_forward_hook(hooks[kind])
    Run(DATA["dp"]).train(model)
    return len(seen)
