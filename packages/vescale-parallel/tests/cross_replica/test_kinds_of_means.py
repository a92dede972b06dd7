"""Losses of torch that are means over rows, and losses that are put together in vectors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._cross_replica.call_guard import RowGuard


class Trained(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(6, 6), loss
        self.weights = nn.Parameter(torch.zeros(2))
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, self.layer(x), y)


Loss = Callable[[Trained, Tensor, Tensor], Tensor]


def losses(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(x, y), F.cross_entropy(x, y.argmax(-1)), x.square().mean()])


def signs(y: Tensor) -> Tensor:
    return torch.sign(y - 0.15)


def by_uncertainty(model: Trained, x: Tensor, y: Tensor) -> Tensor:
    """Kendall et al., "Multi-task learning using uncertainty", 2018, in a vector."""
    return (torch.exp(-model.weights) * losses(x, y)[:2] + model.weights).sum()


MEANS: dict[str, Loss] = {
    "probabilities": lambda _, x, y: F.cross_entropy(x, y),
    "smoothed": lambda _, x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(x, y),
    "weighted": lambda _, x, y: F.cross_entropy(x, target=y, weight=torch.arange(1.0, 7).double()),
    "margin": lambda _, x, y: F.multi_margin_loss(x, y.argmax(-1)),
    "margins": lambda _, x, y: F.multilabel_margin_loss(x, (y > 0.15).long()),
    "soft margin": lambda _, x, y: F.soft_margin_loss(x, signs(y)),
    "hinge": lambda _, x, y: F.hinge_embedding_loss(x, signs(y)),
    "poisson": lambda _, x, y: F.poisson_nll_loss(x, y),
    "gaussian": lambda _, x, y: F.gaussian_nll_loss(x, y, x.exp()),
    "einsum": lambda _, x, y: torch.einsum("bi,bi->", x, y) / x.size(0),
    "summed": lambda _, x, y: losses(x, y).sum(),
    "averaged": lambda _, x, y: losses(x, y).mean(),
    "chosen": lambda _, x, y: losses(x, y)[:2].sum() - losses(x, y)[2],
    "constants": lambda _, x, y: (losses(x, y) * torch.tensor([1.0, 2, 0.5])).sum(),
    "contracted": lambda _, x, y: losses(x, y) @ torch.tensor([1.0, 2, 0.5]).double(),
    "uncertainty": by_uncertainty,
    "softmax": lambda model, x, y: (model.weights.softmax(0) * losses(x, y)[:2]).sum(),
    "a buffer": lambda model, x, y: F.mse_loss(x, y) * model.scale,
}
OTHERS: dict[str, Loss] = {
    "the largest": lambda _, x, y: losses(x, y).max(),
    "a product": lambda _, x, y: losses(x, y).prod(),
    "a norm": lambda _, x, y: torch.linalg.vector_norm(losses(x, y)),
    "squares": lambda _, x, y: (losses(x, y) * losses(x, y)).sum(),
    "by their size": lambda _, x, y: (losses(x, y).detach().softmax(0) * losses(x, y)).sum(),
    "a sum of rows": lambda _, x, y: torch.stack(
        [F.mse_loss(a, b) for a, b in zip(x, y, strict=True)]
    ).sum(),
    "picked": lambda _, x, y: F.cross_entropy(x[y[:, 0] > 0.15], y[y[:, 0] > 0.15]),
}


def _regions(loss: Loss) -> set[str]:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.rand(8, 6, dtype=torch.float64)
    model = Trained(loss).double()
    guard = RowGuard(model, lambda mine: [mine])
    with torch.enable_grad():
        return {*guard.coupling(model, (x, y.softmax(-1)), {})[0].regions}


@pytest.mark.parametrize("name", MEANS)
def test_means_over_rows_need_no_other_rows(name: str) -> None:
    assert not _regions(MEANS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_linear_in_means_needs_all_rows(name: str) -> None:
    assert _regions(OTHERS[name])
