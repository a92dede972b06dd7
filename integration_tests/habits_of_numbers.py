"""A transformer whose feed-forward layers read numbers of activations, and hand some over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import vescale

from .plans import Constraints
from .programs import Run

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 24, 4, 12
BRANCHES_AT = 20.0  # of a norm that is 24 on one device, and 17 of half the features or positions
LOSSES: list[Tensor] = []
NORMS: list[float] = []


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        parts = self.qkv(x_BSF).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


Look = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    norm_of_hidden: Any = None

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look = look
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attention(self.norm_1(x_BSF))
        hidden_BSF = F.gelu(self.up(self.norm_2(x_BSF)))
        return x_BSF + self.down(self.look(self, hidden_BSF))


class Model(nn.Module):
    def __init__(self, look: Look) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(look) for _ in range(2))

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSF = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return F.cross_entropy(self.head(x_BSF).flatten(0, 1), labels_BS.flatten())


def branches(block: Block, hidden_BSF: Tensor) -> Tensor:
    """Damp what is too large, by one number of all of it."""
    return hidden_BSF / 2 if hidden_BSF.norm() > BRANCHES_AT else hidden_BSF


def branches_on_an_item(block: Block, hidden_BSF: Tensor) -> Tensor:
    norm = hidden_BSF.detach().norm().item()
    return hidden_BSF * min(1.0, BRANCHES_AT / norm)


def logs(block: Block, hidden_BSF: Tensor) -> Tensor:
    block.norm_of_hidden = hidden_BSF.detach().norm().item()
    return hidden_BSF


def lists(block: Block, hidden_BSF: Tensor) -> Tensor:
    NORMS.append(float(hidden_BSF.detach().abs().mean()))
    return hidden_BSF


def converts(block: Block, hidden_BSF: Tensor) -> Tensor:
    block.norm_of_hidden = float(hidden_BSF.detach().numpy().max())
    return hidden_BSF


def converts_weights(block: Block, hidden_BSF: Tensor) -> Tensor:
    block.norm_of_hidden = float(np.abs(block.up.weight.detach().numpy()).max())
    return hidden_BSF


def counts(block: Block, hidden_BSF: Tensor) -> Tensor:
    block.norm_of_hidden = int((hidden_BSF > 0).sum())
    return hidden_BSF


def adds(block: Block, hidden_BSF: Tensor) -> Tensor:
    LOSSES.append(hidden_BSF.square().mean())
    return hidden_BSF


def guards(block: Block, hidden_BSF: Tensor) -> Tensor:
    assert not hidden_BSF.isnan().any()
    return hidden_BSF


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens_BS = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    return {"tokens_BS": tokens_BS, "labels_BS": tokens_BS.roll(-1, 1)}


def trained(look: Look, run: Run) -> None:
    """Take three steps; keep losses, numbers that were read, and parameters."""
    model, optimizer = started(look, run.constraints)
    LOSSES.clear()
    NORMS.clear()
    for step in range(3):
        loss = model(**run.part(batch_of(step)))
        loss = loss + sum(LOSSES, torch.zeros(()))
        run.keep(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers = (block.norm_of_hidden or 0.0 for block in model.blocks)
        run.keep(torch.tensor([*numbers, *NORMS], dtype=torch.float64))
        LOSSES.clear()
        NORMS.clear()
    run.finish(model)


def started(look: Look, constraints: Constraints | None) -> Any:
    torch.manual_seed(0)
    model = Model(look).double()
    if constraints is None:
        return model, SGD(model.parameters(), lr=0.1)
    plan = vescale.generate_plan(model, constraints, example_batch=batch_of(0))
    return vescale.parallelize(plan, model, lambda m: SGD(m.parameters(), lr=0.1))
