"""Norms over an axis that is sharded, of one tensor or of features and a gate of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._auto_sharding.candidate import Candidate, Whole
from vescale_parallel._auto_sharding.find_candidates import find_candidates
from vescale_parallel._auto_sharding.groups import groups_of_cuts

from .masked_ranks import worst_error

Call = Callable[["Norm", Tensor, Tensor], Tensor]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(12))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, eps: float = 1e-6, gate: Tensor | None = None) -> Tensor:
        gate = self.kept if gate is None else gate
        x = x if gate is None else x * F.silu(gate)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Block(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.before, self.up, self.inner = nn.LayerNorm(8), nn.Linear(8, 24), Norm()
        self.down, self.call = nn.Linear(12, 8), call

    def forward(self, x: Tensor) -> Tensor:
        features, gate = self.up(self.before(x)).chunk(2, -1)
        return x + self.down(self.call(self.inner, features, gate))


def kept(norm: Norm, features: Tensor, gate: Tensor) -> Tensor:
    norm.kept = gate
    return norm(features)


CALLS: dict[str, Call] = {
    "one": lambda norm, x, gate: norm(x) * gate,
    "by position": lambda norm, x, gate: norm(x, 1e-6, gate),
    "by name": lambda norm, x, gate: norm(x, gate=gate),
    "whole gate": lambda norm, x, gate: norm(torch.ones(1).double(), gate=gate) * x,
    "kept": kept,
}


def blocks(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(CALLS[name]), Block(CALLS[name])).double()


def batch() -> Tensor:
    return torch.randn(2, 3, 8, dtype=torch.float64)


def candidates(model: nn.Module) -> list[Candidate]:
    found = find_candidates(model, batch(), 2).chosen
    return [cut for cut in found if "0.up.weight" in cut.parameters]


@pytest.mark.parametrize(
    ("name", "others", "marks"),
    [
        ("one", (), {""}),
        ("by position", (2,), {"", ":gate"}),
        ("by name", ("gate",), {"", ":gate"}),
    ],
)
def test_what_a_norm_is_called_with_is_gathered(
    name: str, others: tuple[int | str, ...], marks: set[str]
) -> None:
    (cut,) = candidates(model := blocks(name))
    assert cut.whole == {"0.inner": Whole(2, others)}
    (group,) = groups_of_cuts(model, [cut])
    assert group.moves.keys() == {f"0.inner.<whole{each}>" for each in marks}
    rows = batch()
    assert worst_error(model, lambda each: each(rows), cut) < 1e-9
    fewer = replace(cut, whole={"0.inner": replace(cut.whole["0.inner"], dim=1)})
    assert worst_error(model, lambda each: each(rows), fewer) > 1e-3


@pytest.mark.parametrize("name", ["kept", "whole gate"])
def test_a_norm_of_what_it_is_not_called_with_stays_whole(name: str) -> None:
    assert not candidates(blocks(name))
