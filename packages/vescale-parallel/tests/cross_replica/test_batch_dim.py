"""Which dim of a call's tensors is the batch, where the shapes of some of them mislead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vescale_parallel._cross_replica.borders import RowCoupling, Rows
from vescale_parallel._cross_replica.call_guard import RowGuard

ROWS_FIRST = Rows(0)
# Batches shorter and longer than the sequence.
SHAPES = [(3, 6), (6, 3)]


class Causal(nn.Module):
    """Attention over time, with what ``extra`` is for: positions, features of them, or a mask."""

    def __init__(self, *, over_rows: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 16)
        self.over_rows = over_rows

    def forward(self, ids: Tensor, extra: Tensor) -> Tensor:
        x_BSD, mask = self.tokens(ids), None
        if extra.dim() == 4:
            mask = extra
        else:
            x_BSD = x_BSD + (extra if extra.is_floating_point() else self.positions(extra))
        q, k, v = self.mix(x_BSD).unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).squeeze(1)
        loss = F.cross_entropy(self.head(y).flatten(0, 1), ids.flatten())
        return loss + y.mean((0, 1)).square().sum() if self.over_rows else loss


def extras(length: int) -> dict[str, Tensor]:
    return {
        "positions": torch.arange(length)[None],
        "features": torch.randn(1, length, 8),
        "mask": torch.ones(length, length).tril().bool()[None, None],
        "positions without rows": torch.arange(length),
    }


def coupling(model: nn.Module, *given: Any, known: Tensor | None = None) -> RowCoupling:
    guard = RowGuard(model, lambda mine: [mine])
    if known is not None:
        guard.is_rows_first = lambda tree: tree is known
    return guard.coupling(model, given, {})[0]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, shape) for name in ("positions", "features", "mask") for shape in SHAPES),
        ("positions", (5, 5)),
        ("mask", (5, 5)),
    ],
)
def test_what_all_rows_share_has_no_rows(name: str, shape: tuple[int, int]) -> None:
    found = coupling(Causal(), torch.randint(16, shape), extras(shape[1])[name])
    assert (found.given, found.regions) == ((ROWS_FIRST, None), {})


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_depend_on_each_other_are_not_taken_for_time(shape: tuple[int, int]) -> None:
    ids, shared = torch.randint(16, shape), extras(shape[1])
    found = coupling(Causal(over_rows=True), ids, shared["positions"])
    assert (found.given, [*found.regions]) == ((ROWS_FIRST, None), [""])


@pytest.mark.parametrize("over_rows", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_positions_that_might_be_targets_are_refused(
    shape: tuple[int, int], over_rows: bool
) -> None:
    ids, extra = torch.randint(16, shape), extras(shape[1])["positions without rows"]
    model = Causal(over_rows=over_rows)
    with pytest.raises(ValueError, match=r"cannot be told .* positions of \(1, time\)"):
        coupling(model, ids, extra)
    found = coupling(model, ids, extra, known=ids)
    assert (found.given, [*found.regions]) == ((ROWS_FIRST, None), [""] if over_rows else [])
