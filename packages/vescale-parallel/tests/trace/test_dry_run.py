"""Dry runs: equal blocks run once, and all are seen as a real run calls them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._trace.dry_run import dry_run_whole


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Mixed(nn.Module):
    """A stack whose first blocks are of another kind, as those of mixtures of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in (8, 8, 8, 6, 6, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Noted(list[int]):
    """Not put back behind a run, as a plain list is."""


def test_equal_blocks_run_once_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, run = Mixed(), torch.zeros(2, 4), Noted()
    names = [f"blocks.{number}" for number in range(7)]
    held = Block.forward

    def forward(self: Block, x: Tensor) -> Tensor:
        run.append(self.up.out_features)
        return held(self, x)

    monkeypatch.setattr(Block, "forward", forward)
    found = dry_run_whole(model, (x,), names)
    # The first and the last one besides: what they are given or return may be something else.
    assert run == [8, 8, 6, 6]
    real: dict[str, tuple[torch.Size, torch.Size]] = {}

    def note(fqn: str, _: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        real[fqn] = args[0].shape, output.shape

    for fqn in names:
        model.get_submodule(fqn).register_forward_hook(functools.partial(note, fqn))
    model(x)
    assert {fqn: (each.args[0].shape, each.output.shape) for fqn, each in found.items()} == real
