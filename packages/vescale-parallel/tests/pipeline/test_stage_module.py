"""Modules of a stage: what runs, what returns a placeholder, and what leaves forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._pipeline.cuts.placeholders import Placeholder
from vescale_parallel._pipeline.cuts.values import Cuts, ObservedValues
from vescale_parallel._pipeline.stage_assignment import StageMap
from vescale_parallel._pipeline.stage_module import (
    StagedModule,
    StageDone,
    StageRun,
    Staging,
    stage_model,
)

WIDTH = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        return x if mask is None else x * mask


class Model(nn.Module):
    """Three blocks; how forward calls them can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.body: Callable[[Any, Tensor], Tensor] = in_order

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.blocks, self.embed(x))).mean()


def in_order(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


STAGES = StageMap(["blocks.0", "blocks.1", "blocks.2"], [0, 1, 2], {"embed": 0, "head": 2})
X = torch.ones(2, WIDTH)


@pytest.fixture(autouse=True)
def usable_again() -> Iterator[None]:
    yield
    Placeholder.usable = True


def staged(model: Model | None = None) -> tuple[Model, Staging]:
    model, staging = model or Model(), Staging()
    stage_model(model, STAGES, staging, None)
    return model, staging


HIDDEN: Cuts = {1: (0,), 2: (0,)}


def run_of(stage: int, *received: Tensor, cuts: Cuts = HIDDEN) -> StageRun:
    def receive(like: Sequence[Tensor]) -> Sequence[Tensor]:
        assert [x.shape for x in like] == [x.shape for x in received]
        return received

    Placeholder.usable = stage > 0
    takes, sends = cuts.get(stage, ()), cuts.get(stage + 1, ())
    return StageRun(stage, stage, stage + 1, stage == 2, receive, takes, sends)


def activations_of(model: Model, staging: Staging, run: StageRun) -> Sequence[Tensor]:
    staging.run = run
    with pytest.raises(StageDone) as done, run.running():
        model(X)
    return done.value.activations


def activation_of(model: Model, staging: Staging, run: StageRun) -> Tensor:
    (activation,) = activations_of(model, staging, run)
    return activation


def seen(model: Model, staging: Staging) -> Cuts:
    values = ObservedValues()
    staging.run = StageRun.counting(3, values)
    return values.cuts(model(X), losses_only=True)


def through_all(body: Callable[[Any, Tensor], Tensor]) -> tuple[list[int], Tensor, Tensor]:
    """Run all stages after each other; how many tensors each sent, the result, one device's."""
    torch.manual_seed(0)
    model = Model()
    model.body = body
    expected = model(X)
    staged_model, staging = staged(model)
    cuts, sent, found = seen(model, staging), list[int](), list[Tensor]()
    for stage in (0, 1):
        found = [
            x.detach()
            for x in activations_of(staged_model, staging, run_of(stage, *found, cuts=cuts))
        ]
        sent.append(len(found))
    staging.run = run_of(2, *found, cuts=cuts)
    with staging.run.running():
        return sent, model(X), expected


def test_without_a_run_modules_are_as_they_were() -> None:
    model = Model()
    expected = model(X)
    before, classes = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
    staged(model)
    assert torch.equal(model(X), expected)
    assert list(model.state_dict()) == before
    assert [type(m).__name__ for m in model.modules()] == classes
    assert isinstance(model.blocks[0], StagedModule)
    assert isinstance(model.blocks[0], Block)


def test_the_first_stage_leaves_with_the_activation_of_its_last_block() -> None:
    model, staging = staged()
    expected = model.blocks[0](model.embed(X))
    run = run_of(0)
    assert torch.equal(activation_of(model, staging, run), expected)
    assert run.blocks_called == 1


def test_a_stage_in_between_runs_its_blocks_on_what_it_received() -> None:
    model, staging = staged()
    received = torch.full((2, WIDTH), 5.0)
    expected = model.blocks[1](received)
    assert torch.equal(activation_of(model, staging, run_of(1, received)), expected)


def test_the_last_stage_returns_what_the_model_does() -> None:
    model, staging = staged()
    received = torch.full((2, WIDTH), 5.0)
    expected = model.head(model.blocks[2](received)).mean()
    staging.run = run_of(2, received)
    assert torch.equal(model(X), expected)
    assert staging.run.blocks_called == 3


def test_counting_runs_nothing_that_has_parameters() -> None:
    model, staging = staged()
    called: list[nn.Module] = []
    for module in model.modules():
        if any(True for _ in module.parameters(False)):
            module.register_forward_pre_hook(lambda m, _: called.append(m))
    staging.run = StageRun.counting(3)
    loss = model(X)
    assert isinstance(loss, Placeholder)
    assert loss.shape == ()
    assert called == []


def _refused(body: Callable[[Any, Tensor], Tensor], stage: int, told: str) -> None:
    model, staging = staged()
    model.body = body
    staging.run = run_of(stage, torch.ones(2, WIDTH))
    with pytest.raises(ValueError, match=told):
        model(X)


def test_blocks_in_another_order_are_refused() -> None:
    _refused(
        lambda blocks, x: blocks[1](blocks[0](x)) + blocks[1](x),
        2,
        "called once each and in order, but 'blocks.1' was call number 2",
    )


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (lambda blocks, x: blocks[2](blocks[1](blocks[0](x) * 2) * 3), [1, 1]),
        (lambda blocks, x: blocks[2](blocks[1](blocks[0](x)) + x), [2, 1]),
        (lambda blocks, x: blocks[2](blocks[1](blocks[0](x), mask=x), mask=x), [2, 2]),
        (lambda blocks, x: in_order(blocks, x) + x, [2, 2]),
        (lambda blocks, x: in_order(blocks, x) + (x * 2).tanh(), [2, 2]),
        (lambda blocks, x: in_order(blocks, x) + torch.zeros_like(x), [1, 1]),
        (
            lambda blocks, x: (
                in_order(
                    blocks,
                    x,
                )
                + torch.ones(2, 3).expand_as(x)
            ),
            [1, 1],
        ),
        (lambda blocks, x: in_order(blocks, x) + written(x), [2, 2]),
        (lambda blocks, x: in_order(blocks, x.mul_(2)) + x, [2, 2]),
    ],
)
def test_what_is_needed_behind_a_cut_crosses_it(
    body: Callable[[Any, Tensor], Tensor], sent: list[int]
) -> None:
    found, result, expected = through_all(body)
    assert found == sent
    assert torch.equal(result, expected)


