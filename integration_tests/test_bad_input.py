"""What cannot be right is refused, on every rank, with a message that says why; nobody hangs."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer, SparseAdam

import vescale
from vescale_testing import World

from .models import HandWritten, batches, build
from .plans import (
    DP,
    EP,
    FOUR,
    PARTS,
    PP,
    SCHEDULE,
    TP,
    TWO,
    VIRTUAL,
    ZERO,
    Constraints,
    make_plan,
)
from .short_group import in_short_group

ROWS = "batch.global_size"
SHARDING = "tensor_parallel.sharding_plan"


def attempt(fn: Callable[..., Any], *args: Any) -> tuple[type[Exception], str] | None:
    """Return what a call raises, None if nothing."""
    try:
        fn(*args)
    except Exception as error:
        return type(error), str(error)
    return None


def check(
    world: World, kind: type[Exception], message: str, fn: Callable[..., Any], *args: Any
) -> None:
    """Assert that a call raises on every rank, with a message that matches."""
    for rank, answer in enumerate(world.run(attempt, fn, *args, timeout=60.0)):
        assert answer is not None, f"rank {rank} raised nothing"
        assert issubclass(answer[0], kind), f"rank {rank}: {answer}"
        assert re.search(message, answer[1]), f"rank {rank}: {answer}"


@pytest.fixture
def broken2(world2: World) -> Iterator[World]:
    """Two ranks whose process group is of no more use after the test."""
    yield world2
    world2.close()


@pytest.fixture
def broken4(world4: World) -> Iterator[World]:
    """Four ranks whose process group is of no more use after the test."""
    yield world4
    world4.close()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


# Before anything has run


def start(constraints: Constraints, name: str = "hand_written") -> None:
    vescale.parallelize(make_plan(constraints), build(name))


STARTS: dict[str, tuple[Constraints, str]] = {
    "world_size": ({DP: 4}, r"expected 4 ranks .*got world size 2"),
    "world_size_of_axes": ({PP: 2, TP: 2}, r"expected 4 ranks \(pp 2 x tp 2\), got world size 2"),
    "batch": ({DP: 2, ROWS: 7}, r"batch.global_size to be a multiple of .* got 7"),
    "micro_batches": ({PP: 2, PARTS: 4, ROWS: 6}, r"batch.global_size to be a multiple .* got 6"),
    "pattern": ({TP: 2, SHARDING: {"layers.*.up.weight": "Shard(0)"}}, r"'layers.*' matches noth"),
    "placement": ({TP: 2, SHARDING: {"head.weight": "Shard"}}, r"expected 'Shard\(d\)'.*'Shard'"),
    "not_a_linear": ({TP: 2, SHARDING: {"norm.weight": "Shard(0)"}}, r"'norm.weight' cannot be"),
    "stages": (
        {PP: 2, SCHEDULE: "interleaved_1f1b", VIRTUAL: 4, PARTS: 2},
        r"expected at most 4 pipeline stages.* got 8",
    ),
    "split_point": ({PP: 2, "pipeline_parallel.split_points": ("blocks.7",)}, r"'blocks.7' is no"),
    "sequence": ({TP: 2, "tensor_parallel.sequence": True}, r"sequence needs an example_batch"),
    "compile": (
        {TP: 2, "tensor_parallel.overlap": 2, "compile": "blocks"},
        r"not available with tensor_parallel.overlap 2",
    ),
    "no_experts": ({DP: 2, EP: 2}, r"expert_parallel.size 2: found no experts in HandWritten"),
    "experts_of_one_rank": ({PP: 2, EP: 2}, r"size to divide data_parallel.size \(1\).* got 2"),
    "unknown": ({"tensor_parallel.sise": 2}, r"unknown constraint .*'tensor_parallel.size'"),
    "zero_stage": ({DP: 2, ZERO: 4}, r"data_parallel.zero_stage to be one of .* got 4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STARTS)
def test_a_plan_that_does_not_fit_is_refused(world2: World, case: str) -> None:
    constraints, message = STARTS[case]
    check(world2, ValueError, message, start, constraints)


def plan_of_another_model() -> None:
    plan = vescale.generate_plan(HandWritten(depth=5), {DP: 2}, world_size=2)
    vescale.parallelize(plan, HandWritten(depth=4))


def uneven_heads_of_the_planner() -> None:
    vescale.generate_plan(build("llama"), {TP: 3}, world_size=3)


def unknown_constraint() -> None:
    vescale.generate_plan(HandWritten(), {"pipeline_parallel.sizes": 2}, world_size=2)


def batch_norm(constraints: Constraints, kind: Callable[[int], nn.Module]) -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), kind(8)) for _ in range(4)]
    vescale.parallelize(make_plan(constraints), nn.Sequential(*layers))


def twice() -> None:
    model = vescale.parallelize(make_plan({DP: 2}), HandWritten())
    vescale.parallelize(make_plan({DP: 2}), model)


MODELS: dict[str, tuple[Callable[..., None], tuple[Any, ...], str]] = {
    "another_model": (
        plan_of_another_model,
        (),
        r"the plan was made for HandWritten .*, got Hand",
    ),
    "planned_heads": (
        uneven_heads_of_the_planner,
        (),
        r"tensor_parallel.size 3: policy 'auto' shards nothing of",
    ),
    "constraint": (unknown_constraint, (), r"unknown constraint .*'pipeline_parallel.size'"),
    "sync_batch_norm": (batch_norm, ({DP: 2}, nn.SyncBatchNorm), r"'0.1' is a SyncBatchNorm"),
    "batch_norm_pp": (
        batch_norm,
        ({PP: 2, PARTS: 2}, nn.BatchNorm1d),
        r"'0.1' normalizes over the batch",
    ),
    "twice": (twice, (), r"HandWritten is parallelized already"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_does_not_fit_is_refused(world2: World, case: str) -> None:
    fn, args, message = MODELS[case]
    check(world2, ValueError, message, fn, *args)


def load_nothing(path: str) -> None:
    model = vescale.parallelize(make_plan(TWO["zero3"]), HandWritten())
    vescale.load(path, {"model": model})


@pytest.mark.slow
def test_a_missing_checkpoint_is_refused(world2: World, tmp_path: Path) -> None:
    path = str(tmp_path / "nothing_here")
    check(world2, vescale.CheckpointError, "nothing_here", load_nothing, path)


# Optimizers and data sets


class OwnStep(SGD):
    """Elementwise by its class, by its norm not."""

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as users write it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "LBFGS": lambda model: LBFGS(model.parameters()),
    "OwnStep": lambda model: OwnStep(model.parameters(), lr=0.1),
    "SparseAdam": lambda model: SparseAdam(list(model.parameters())),
}


def optimize(constraints: Constraints, name: str) -> None:
    vescale.parallelize(make_plan(constraints), HandWritten(), OPTIMIZERS[name])


@pytest.mark.by_day("LBFGS-zero3", "OwnStep-zero3", "SparseAdam-zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero1", "zero3", "tp", "pp-1f1b"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_which_nothing_is_known_is_refused_on_parts(
    world2: World, name: str, plan: str
) -> None:
    message = f"{name}.*(not known to update every element|make it after|sparse gradients only)"
    check(world2, ValueError, message, optimize, TWO[plan], name)


def wrong_optimizer(kind: str) -> None:
    model = HandWritten()
    of_before = AdamW(model.parameters())
    stranger = nn.Parameter(torch.zeros(3))
    given: dict[str, Any] = {
        "object": of_before,
        "made_before": lambda model: of_before,
        "foreign": lambda model: AdamW([*model.parameters(), stranger]),
        "nothing": lambda model: None,
        "not_callable": 3,
    }
    vescale.parallelize(make_plan({DP: 2}), model, given[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("object", TypeError, "expected optimizer_fn to be a function, got AdamW"),
        ("made_before", ValueError, "one that holds another tensor"),
        ("foreign", ValueError, "one that holds another tensor"),
        (
            "nothing",
            TypeError,
            "optimizer_fn to return a torch optimizer or a list of them, got None",
        ),
        ("not_callable", TypeError, "expected optimizer_fn to be a function, got int"),
    ],
)
def test_a_wrong_optimizer_is_refused(
    world2: World, kind: str, error: type[Exception], message: str
) -> None:
    check(world2, error, message, wrong_optimizer, kind)


def wrong_data(kind: str) -> None:
    model, rows = HandWritten(), [torch.zeros(3)] * 4
    given: dict[str, tuple[Constraints, Any]] = {
        "generator": ({DP: 2, ROWS: 4}, (row for row in rows)),
        "no_size": ({DP: 2}, rows),
        "too_few": ({DP: 2, ROWS: 8}, rows),
    }
    constraints, dataset = given[kind]
    vescale.parallelize(make_plan(constraints), model, None, None, dataset)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("generator", TypeError, "expected a map-style data set .* got generator"),
        ("no_size", ValueError, "a data set needs batch.global_size in the plan"),
        ("too_few", ValueError, "at most the 4 samples of the data set, got 8"),
    ],
)
def test_a_wrong_data_set_is_refused(
    world2: World, kind: str, error: type[Exception], message: str
) -> None:
    check(world2, error, message, wrong_data, kind)


# Ranks that were given different things


def filled(value: float) -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, value)
    return layer


def differ(kind: str) -> None:
    odd = dist.get_rank() == 1
    plan = make_plan({DP: 2, ZERO: 1} if kind == "plan" and odd else {DP: 2})
    if kind == "axis" and odd:
        plan = make_plan({PP: 2})
    if kind == "world_size" and odd:
        plan = make_plan({DP: 3})
    model = HandWritten(depth=3 if kind == "model" and odd else 4)
    if kind == "construction":
        # The same shapes and random numbers, but another constant.
        model = vescale.deferred_init(filled, 1.0 if odd else 2.0)
    optimizer_fn = None if kind == "optimizer" and odd else sgd
    scheduler_fn = None if kind == "scheduler" and odd else torch.optim.lr_scheduler.ConstantLR
    vescale.parallelize(plan, model, optimizer_fn, scheduler_fn if optimizer_fn else None)


DIFFERENCES = {
    "plan": "same plan .* but data_parallel.zero_stage is 0 on rank 0 and 1 on rank 1;",
    "axis": "same plan .* but pipeline_parallel.size is 1 on rank 0 and 2 on rank 1 ",
    "model": "same model .* parameter 'blocks.3.gain' is .* on rank 0 and missing on rank 1 ",
    "construction": "same construction on every rank",
    "optimizer": "same arguments on every rank",
    "scheduler": "same arguments on every rank",
    "world_size": "rank",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_ranks_that_were_given_different_things_all_say_so(
    broken2: World, tmp_path: Path, kind: str
) -> None:
    check(broken2, ValueError, DIFFERENCES[kind], in_short_group, str(tmp_path), differ, kind)


# Failures on the way


def raise_on_one_rank(constraints: Constraints, fqn: str, where: str) -> None:
    model = HandWritten()

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise LookupError("row 17 is bad")

    def fail_in_backward(_: nn.Module, __: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(fail)

    module = model.get_submodule(fqn)
    if where == "forward":
        module.register_forward_pre_hook(fail)
    else:
        module.register_forward_hook(fail_in_backward)
    plan = make_plan(constraints)
    model = vescale.parallelize(plan, model)
    batch = {k: v[: 8 // plan.data_parallel.size] for k, v in batches(1)[0].items()}
    model(batch).backward()
    # Ranks that rank 1 has nothing to tell notice at the next thing that all do together.
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dist.barrier()


FAILURES: dict[str, tuple[Constraints, str, str]] = {
    "dp": (TWO["dp"], "blocks.2", "forward"),
    "zero3": (TWO["zero3"], "blocks.2", "forward"),
    "tp": (TWO["tp"], "blocks.2", "forward"),
    "pp": (TWO["pp-1f1b"], "blocks.2", "forward"),
    "pp-backward": (TWO["pp-1f1b"], "blocks.2", "backward"),
}
FAILURES_OF_FOUR: dict[str, tuple[Constraints, str, str]] = {
    "tp-dp": (FOUR["tp-dp"], "blocks.2", "forward"),
    "tp-zero3": (FOUR["tp-zero3"], "blocks.2", "forward"),
    "pp-zero1": (FOUR["pp-zero1"], "blocks.0", "forward"),
}


def check_failure(world: World, directory: Path, case: tuple[Constraints, str, str]) -> None:
    answers = world.run(attempt, in_short_group, str(directory), raise_on_one_rank, *case)
    assert answers[1] == (LookupError, "row 17 is bad")
    for rank, answer in enumerate(answers):
        assert answer is not None, f"rank {rank} raised nothing"
        if rank != 1:
            assert issubclass(answer[0], vescale.PeerError), answer
            assert answer[1].startswith("rank 1 raised LookupError: row 17 is bad"), answer


@pytest.mark.by_day("pp-backward")
@pytest.mark.slow
@pytest.mark.parametrize("case", FAILURES)
def test_ranks_that_wait_for_one_that_raised_stop_and_name_it(
    broken2: World, tmp_path: Path, case: str
) -> None:
    check_failure(broken2, tmp_path, FAILURES[case])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("case", FAILURES_OF_FOUR)
def test_ranks_on_another_axis_than_one_that_raised_stop_and_name_it(
    broken4: World, tmp_path: Path, case: str
) -> None:
    check_failure(broken4, tmp_path, FAILURES_OF_FOUR[case])


class KeepsLoss(HandWritten):
    def forward(self, batch: Any) -> Any:
        self.last_loss = super().forward(batch)
        return {}


CALLS: dict[str, tuple[type[nn.Module], int, str]] = {
    "kept_loss": (KeepsLoss, 8, r"keeps a scalar as KeepsLoss\.last_loss.*Have forward return"),
    "rows": (HandWritten, 3, "at least 4 rows, one for each micro-batch .* got 3 rows"),
    "no rows": (HandWritten, 0, "at least one row, got 0 rows; leave such a batch out"),
}


def call(cls: type[nn.Module], rows: int) -> None:
    model = vescale.parallelize(make_plan(TWO["pp-1f1b"]), cls())
    model({k: v[:rows] for k, v in batches(1)[0].items()}).sum().backward()


@pytest.mark.by_day("kept_loss", "no rows")
@pytest.mark.slow
@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_a_pipeline_cannot_run_is_refused(
    broken2: World, tmp_path: Path, case: str
) -> None:
    cls, rows, message = CALLS[case]
    # A stage that does not see the fault says which one did and why.
    check(broken2, Exception, message, in_short_group, str(tmp_path), call, cls, rows)


# What would part the parameters from what computes


def change(constraints: Constraints, kind: str) -> None:
    model = vescale.parallelize(make_plan(constraints), HandWritten())
    head = model.get_parameter("head.weight")
    changes: dict[str, Callable[[], Any]] = {
        "double": model.double,
        "bfloat16": lambda: model.to(torch.bfloat16),
        "data": lambda: setattr(head, "data", head.data * 0.5),
        "assign": lambda: model.load_state_dict(HandWritten().state_dict(), assign=True),
    }
    changes[kind]()
    replicas = constraints.get(DP, 1)
    model({k: v[: 8 // replicas] for k, v in batches(1)[0].items()})


@pytest.mark.by_day("double-dp", "bfloat16-zero3", "assign-pp-1f1b")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *itertools.product(
            ["double", "bfloat16", "data", "assign"], ["dp", "zero3", "tp", "pp-1f1b"]
        )
    ],
)
def test_a_change_that_the_engine_would_not_see_is_refused_at_the_next_call(
    broken2: World, kind: str, plan: str
) -> None:
    check(broken2, Exception, "parallelize|distributed", change, TWO[plan], kind)


def copied_loss(constraints: Constraints) -> tuple[float, float]:
    """Return the loss of a model after a copy of it has trained, and that of before."""
    model = vescale.parallelize(make_plan(constraints), HandWritten())
    batch = {k: v[: 8 // constraints.get(DP, 1)] for k, v in batches(1)[0].items()}
    with torch.no_grad():
        before = float(model(batch))
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            parameter.mul_(0.5)
        copied(batch)
        return float(model(batch)), before


@pytest.mark.by_day("zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3", "tp"])
def test_a_copy_has_parameters_of_its_own(world2: World, plan: str) -> None:
    for after, before in world2.run(copied_loss, TWO[plan]):
        assert after == before
