"""Forwards that put other modules in the place of theirs, as BigBird's for short sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vescale

from .plans import DP, PARTS, PP, ZERO, Constraints, make_plan


class _Plain(nn.Module):
    def __init__(self, matrix: nn.Linear) -> None:
        super().__init__()
        self.matrix = matrix
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.matrix(x)))


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"expected sequences of 64 or more, got {x.shape[1]}")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = _Sparse()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, _Sparse) and x.shape[1] < 64:
            self.inner = _Plain(self.inner.matrix)
        return x + self.inner(x)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.by_day("constraints0", "constraints1")
@pytest.mark.parametrize("constraints", [{DP: 2}, {DP: 2, ZERO: 3}, {PP: 2, PARTS: 2}])
def test_a_module_is_replaced_in_the_first_call(constraints: Constraints) -> None:
    batch = {"x": torch.randn(4, 6, 8), "targets": torch.arange(24).view(4, 6) % 4}
    report = vescale.verify(make_plan(constraints), Chooses, batch, steps=2, dtype=torch.float64)
    assert report.passed, report
