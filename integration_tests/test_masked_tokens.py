"""Models that mask their input themselves, or are given it masked: one device's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, ZERO, Constraints
from .programs import Block, Program, Run, right

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "accumulated": {DP: 2, "batch.gradient_accumulation": 2},
}
ROWS, LENGTH, WIDTH = 8, 6, 8


class Autoencoder(nn.Module):
    """Hides patches that it draws, as masked autoencoders do, and is judged by these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.hidden = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.decode = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        num_rows, length, width = x.shape
        num_kept = length // 2
        order = torch.rand(num_rows, length).argsort(1)
        back = order.argsort(1)
        x = x.gather(1, order[:, :num_kept, None].expand(-1, -1, width))
        for block in self.blocks:
            x = block(x)
        x = torch.cat([x, self.hidden.repeat(num_rows, length - num_kept, 1)], 1)
        x = x.gather(1, back[..., None].expand(-1, -1, width))
        mask = torch.ones(num_rows, length, dtype=x.dtype)
        mask[:, :num_kept] = 0
        mask = mask.gather(1, back)
        loss = (self.decode(x) - batch["x"]).square().mean(-1)
        return (loss * mask).sum() / mask.sum()


def hidden_patches(run: Run) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = ROWS, LENGTH, WIDTH
    given = [{"x": torch.randn(shape, generator=generator, dtype=torch.float64)} for _ in range(3)]
    run.train(Autoencoder(), given=given)


def _protein_model() -> Any:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.EsmConfig(
        vocab_size=33, mask_token_id=32, pad_token_id=1, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, max_position_embeddings=40,
        position_embedding_type="rotary", token_dropout=True, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.EsmForMaskedLM(config)


def masked_proteins(run: Run) -> None:
    """ESM-2 divides by the share of tokens that are not masked: rows of masks alone are nan."""
    generator = torch.Generator().manual_seed(1)
    model, optimizer = run.start(_protein_model())
    for _ in range(3):
        ids = torch.randint(4, 24, (ROWS, 12), generator=generator)
        is_masked = torch.rand(ids.shape, generator=generator) < 0.2
        is_masked[:, 3] = True
        batch = {
            "input_ids": ids.masked_fill(is_masked, 32),
            "labels": ids.masked_fill(~is_masked, -100),
        }
        loss = model(**run.part(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


@pytest.mark.by_day("hidden_patches-dp")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plan"),
    [
        (hidden_patches, "dp"),
        (masked_proteins, "zero3"),
        (masked_proteins, "accumulated"),
    ],
)
def test_masked_tokens_give_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])
