"""A schedule run by stages that are threads, compared with one device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import ParallelPlan, with_constraints
from vescale_parallel._loss.not_returned import NotReturned
from vescale_parallel._loss.output import Scalar
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._mesh.mesh import build_mesh
from vescale_parallel._pipeline.cuts.placeholders import Placeholder
from vescale_parallel._pipeline.execution import watching
from vescale_parallel._pipeline.execution.links import Links
from vescale_parallel._pipeline.runner import Pipeline
from vescale_parallel._pipeline.schedules import actions_of
from vescale_parallel._pipeline.schedules.messages import Operation, operations_of
from vescale_parallel._pipeline.schedules.simulator import simulate_schedule
from vescale_parallel._pipeline.stage_assignment import stage_map
from vescale_parallel._pipeline.stage_module import Staging, stage_model

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]

WIDTH, ROWS, NUM_BLOCKS, CLASSES = 4, 8, 4, 3
# float64: micro-batches are summed one after the other, rows of one device all at once.
ROUNDING = 1e-12
X = torch.arange(float(ROWS * WIDTH), dtype=torch.float64).view(ROWS, WIDTH) / 30
# Micro-batches count different numbers of targets.
TARGETS = torch.tensor([0, 1, -100, 2, -100, -100, 1, 0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits, targets)
        return {"loss": loss, "logits": logits, "size": logits.detach().pow(2).mean()}


def net() -> Model:
    torch.manual_seed(0)
    return Model()


@dataclass(eq=False)
class _TurnLinks(Links):
    turns: Callable[..., Any] = lambda wait: wait()

    def waiting(self, wait: Callable[[], object]) -> None:
        self.turns(wait)


@dataclass(eq=False)
class TakingTurns(Pipeline):
    """A pipeline in a thread: it lets others run while it waits for them.

    Whether placeholders may be used is of the whole process, so one stage runs at a time.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)

    def _waiting(self, wait: Callable[..., Any], *args: Any) -> Any:
        usable = Placeholder.usable
        self.turn.release()
        try:
            return wait(*args)
        finally:
            self.turn.acquire()
            Placeholder.usable = usable

    def __post_init__(self) -> None:
        super().__post_init__()
        links = _TurnLinks(self.links.groups, self.links.device)
        links.turns = self._waiting
        self.links = links

    def _agree(self, form: object, told: Any, *more: Any) -> Any:
        return self._waiting(super()._agree, form, told, *more)


@dataclass
class Stages:
    """What the ranks of one test share."""

    plan: ParallelPlan
    models: list[nn.Module]
    turn: threading.Lock = field(default_factory=threading.Lock)

    def step(self, rank: int, x: Tensor, targets: Tensor, *, train: bool = True) -> Any:
        """Run a step on one rank; return its output and its own gradients."""
        model, mesh, staging = self.models[rank], build_mesh(self.plan), Staging()
        stages = stage_map(self.plan, model)
        assert stages is not None
        ranks = DataRanks(mesh)
        with self.turn:  # torch's copies for shapes use modes of the process
            stage_model(model, stages, staging, None)
        pipeline = TakingTurns(
            self.plan,
            mesh,
            staging,
            stages.starts,
            NUM_BLOCKS,
            ranks.total,
            ranks.size,
            turn=self.turn,
        )
        with self.turn, torch.set_grad_enabled(train):
            run = pipeline.run if train else pipeline.predict
            output = run(model, (x,), {"targets": targets})
        return output, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def plan_of(size: int, microbatches: int, schedule: str, virtual: int) -> ParallelPlan:
    section = {
        "size": size,
        "microbatches": microbatches,
        "schedule": schedule,
        "virtual_stages": virtual,
    }
    return with_constraints(
        ParallelPlan(), {f"pipeline_parallel.{name}": value for name, value in section.items()}
    )


CASES = [
    (2, 1, "1f1b", 1), (2, 4, "1f1b", 1), (2, 8, "gpipe", 1), (3, 4, "1f1b", 1),
    (4, 4, "gpipe", 1), (4, 8, "1f1b", 1), (2, 4, "interleaved_1f1b", 2),
    (2, 4, "looped_bfs", 2), (2, 8, "interleaved_zero_bubble", 2),
    (4, 4, "interleaved_zero_bubble", 1),
    (2, 4, "zbv", 2), (2, 1, "zbv", 2), (2, 4, "dualpipev", 2), (2, 8, "dualpipev", 2),
]  # fmt: skip


@pytest.mark.by_day(
    "2-1-1f1b-1", "2-4-1f1b-1", "2-8-gpipe-1", "2-4-zbv-2", "2-1-zbv-2", "2-8-dualpipev-2"
)
@pytest.mark.parametrize(("size", "microbatches", "schedule", "virtual"), CASES)
def test_loss_and_gradients_of_all_stages_are_those_of_one_device(
    in_threads: InThreads, size: int, microbatches: int, schedule: str, virtual: int
) -> None:
    expected = net()
    output = expected(X, TARGETS)
    output["loss"].backward()
    plan = plan_of(size, microbatches, schedule, virtual)
    stages = Stages(plan, [copy.deepcopy(net()) for _ in range(size)])
    results = in_threads(size, lambda rank: stages.step(rank, X, TARGETS))
    found: dict[str, Tensor] = {}
    for told, grads in results:
        assert isinstance(told["logits"], NotReturned)
        assert told["loss"].is_loss
        assert not told["size"].is_loss
        assert told["loss"].value == pytest.approx(output["loss"].item(), rel=0, abs=ROUNDING)
        assert told["size"].value == pytest.approx(output["size"].item(), rel=0, abs=ROUNDING)
        assert not found.keys() & grads.keys()  # every parameter is of one stage
        found |= grads
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, rtol=0, atol=ROUNDING), name


