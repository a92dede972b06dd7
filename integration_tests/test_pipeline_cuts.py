"""Pipelines where more than one hidden state crosses a cut: the bits of one device."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.overrides import TorchFunctionMode

import vescale
from vescale_testing import World

from .crossing_models import MODELS, ROWS, make
from .plans import PARTS, PP, Constraints, make_plan
from .test_pipeline_schedules import constraints_of
from .training import whole


class GlobalMeans(TorchFunctionMode):
    """Has micro-batches divide by the targets that count in all of them, once they are counted."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.num_parts, self.count, self.is_counting = num_parts, 0, True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.cross_entropy:
            return func(*args, **(kwargs or {}))
        if self.is_counting:
            self.count += int((args[1] != -100).sum())
        summed = func(*args, **{**(kwargs or {}), "reduction": "sum"})
        return summed * self.num_parts / torch.tensor(self.count, dtype=summed.dtype)


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def accumulated(
    model: nn.Module, batch: dict[str, Tensor], microbatches: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """One step on one device, one micro-batch after the other."""
    means, found = GlobalMeans(microbatches), list[Tensor]()
    with means, torch.no_grad():
        model(**batch)
    means.is_counting = False
    for tensors in zip(*(x.chunk(microbatches) for x in batch.values()), strict=True):
        with means:
            loss = loss_of(model(**dict(zip(batch, tensors, strict=True))))
        (loss / microbatches).backward()
        found.append(loss.detach())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.stack(found).double().mean().to(found[0].dtype), grads


# Of which an example says in what order blocks are called, and where parameters are used.
SEEN = ("named_parts", "mixing")
# Parameters that are used by a module and by code elsewhere are summed as tied ones are.
USED_TWICE = {"mixing": {"embed.weight"}}


def planned(name: str, constraints: Constraints) -> vescale.ParallelPlan:
    if name not in SEEN:
        return make_plan(constraints)
    depth = max(4, make_plan(constraints).pipeline_parallel.num_stages)
    model, batch = make(name, depth, torch.float32)
    said = {**constraints, "batch.global_size": ROWS}
    plan = vescale.generate_plan(model, said, example_batch=batch)
    assert plan.pipeline_parallel.block_calls or plan.pipeline_parallel.called_behind
    return plan


def compared(name: str, constraints: Constraints, dtype: torch.dtype) -> None:
    """Two steps of a pipeline without an update between them, compared with one device."""
    plan = planned(name, constraints)
    depth = max(4, plan.pipeline_parallel.num_stages)
    model, batch = make(name, depth, dtype)
    times = Counter(map(id, dict(model.named_parameters(remove_duplicate=False)).values()))
    tied = {fqn for fqn, parameter in model.named_parameters() if times[id(parameter)] > 1}
    tied |= USED_TWICE.get(name, set())
    loss, grads = accumulated(model, batch, plan.pipeline_parallel.microbatches)
    model, _ = vescale.parallelize(
        plan, make(name, depth, dtype)[0], lambda m: SGD(m.parameters(), lr=0.1)
    )
    for _ in range(2):
        model.zero_grad()
        found = loss_of(model(**batch))
        found.backward()
        assert torch.equal(found.detach(), loss), (found, loss)
    for fqn, parameter in model.named_parameters():
        assert (parameter.grad is None) == (fqn not in grads), fqn
        if parameter.grad is None:
            continue
        if fqn in tied:
            # A tied weight is summed over micro-batches on each of its stages first.
            bound = 1e-12 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(whole(parameter.grad), grads[fqn], rtol=bound, atol=bound)
        else:
            assert torch.equal(whole(parameter.grad), grads[fqn]), fqn


AT_NIGHT = [("parts", "1f1b"), ("named_parts", "interleaved_1f1b"), ("mixing", "1f1b")]


@pytest.mark.by_day(
    "two_streams-interleaved_1f1b",
    "written-1f1b",
    "written-interleaved_1f1b",
    "llava-interleaved_1f1b",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(*case, marks=[pytest.mark.nightly] * (case in AT_NIGHT))
        for case in itertools.product(MODELS, ["1f1b", "interleaved_1f1b"])
    ],
)
def test_two_ranks_have_the_bits_of_one_device(world2: World, name: str, schedule: str) -> None:
    world2.run(compared, name, constraints_of(schedule, 2, 4), torch.float32)


@pytest.mark.by_day("two_streams-interleaved_1f1b")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("t5", "1f1b"),
        ("two_streams", "interleaved_1f1b"),
        ("mixing", "interleaved_1f1b"),
        ("whisper", "gpipe"),
    ],
)
def test_four_ranks_too(world4: World, name: str, schedule: str) -> None:
    world4.run(compared, name, constraints_of(schedule, 4, 4), torch.float32)


@pytest.mark.by_day("dualpipev", "interleaved_zero_bubble")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved_zero_bubble"])
def test_weight_gradients_apart_too(world2: World, schedule: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pipeline_parallel.schedule")
        world2.run(compared, "two_streams", constraints_of(schedule, 2, 4), torch.float64)


def predicted(name: str, constraints: Constraints) -> None:
    """All that forward returns without gradients, what other stages computed included."""
    plan = make_plan(constraints)
    model, batch = make(name, 4, torch.float64)
    model.eval()
    with torch.no_grad():
        expected = model(**batch)
    model, _ = vescale.parallelize(
        plan, make(name, 4, torch.float64)[0].eval(), lambda m: SGD(m.parameters(), lr=0.1)
    )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = model(**batch)
        for key in expected:
            if isinstance(expected[key], Tensor):
                # Sums over other numbers of rows may be in another order.
                torch.testing.assert_close(found[key], expected[key], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_streams", "bart"])
def test_what_earlier_stages_computed_is_returned(world2: World, name: str) -> None:
    world2.run(predicted, name, {PP: 2, PARTS: 4})
