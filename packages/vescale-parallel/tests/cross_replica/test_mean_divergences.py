"""Divergences that are divided by their first dim are means over rows where that is the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.call_guard import RowGuard


class Student(nn.Module):
    """Has the divergence from what it is to say."""

    def __init__(self, *, is_transposed: bool = False, picks: bool = False) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(5, 6), nn.KLDivLoss(reduction="batchmean")
        self.is_transposed, self.picks = is_transposed, picks

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.layer(x).log_softmax(-1)
        if self.is_transposed:
            found, y = found.transpose(0, 1), y.transpose(0, 1)
        if self.picks:
            found, y = found[x[:, 0] > 0.5], y[x[:, 0] > 0.5]
        return 9 * self.loss(found, y.softmax(-1))


def _regions(model: nn.Module) -> set[str]:
    torch.manual_seed(0)
    x, y = torch.rand(8, 5, dtype=torch.float64), torch.rand(8, 6, dtype=torch.float64)
    found, _ = RowGuard(model.double(), lambda mine: [mine]).coupling(model, (x, y), {})
    return {*found.regions}


def test_a_divergence_divided_by_rows_is_a_mean_over_rows() -> None:
    assert not _regions(Student())


@pytest.mark.parametrize("options", [{"is_transposed": True}, {"picks": True}])
def test_a_divergence_divided_by_features_or_by_what_is_picked_is_none(
    options: dict[str, bool],
) -> None:
    assert _regions(Student(**options))