class Sums(Model):
    """Its loss has a mean over targets and one over rows."""

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        output = super().forward(x, targets)
        output["loss"] = output["loss"] + 0.3 * output["logits"].pow(2).mean()
        return output


@pytest.mark.by_day("2-4-1f1b-1-7", "3-4-gpipe-1-7", "2-4-zbv-2-5")
@pytest.mark.parametrize("rows", [5, 7])
@pytest.mark.parametrize(
    ("size", "microbatches", "schedule", "virtual"),
    [(2, 4, "1f1b", 1), (3, 4, "gpipe", 1), (2, 4, "interleaved_1f1b", 2), (2, 4, "zbv", 2)],
)
def test_micro_batches_of_other_numbers_of_rows_weigh_as_many(
    in_threads: InThreads, size: int, microbatches: int, schedule: str, virtual: int, rows: int
) -> None:
    models: list[nn.Module] = []
    for _ in range(size + 1):
        torch.manual_seed(0)
        models.append(Sums())
    expected = models.pop()
    output = expected(X[:rows], TARGETS[:rows])
    output["loss"].backward()
    stages = Stages(plan_of(size, microbatches, schedule, virtual), models)
    found: dict[str, Tensor] = {}
    for told, grads in in_threads(size, lambda rank: stages.step(rank, X[:rows], TARGETS[:rows])):
        for name in ("loss", "size"):
            value = output[name].item()
            assert told[name].value == pytest.approx(value, rel=0, abs=ROUNDING), name
        found |= grads
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, rtol=0, atol=ROUNDING), name


@pytest.mark.by_day(
    "4-4-gpipe-1", "2-4-interleaved_1f1b-2", "2-4-looped_bfs-2", "2-4-zbv-2", "2-8-dualpipev-2"
)
@pytest.mark.parametrize(("size", "microbatches", "schedule", "virtual"), CASES[1:])
def test_ranks_do_what_the_simulator_ran_and_keep_no_more(
    in_threads: InThreads, size: int, microbatches: int, schedule: str, virtual: int
) -> None:
    plan = plan_of(size, microbatches, schedule, virtual)
    stages = Stages(plan, [net() for _ in range(size)])
    done: dict[int, list[Operation]] = {}
    kept: dict[int, list[tuple[int, int]]] = {}

    def watch(operation: Operation, waiting: int, num_kept: int) -> None:
        done.setdefault(threading.get_ident(), []).append(operation)
        kept.setdefault(threading.get_ident(), []).append((waiting, num_kept))

    def step(rank: int) -> int:
        stages.step(rank, X, TARGETS)
        return threading.get_ident()

    with watching(watch):
        threads = in_threads(size, step)
    shape = {"size": size, "virtual_stages": virtual, "microbatches": microbatches}
    orders = [actions_of(schedule, rank, **shape) for rank in range(size)]
    simulated = simulate_schedule(schedule, **shape)
    for rank, thread in enumerate(threads):
        placement = plan.pipeline_parallel.placement
        assert done[thread] == [*operations_of(orders, rank, placement)]
        waiting, num_kept = (max(column) for column in zip(*kept[thread], strict=True))
        assert waiting == simulated.peak_activations[rank]
        assert num_kept == simulated.peak_sends[rank]


@pytest.mark.by_day("2-4-1f1b-1", "2-4-looped_bfs-2", "2-1-zbv-2", "2-8-dualpipev-2")
@pytest.mark.parametrize(("size", "microbatches", "schedule", "virtual"), CASES[1::2])
def test_evaluation_reports_the_same_and_differentiates_nothing(
    in_threads: InThreads, size: int, microbatches: int, schedule: str, virtual: int
) -> None:
    output = net()(X, TARGETS)
    plan = plan_of(size, microbatches, schedule, virtual)
    stages = Stages(plan, [net() for _ in range(size)])
    for told, grads in in_threads(size, lambda rank: stages.step(rank, X, TARGETS, train=False)):
        assert isinstance(told["loss"], Scalar)
        assert told["loss"].value == pytest.approx(output["loss"].item(), rel=0, abs=ROUNDING)
        assert grads == {}


def test_a_stage_without_trained_parameters_passes_gradients_on(in_threads: InThreads) -> None:
    """Frozen at the end of the pipeline: the stages before it still train."""
    expected, models = net(), [net() for _ in range(2)]
    for model in (expected, *models):
        for part in (*model.blocks[2:], model.head):
            part.requires_grad_(False)
    expected(X, TARGETS)["loss"].backward()
    stages = Stages(plan_of(2, 4, "1f1b", 1), list(models))
    (_, first), (_, last) = in_threads(2, lambda rank: stages.step(rank, X, TARGETS))
    assert last == {}
    for name, grad in first.items():
        wanted = expected.get_parameter(name).grad
        assert wanted is not None
        assert torch.allclose(grad, wanted, rtol=0, atol=ROUNDING), name
    assert first.keys() == {n for n, p in expected.named_parameters() if p.grad is not None}


def test_a_first_stage_without_trained_parameters_differentiates_nothing(
    in_threads: InThreads,
) -> None:
    expected, models = net(), [net() for _ in range(2)]
    for model in (expected, *models):
        for part in (model.embed, *model.blocks[:2]):
            part.requires_grad_(False)
    expected(X, TARGETS)["loss"].backward()
    stages = Stages(plan_of(2, 4, "1f1b", 1), list(models))
    (_, first), (_, last) = in_threads(2, lambda rank: stages.step(rank, X, TARGETS))
    assert first == {}
    for name, parameter in expected.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(last[name], parameter.grad, rtol=0, atol=ROUNDING), name
