"""Hooks of blocks that are given masks: of flags, and of numbers some of which are infinite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale

from .plans import CP, SEQUENCE, TP, Constraints
from .training import whole

ROWS, LENGTH, WIDTH, HEADS = 2, 10, 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor, mask_BHSS: Tensor) -> Tensor:
        normed_BSF = self.norm(x_BSF)
        of_heads = [
            layer(normed_BSF).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        found = F.scaled_dot_product_attention(*of_heads, attn_mask=mask_BHSS)
        x_BSF = x_BSF + self.out(found.transpose(1, 2).flatten(-2))
        return x_BSF + self.down(F.gelu(self.up(x_BSF)))


class Masked(nn.Module):
    """Blocks that are given what they may attend to: as flags, or as numbers to be added."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids_BS: Tensor) -> Tensor:
        length = ids_BS.shape[1]
        mask_BHSS = torch.ones(length, length, dtype=torch.bool, device=ids_BS.device).tril()
        mask_BHSS = mask_BHSS[None, None].expand(len(ids_BS), 1, -1, -1)
        if self.adds:
            mask_BHSS = torch.zeros_like(mask_BHSS, dtype=torch.float64).masked_fill(
                ~mask_BHSS, -torch.inf
            )
        x_BSF = self.embed(ids_BS)
        for block in self.blocks:
            x_BSF = block(x_BSF, mask_BHSS)
        return F.cross_entropy(self.head(x_BSF)[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())


def seen(adds: bool, constraints: Constraints | None) -> list[Tensor]:
    """Return what hooks before and behind blocks are given, and the gradients."""
    torch.manual_seed(0)
    model = Masked(adds).double()
    ids_BS = torch.randint(32, (ROWS, LENGTH))
    if constraints is not None:
        plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=(ids_BS,))
        model = vescale.parallelize(plan, model)
    found: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Any = None) -> None:
        given = args if output is None else (*args, output)
        found.extend(whole(x).detach().clone() for x in given)

    for block in model.blocks:
        block.register_forward_pre_hook(note)
        block.register_forward_hook(note)
    for _ in range(2):
        model(ids_BS).backward()
    found += [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("adds", [False, True], ids=["flags", "numbers"])
@pytest.mark.parametrize("plan", [{CP: 2}, {TP: 2}, {TP: 2, SEQUENCE: True}], ids=str)
def test_hooks_see_whole_masks(plan: Constraints, adds: bool) -> None:
    expected = seen(adds, None)
    for found in vescale.emulate(seen, 2, args=(adds, plan)):
        for one, other in zip(found, expected, strict=True):
            # Float64, summed in another order.
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
