"""Pipelines where more than one hidden state crosses a cut: the bits of one device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.overrides import TorchFunctionMode

import vescale
from vescale_testing import World

from .crossing_models import MODELS, make
from .plans import PARTS, PP, Constraints, make_plan
from .test_pipeline_schedules import SCHEDULES, constraints_of
from .training import whole


class GlobalMeans(TorchFunctionMode):
    """Has micro-batches divide by the targets that count in all of them together."""

    def __init__(self, num_parts: int, count: int) -> None:
        super().__init__()
        self.num_parts, self.count = num_parts, count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.cross_entropy:
            return func(*args, **(kwargs or {}))
        summed = func(*args, **{**(kwargs or {}), "reduction": "sum"})
        return summed * self.num_parts / torch.tensor(self.count, dtype=summed.dtype)


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def accumulated(
    model: nn.Module, batch: dict[str, Tensor], microbatches: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """One step on one device, one micro-batch after the other."""
    found: list[Tensor] = []
    count = int((batch["labels"] != -100).sum())
    for tensors in zip(*(x.chunk(microbatches) for x in batch.values()), strict=True):
        with GlobalMeans(microbatches, count):
            loss = loss_of(model(**dict(zip(batch, tensors, strict=True))))
        (loss / microbatches).backward()
        found.append(loss.detach())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.stack(found).double().mean().to(found[0].dtype), grads


def compared(name: str, constraints: Constraints, dtype: torch.dtype) -> None:
    """Two steps of a pipeline without an update between them, compared with one device."""
    plan = make_plan(constraints)
    depth = max(4, plan.pipeline_parallel.num_stages)
    model, batch = make(name, depth, dtype)
    tied = {n for n, p in model.named_parameters(remove_duplicate=False)}
    tied -= {n for n, p in model.named_parameters()}
    shared = {id(model.get_parameter(n)) for n in tied}
    names = {n for n, p in model.named_parameters() if id(p) in shared}
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
        if fqn in names:
            # A tied weight is summed over micro-batches on each of its stages first.
            bound = 1e-12 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(whole(parameter.grad), grads[fqn], rtol=bound, atol=bound)
        else:
            assert torch.equal(whole(parameter.grad), grads[fqn]), fqn


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_have_the_bits_of_one_device(world2: World, name: str, schedule: str) -> None:
    world2.run(compared, name, constraints_of(schedule, 2, 4), torch.float32)
