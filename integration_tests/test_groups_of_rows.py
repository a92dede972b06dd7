"""Losses over groups of rows, the answers to one prompt, as reinforcement learning has them."""

from __future__ import annotations

import warnings
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning
from vescale_testing import World

from .experts import adamw
from .families import CONFIGS, VOCABULARY, InDouble, hugging_face
from .plans import CP, DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .programs import assert_right
from .test_bad_input import check
from .training import whole

GROUP, ROWS, LENGTH = 8, 16, 12
Kind = Literal["tokens", "rows", "entropy"]
PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "cp": {CP: 2},
}


class Answers(nn.Module):
    """A policy that returns its loss; its code runs on whole groups of answers only.

    Args:
        kind: What the loss is a mean over: all tokens that count, rows, or tokens of which the
            policy is least sure, which a mask of booleans picks.
        group: How many answers there are to a prompt.
    """

    def __init__(self, kind: Kind, group: int = GROUP) -> None:
        super().__init__()
        self.kind, self.group = kind, group
        self.policy = hugging_face("llama", "sdpa", **CONFIGS["llama"])

    def forward(self, input_ids: Tensor, rewards: Tensor, before: Tensor, mask: Tensor) -> Tensor:
        logits_BSV = self.policy(input_ids=input_ids, use_cache=False).logits[:, :-1]
        logs_BS = F.log_softmax(logits_BSV, -1).gather(2, input_ids[:, 1:, None]).squeeze(2)
        of_groups = rewards.view(-1, self.group)
        spread = of_groups - of_groups.mean(1, keepdim=True)
        advantage = (spread / (of_groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        ratio = (logs_BS - before).exp()
        losses = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if self.kind == "rows":
            return ((losses * mask).sum(1) / mask.sum(1)).mean()
        if self.kind == "entropy":
            mask = mask * (logs_BS < logs_BS[mask.bool()].median())
        return (losses * mask).sum() / mask.sum()


def build(kind: Kind, group: int = GROUP) -> nn.Module:
    torch.manual_seed(0)
    model = Answers(kind, group).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = ROWS, LENGTH - 1
    keep = torch.rand(shape, generator=generator) < torch.linspace(0.3, 0.9, ROWS)[:, None]
    keep[:, 0] = True
    return {
        "input_ids": torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator),
        "rewards": torch.randn(ROWS, generator=generator, dtype=torch.float64),
        "before": -4 * torch.rand(shape, generator=generator, dtype=torch.float64),
        "mask": keep.double(),
    }


def answered(
    kind: Kind, constraints: Constraints | None, *, evaluates: bool, group: int = GROUP
) -> list[Tensor]:
    """Train two steps; return losses and parameters."""
    model, optimizer = build(kind, group), None
    replicas, rank = 1, 0
    if constraints is None:
        optimizer = adamw(model)
    else:
        fields = {**constraints, "batch.global_size": ROWS}
        plan = vescale.generate_plan(model, fields, example_batch=batch_of(0))
        model, optimizer = vescale.parallelize(plan, model, adamw)
        replicas, rank = plan.data_parallel.size, vescale.data_parallel_rank(model)
    found: list[Tensor] = []
    for step in range(2):
        part = {name: x.chunk(replicas)[rank] for name, x in batch_of(step).items()}
        if evaluates:
            with torch.no_grad():
                found.append(whole(model(**part)).clone())
        loss = model(**part)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(loss.detach()).clone())
    return found + [whole(p).detach().clone() for p in model.parameters()]


def both(
    kind: Kind, constraints: Constraints, evaluates: bool = False, group: int = GROUP
) -> tuple[list[Tensor], list[Tensor]]:
    with InDouble(), warnings.catch_warnings():
        # What a mask of booleans indexes is gathered; that is all there is to say.
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=GatherWarning)
        under = answered(kind, constraints, evaluates=evaluates, group=group)
        return under, answered(kind, None, evaluates=evaluates, group=group)


@pytest.mark.by_day("tokens-dp", "tokens-tp-sequence", "tokens-cp", "rows-zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_groups_of_answers_are_compared_within_forward(
    world2: World, kind: Kind, plan: str
) -> None:
    for answers in world2.run(both, kind, PLANS[plan]):
        assert_right(answers)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "cp"])
def test_a_mask_of_booleans_picks_tokens_of_groups(world2: World, plan: str) -> None:
    for answers in world2.run(both, "entropy", PLANS[plan]):
        assert_right(answers)


@pytest.mark.slow
def test_two_ranks_share_a_group(world2: World) -> None:
    for answers in world2.run(both, "tokens", PLANS["dp"], False, ROWS):
        assert_right(answers)


@pytest.mark.slow
def test_groups_are_compared_in_an_evaluation_before_any_training(world2: World) -> None:
    for answers in world2.run(both, "tokens", PLANS["dp"], True):
        assert_right(answers)


@pytest.mark.by_day("dp-and-tp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{DP: 2, TP: 2}, {DP: 2, CP: 2}], ids=["dp-and-tp", "dp-and-cp"])
def test_groups_on_four_ranks(world4: World, plan: Constraints) -> None:
    for answers in world4.run(both, "tokens", plan):
        assert_right(answers)


@pytest.mark.slow
def test_a_pipeline_says_that_rows_of_a_group_depend_on_each_other(world2: World) -> None:
    message = "2 pipeline stages: rows of the batch depend on each other"
    check(world2, ValueError, message, both, "tokens", {PP: 2, PARTS: 2})


@pytest.mark.slow
def test_sequence_says_what_to_write_instead_of_a_mask_that_indexes(world2: World) -> None:
    message = r"asks for values \(aten.nonzero.default\). Where a mask of booleans indexes"
    check(world2, ValueError, message, both, "entropy", PLANS["tp-sequence"])
