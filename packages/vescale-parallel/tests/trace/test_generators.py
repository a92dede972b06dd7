"""A check changes nothing that a user could notice."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import observe, propose_sharding
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._verify.calls.call_guard import CallGuard
from vescale_parallel._verify.manual_plan import checked_plan


class Block(nn.Module):
    """Draws from every generator that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.random()
        torch.rand(1)
        return x + self.dropout(self.down(self.up(x).relu()))


PLAN = {"*.up.weight": "Shard(0)", "*.down.weight": "Shard(1)"}
BATCH = (torch.ones(2, 8).cumsum(0),)


def propose(model: nn.Module) -> None:
    assert propose_sharding(model, "auto", 2, example_batch=BATCH).plan


def propose_without_an_example(model: nn.Module) -> None:
    propose_sharding(model, "megatron", 2)


def check(model: nn.Module) -> None:
    checked_plan(model, shard(PLAN, model, 2), BATCH)


def guard(model: nn.Module) -> None:
    with CallGuard(model, PLAN, shard(PLAN, model, 2), []).proven(model, BATCH, {}):
        pass


def refuse(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="changes what"):
        checked_plan(model, shard({"*.up.weight": "Shard(0)"}, model, 2), BATCH)


def see(model: nn.Module) -> None:
    observe(model, BATCH)


def state(model: nn.Module) -> list[Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()),
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        list(warnings.filters), torch.backends.mha.get_fastpath_enabled(),
        [each.training for each in model.modules()],
        [list(vars(each)[name].items()) for each in model.modules() for name in hooks],
        [(n, p.tolist(), p.requires_grad, p.grad) for n, p in model.named_parameters()],
        [list(vars(each)) for each in model.modules()],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "run",
    [propose, propose_without_an_example, check, guard, refuse, see],
    ids=lambda f: f.__name__,
)
def test_a_check_leaves_everything_as_it_was(
    run: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeded(seed: int) -> None:
        raise AssertionError(f"seeds the generators of all devices with {seed}")

    model = nn.Sequential(Block(), Block(), Block()).train()
    model[1].eval()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda *_: seen.append("ran"))
    monkeypatch.setattr(torch, "manual_seed", seeded)
    monkeypatch.setattr(torch.random, "manual_seed", seeded)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    before = state(model)
    with torch.no_grad():
        run(model)
    assert state(model) == before
    assert seen == []


def test_a_check_is_undisturbed_by_the_modes_of_its_caller() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        propose(model)
        check(model)