def written(x: Tensor) -> Tensor:
    made = torch.zeros(2, WIDTH)
    made[0] = x[1]
    return made


def test_what_was_not_seen_to_be_needed_is_refused() -> None:
    _refused(
        lambda blocks, x: blocks[1](blocks[0](x), mask=x),
        1,
        "'blocks.1' is called with a tensor that depends on parameters of another stage",
    )
    _refused(
        lambda blocks, x: in_order(blocks, x) + x,
        2,
        "add uses a tensor that another pipeline stage computes",
    )


def test_another_call_than_was_seen_is_refused() -> None:
    model, staging = staged()
    staging.run = run_of(1, X, cuts={1: (1,), 2: (0,)})
    with pytest.raises(ValueError, match=r"cannot receive argument 1.* before 'blocks.1'"):
        model(X)
    staging.run = run_of(0, cuts={1: (("module", "head", 0, 0),)})
    with pytest.raises(ValueError, match=r"cannot send what 'head' computes.* before 'blocks.1'"):
        model(X)


def test_a_module_of_another_stage_called_after_the_blocks_is_refused_by_name() -> None:
    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.embed(in_order(self.blocks, self.embed(x))).mean()

    model, staging = staged(Twice())
    staging.run = run_of(2, torch.ones(2, WIDTH))
    with pytest.raises(ValueError, match=r"'embed' is called after the blocks .*tail_modules"):
        model(X)


def test_the_first_stage_refuses_a_module_of_the_last_one() -> None:
    class Early(Model):
        def forward(self, x: Tensor) -> Tensor:
            return in_order(self.blocks, self.head(x).expand(-1, WIDTH)).mean()

    model, staging = staged(Early())
    staging.run = run_of(0)
    with pytest.raises(ValueError, match="'head' is called before the blocks of the model"):
        model(X)


def test_an_except_in_forward_does_not_keep_a_stage_from_leaving() -> None:
    def careful(blocks: Any, x: Tensor) -> Tensor:
        try:
            return in_order(blocks, x)
        except Exception:
            return x

    model, staging = staged()
    model.body = careful
    assert isinstance(activation_of(model, staging, run_of(0)), Tensor)


def test_a_block_without_a_floating_point_output_cannot_be_cut_after() -> None:
    class Rounded(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, mask).long()

    model = Model()
    model.blocks[0] = Rounded()
    staged_model, staging = staged(model)
    staging.run = run_of(0)
    with pytest.raises(ValueError, match=r"'blocks.1' is called with, .*no floating-point tensor"):
        staged_model(X)


def test_the_shape_of_a_placeholder_follows_the_arguments() -> None:
    model, staging = staged()
    staging.run = StageRun.counting(3)
    for rows in (2, 7, 2):
        staging.run = StageRun.counting(3)
        assert model.blocks[0](torch.ones(rows, WIDTH)).shape == (rows, WIDTH)


def test_a_placeholder_has_the_dtype_that_parameters_compute_in() -> None:
    model, staging = Model(), Staging()
    stage_model(model, STAGES, staging, torch.bfloat16)
    staging.run = StageRun.counting(3)
    assert model.blocks[0](X.to(torch.bfloat16)).dtype == torch.bfloat16


def test_a_block_that_is_called_again_is_refused_with_what_to_do() -> None:
    def twice(blocks: Any, x: Tensor) -> Tensor:
        return in_order(blocks, in_order(blocks, x))

    told = r"'blocks.0' was call number 3, a second call. List blocks in pipeline_parallel"
    model, staging = staged()
    model.body = twice
    # It raises where blocks are seen, before anything is sent.
    with pytest.raises(ValueError, match=told):
        seen(model, staging)


def _adapted() -> tuple[Model, nn.Module]:
    model, adapter = Model(), nn.Linear(WIDTH, WIDTH)
    plain = model.blocks[0].forward
    model.blocks[0].forward = lambda x: plain(x) + adapter(x)
    return model, adapter


def test_an_adapter_in_a_closure_is_refused_by_its_name() -> None:
    """No stage has it as a part of its block."""
    model, adapter = _adapted()
    model.adapters = nn.ModuleList([adapter])
    told = r"'forward' of 'blocks.0' is a function that calls 'adapters.0', which is no submodule"
    with pytest.raises(ValueError, match=told):
        staged(model)


def test_an_adapter_that_is_nowhere_else_is_named_where_shapes_are_asked_for() -> None:
    model, staging = staged(_adapted()[0])
    told = r"'forward' of 'blocks.0' is a function that calls a Linear which is no submodule"
    staging.run = StageRun.counting(3, ObservedValues())
    meta = torch.empty(2, WIDTH, device="meta")
    with pytest.raises(ValueError, match=told), torch.device("meta"):
        model.blocks[0](meta)
