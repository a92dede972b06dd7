"""Hooks of modules that no stage has: each runs where what it sees is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from vescale_parallel._pipeline.cuts.hooks import hooks_where_real
from vescale_parallel._pipeline.cuts.placeholders import Placeholder
from vescale_parallel._pipeline.cuts.values import ObservedValues
from vescale_parallel._pipeline.stage_assignment import StageMap
from vescale_parallel._pipeline.stage_module import StageDone, StageRun, Staging, stage_model

WIDTH = 3
STAGES = StageMap(["body.0", "body.1", "body.2"], [0, 1, 2], {"embed": 0, "head": 2})
X = torch.arange(6.0).reshape(2, WIDTH)


class Model(nn.Module):
    """Modules without parameters before, between and behind three blocks in a container."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Tanh()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.scaled, self.batch_only = nn.Softsign(), nn.Sigmoid()
        self.head = nn.Linear(WIDTH, 1)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.batch_only(x).sum(-1, keepdim=True)
        start = self.first(self.embed(x))
        y = self.scaled(self.body(start)) * weight
        return self.head(y + start if self.skips else y).mean()


@pytest.fixture(autouse=True)
def usable_again() -> Iterator[None]:
    yield
    Placeholder.usable = True


class Stages:
    """Runs the stages of a model one after the other, after the run that sees the cuts."""

    def __init__(self, model: Model) -> None:
        self.model, self.staging = model, Staging()
        self.stage: int | None = None
        stage_model(model, STAGES, self.staging, None)

    def run(self) -> Tensor:
        values = ObservedValues()
        Placeholder.usable = True
        found = self._run(StageRun.counting(3, values))
        cuts, sent, losses = values.cuts(found, losses_only=True), list[Tensor](), list[Tensor]()
        for stage in range(3):
            self.stage = stage
            Placeholder.usable = stage > 0
            takes, sends = cuts.get(stage, ()) if stage else (), cuts.get(stage + 1, ())
            received = [*sent]
            run = StageRun(
                stage, stage, stage + 1, stage == 2, lambda _, x=received: x, takes, sends
            )
            try:
                losses.append(self._run(run))
            except StageDone as done:
                sent = [x.detach() for x in done.activations]
        self.staging.run, self.stage = None, None
        return losses[0]

    def _run(self, run: StageRun) -> Tensor:
        self.staging.run = run
        with run.running(), hooks_where_real(self.staging.around, run):
            return self.model(X)


Seen = list[tuple[int | None, float]]


def noted(stages: Stages, seen: Seen, module: nn.Module, *given: Any) -> None:
    """Keep the sum of what comes last: the output, or the arguments."""
    *_, last = given
    tensor = last[0] if isinstance(last, tuple) else last
    seen.append((stages.stage, float(tensor.detach().sum())))


def on_one_device(register: Callable[[Model, Any], Any]) -> list[float]:
    model, seen = Model(), list[float]()

    def hook(module: nn.Module, *given: Any) -> None:
        *_, last = given
        tensor = last[0] if isinstance(last, tuple) else last
        seen.append(float(tensor.detach().sum()))

    register(model, hook)
    model(X)
    return seen


@pytest.mark.parametrize(
    ("register", "stage"),
    [
        (lambda m, hook: m.first.register_forward_hook(hook), 0),
        (lambda m, hook: m.first.register_forward_hook(hook, always_call=True), 0),
        (lambda m, hook: m.first.register_forward_pre_hook(hook), 0),
        (lambda m, hook: m.scaled.register_forward_hook(hook), 2),
        (lambda m, hook: m.scaled.register_forward_pre_hook(hook), 2),
        (lambda m, hook: m.body.register_forward_pre_hook(hook), 0),
        (lambda m, hook: m.body.register_forward_hook(hook), 2),
        (lambda m, hook: m.body[1].register_forward_hook(hook), 1),
        (lambda m, hook: m.register_forward_hook(hook), 2),
        (
            lambda m, hook: m.first.register_forward_hook(
                lambda mod, args, kwargs, out: hook(mod, args, kwargs, out), with_kwargs=True
            ),
            0,
        ),
    ],
)
def test_a_hook_runs_on_the_stage_that_has_what_it_sees(
    register: Callable[[Model, Any], Any], stage: int
) -> None:
    stages, seen = Stages(Model()), Seen()
    register(stages.model, partial(noted, stages, seen))
    stages.run()
    assert seen == [(stage, value) for value in on_one_device(register)]


