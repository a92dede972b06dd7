"""Models that checkpoint blocks themselves, on ranks that share sequences: gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_testing import World

from .contexts import Block, ByHand, batch_of, build
from .experts import adamw
from .families import InDouble
from .plans import CP, Constraints, make_plan
from .training import whole


class Attention(nn.Module):
    """A block's first half, as a module of its own that a checkpoint may be around."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        return self.inner(x_BSF, cos_SD, sin_SD)


class Checkpointed(nn.Module):
    """A block that runs itself again in backward, in parts, and attends in a module in it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.attention, self.out, self.reentrant = Attention(), nn.Linear(32, 32), reentrant

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        made: Any = checkpoint(self.attention, x_BSF, cos_SD, sin_SD, use_reentrant=self.reentrant)
        return x_BSF + self.out(made)


class CheckpointedWithin(Block):
    """A block that attends, and has a checkpoint between itself and its attention."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        made: Any = checkpoint(
            super().forward, x_BSF, cos_SD, sin_SD, use_reentrant=self.reentrant
        )
        return made


def made(kind: str, how: str) -> nn.Module:
    model = build("gpt2" if kind == "gpt2" else "by_hand")
    if isinstance(model, ByHand) and kind == "by_hand":
        torch.manual_seed(1)
        model.blocks = nn.ModuleList(Checkpointed(reentrant=how == "reentrant") for _ in range(2))
    if isinstance(model, ByHand) and kind == "within":
        model.blocks = nn.ModuleList(
            CheckpointedWithin(reentrant=how == "reentrant") for _ in range(2)
        )
    return model.double()


def on_rank_trained(kind: str, plan: Constraints, how: str) -> dict[str, Tensor]:
    """Return losses and gradients of a step of two calls, whose backward comes after both."""
    model: Any = made(kind, how)
    if plan:
        model, _ = vescale.parallelize(make_plan(plan), model, adamw)
    if kind == "gpt2":
        options = {"use_reentrant": how == "reentrant"}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    losses: list[Tensor] = []
    with InDouble():  # the loss, too, which is a sum of ranks' parts
        # As many positions on one rank, of other sequences.
        for step, length in enumerate((13, 12)):
            output = model(**batch_of(step, length, ""))
            losses.append(output if isinstance(output, Tensor) else output.loss)
        (losses[0] + losses[1]).backward()
    found = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    return {"losses": torch.stack([loss.detach() for loss in losses]), **found}


@pytest.mark.by_day("gpt2-by-hooks", "by_hand-reentrant", "by_hand-by-hooks")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["reentrant", "by-hooks"])
@pytest.mark.parametrize("kind", ["gpt2", "by_hand"])
def test_blocks_that_checkpoint_themselves_attend_to_all_of_the_sequence_again(
    world2: World, kind: str, how: str
) -> None:
    expected = on_rank_trained(kind, {}, how)
    for found in world2.run(on_rank_trained, kind, {CP: 2}, how):
        for name, x in expected.items():
            torch.testing.assert_close(
                found[name], x, rtol=0, atol=1e-12 * (float(x.abs().max()) + 1e-3), msg=name
            )


def on_rank_refused(how: str) -> str:
    model, _ = vescale.parallelize(make_plan({CP: 2}), made("within", how), adamw)
    with pytest.raises(ValueError, match="context_parallel") as error:
        model(**batch_of(0, 12, ""))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reentrant", "by-hooks"])
def test_a_checkpoint_between_a_module_and_its_attention_is_refused(
    world2: World, how: str
) -> None:
    for said in world2.run(on_rank_refused, how):
        assert "checkpoint the module, or use recompute='full'" in said
