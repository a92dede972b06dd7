"""Losses for which forward itself differentiates logits that are sharded by vocabulary."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .experts import adamw
from .families import CONFIGS, VOCABULARY, InDouble, hugging_face
from .plans import SEQUENCE, TP, Constraints
from .programs import assert_right
from .training import whole

Kind = Literal["penalty", "adversary"]
PLANS: dict[str, Constraints] = {"tp": {TP: 2}, "tp-sequence": {TP: 2, SEQUENCE: True}}


class Smoothed(nn.Module):
    """Differentiates its loss by embeddings: to penalize the gradient, or to move them by it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.model: Any = hugging_face("llama", "eager", **CONFIGS["llama"])

    def loss_of(self, embedded: Tensor, input_ids: Tensor) -> Tensor:
        logits = self.model(inputs_embeds=embedded, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = self.model.get_input_embeddings()(input_ids)
        loss = self.loss_of(embedded, input_ids)
        is_penalty = self.kind == "penalty"
        (grad,) = torch.autograd.grad(loss, embedded, create_graph=is_penalty, retain_graph=True)
        if is_penalty:
            return loss + grad.square().sum()
        moved = embedded + 0.05 * grad / grad.norm(dim=(1, 2), keepdim=True)
        return loss + self.loss_of(moved, input_ids)


def trained(kind: Kind, constraints: Constraints | None) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = Smoothed(kind).double()
    ids = torch.randint(3, VOCABULARY, (2, 4, 12))
    if constraints is None:
        optimizer = adamw(model)
    else:
        plan = vescale.generate_plan(model, constraints, example_batch={"input_ids": ids[0]})
        model, optimizer = vescale.parallelize(plan, model, adamw)
    losses: list[Tensor] = []
    for batch in ids:
        loss = model(input_ids=batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss.detach()))
    return losses + [whole(p).detach().clone() for p in model.parameters()]


def both(kind: Kind, constraints: Constraints) -> tuple[list[Tensor], list[Tensor]]:
    with InDouble():
        return trained(kind, constraints), trained(kind, None)


@pytest.mark.by_day("tp-penalty", "tp-sequence-adversary")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["penalty", "adversary"])
@pytest.mark.parametrize("plan", PLANS)
def test_forward_differentiates_sharded_logits_by_what_it_made(
    world2: World, plan: str, kind: Kind
) -> None:
    for answers in world2.run(both, kind, PLANS[plan]):
        assert_right(answers)