def test_what_depends_on_the_batch_alone_is_seen_on_every_stage() -> None:
    stages, seen = Stages(Model()), Seen()
    stages.model.batch_only.register_forward_hook(partial(noted, stages, seen))
    stages.run()
    value = float(torch.sigmoid(X).sum())
    assert seen == [(stage, value) for stage in (None, 0, 1, 2)]


def test_global_hooks_see_every_value_and_no_placeholder() -> None:
    seen: dict[str, list[tuple[str, float]]] = {}

    def note(to: list[tuple[str, float]], module: nn.Module, *given: Any) -> None:
        *_, last = given
        tensor = last[0] if isinstance(last, tuple) else last
        to.append((type(module).__name__, float(tensor.detach().sum())))

    for kind in ("stages", "device"):
        to = seen.setdefault(kind, [])
        run = Stages(Model()).run if kind == "stages" else partial(Model(), X)
        handles = [
            register_module_forward_hook(partial(note, to)),
            register_module_forward_pre_hook(partial(note, to)),
        ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
    assert set(seen["stages"]) == set(seen["device"])
    # Modules with parameters are called once.
    linears = [
        [each for each in found if each[0] == "Linear"]
        for found in (seen["stages"], seen["device"])
    ]
    assert sorted(linears[0]) == sorted(linears[1])


def test_a_hook_may_remove_itself_and_be_added_between_steps() -> None:
    stages, seen = Stages(Model()), Seen()
    note = partial(noted, stages, seen)

    def once(module: nn.Module, args: Any, output: Tensor) -> None:
        note(module, args, output)
        handle.remove()

    handle = stages.model.first.register_forward_hook(once)
    stages.run()
    stages.run()
    assert [stage for stage, _ in seen] == [0]
    assert not stages.model.first._forward_hooks
    second = stages.model.first.register_forward_hook(note)
    stages.run()
    assert [stage for stage, _ in seen] == [0, 0]
    assert stages.model.first._forward_hooks == {second.id: note}


def test_reading_an_argument_that_was_not_sent_names_the_hook_and_the_module() -> None:
    def reads(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        float(args[0].sum())

    stages = Stages(Model())
    stages.model.body.register_forward_hook(reads)
    with pytest.raises(ValueError, match=r"reads', a hook of 'body', reads a tensor that"):
        stages.run()


def test_a_hook_that_returns_something_else_changes_the_loss_as_on_one_device() -> None:
    def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    expected = Model()
    expected.first.register_forward_hook(doubled)
    stages = Stages(Model())
    stages.model.first.register_forward_hook(doubled)
    assert torch.equal(stages.run(), expected(X))


def test_a_hook_that_writes_in_place_changes_what_is_sent_by_name() -> None:
    def doubled(module: nn.Module, args: Any, output: Tensor) -> None:
        output.mul_(2)

    expected, stages = Model(), Stages(Model())
    for model in (expected, stages.model):
        model.skips = True
        model.first.register_forward_hook(doubled)
    with torch.no_grad():
        assert torch.equal(stages.run(), expected(X))


def test_replacing_what_is_sent_by_name_is_refused() -> None:
    def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    stages = Stages(Model())
    stages.model.skips = True
    stages.model.first.register_forward_hook(doubled)
    with pytest.raises(ValueError, match=r"doubled', a hook of 'first', replaces a tensor that"):
        stages.run()
