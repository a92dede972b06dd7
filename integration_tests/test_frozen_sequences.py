"""Models that are frozen, or trained in part, with activations sharded along the sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .experts import adamw
from .families import CONFIGS, VOCABULARY, InDouble, hugging_face
from .plans import DP, SEQUENCE, TP, ZERO, Constraints
from .programs import assert_right
from .training import whole

ROWS = 4
Batch = dict[str, Tensor]
IN_SEQUENCE: Constraints = {TP: 2, SEQUENCE: True}


def policy_model() -> nn.Module:
    return hugging_face("llama", "sdpa", **CONFIGS["llama"])


def logs_of(model: Any, input_ids: Tensor) -> Tensor:
    """Return a log-probability for every row."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    return F.log_softmax(logits, -1).gather(2, input_ids[:, 1:, None]).sum((1, 2))


class LowRank(nn.Module):
    """A frozen linear layer beside a narrow pair that is trained, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class Preferred(nn.Module):
    """A policy and its frozen reference in one module that returns the loss of DPO."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy_model()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        with torch.no_grad():
            self.policy.get_parameter("lm_head.weight").mul_(1.1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            before = logs_of(self.reference, both)
        now = logs_of(self.policy, both)
        kept, lost = (now - before).chunk(2)
        return -F.logsigmoid(0.1 * (kept - lost)).mean()


class Returned(nn.Module):
    """Returns a mean of a policy's log-probabilities, of which a part is trained."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.policy = policy_model()
        change(self.policy)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -F.logsigmoid(0.1 * logs_of(self.policy, chosen)).mean()


def low_rank(model: Any) -> None:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.mlp.down_proj = LowRank(layer.mlp.down_proj)


def last_layer(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)


def norms(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)


CHANGES: dict[str, Callable[[Any], object]] = {
    "low_rank": low_rank,
    "last_layer": last_layer,
    "norms": norms,
}


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (2, ROWS, 12), generator=generator)
    return {"chosen": ids[0], "rejected": ids[1]}


def trained(name: str, constraints: Constraints | None) -> list[Tensor]:
    """Train two steps; return losses and parameters."""
    torch.manual_seed(0)
    model: Any = (Preferred() if name == "preferred" else Returned(CHANGES[name])).double()
    optimizer, replicas, rank = None, 1, 0
    if constraints is None:
        optimizer = adamw(model)
    else:
        fields = {**constraints, "batch.global_size": ROWS}
        plan = vescale.generate_plan(model, fields, example_batch=batch_of(0))
        model, optimizer = vescale.parallelize(plan, model, adamw)
        replicas, rank = plan.data_parallel.size, vescale.data_parallel_rank(model)
    found: list[Tensor] = []
    for step in range(2):
        loss = model(**{name: x.chunk(replicas)[rank] for name, x in batch_of(step).items()})
        loss.backward()
        found += [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(loss.detach()).clone())
    return found + [whole(p).detach().clone() for p in model.parameters()]


def both(name: str, constraints: Constraints) -> tuple[list[Tensor], list[Tensor]]:
    with InDouble():
        return trained(name, constraints), trained(name, None)


def evaluated() -> tuple[list[Tensor], list[Tensor]]:
    """Return what a reference that was frozen before its plan says, and what one device says."""
    torch.manual_seed(0)
    alone = policy_model().double().eval().requires_grad_(False)
    example = {"input_ids": batch_of(0)["chosen"]}
    plan = vescale.generate_plan(alone, IN_SEQUENCE, example_batch=example)
    model = vescale.parallelize(plan, copy.deepcopy(alone))
    with torch.no_grad(), InDouble():
        ids = batch_of(1)["chosen"]
        return [whole(logs_of(model, ids))], [logs_of(alone, ids)]


@pytest.mark.slow
def test_a_frozen_reference_is_sharded_along_the_sequence(world2: World) -> None:
    for answers in world2.run(evaluated):
        assert_right(answers)


@pytest.mark.by_day("low_rank", "preferred")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHANGES, "preferred"])
def test_what_is_frozen_is_sharded_along_the_sequence(world2: World, name: str) -> None:
    for answers in world2.run(both, name, IN_SEQUENCE):
        assert_right(answers)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHANGES, "preferred"])
def test_what_is_frozen_on_four_ranks(world4: World, name: str) -> None:
    for answers in world4.run(both, name, {**IN_SEQUENCE, DP: 2, ZERO: 3}):
        assert_right(answers)
