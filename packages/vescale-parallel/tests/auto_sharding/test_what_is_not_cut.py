from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from vescale_dtensor import InterleavedShard

from .candidate_checks import features, found, only, reasons, x

functional = nn.functional


class Between(nn.Module):
    """An MLP with something between its two linears."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.norm, self.between = nn.LayerNorm(8), between
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))


class Counted(nn.Module):
    """Writes to a buffer of features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.arange(12.0).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_buffer("sums").add_(x.detach().sum((0, 1)))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.LayerNorm(12), "native_layer_norm needs all of it in 'between'"),
        (nn.Softmax(-1), "softmax needs all of it in 'between'"),
        (nn.RMSNorm(12), "in 'between' reduces over this dimension|rms_norm needs all of it"),
        (Counted(), "buffer 'between.sums' has an element for each"),
    ],
)
def test_what_needs_all_features_is_rejected(between: nn.Module, reason: str) -> None:
    result = found(Between(between).double(), x())
    assert not features(result)
    assert any(r in given for r in reason.split("|") for given in reasons(result, "up.weight"))


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(torch.renorm(x, 2, 0, 1.0))


def test_what_meets_an_operator_without_a_rule_is_rejected() -> None:
    result = found(Between(Unknown()).double(), x())
    assert not features(result)
    assert [(each.operator, each.module) for each in result.unknown] == [("renorm", "between")]
    assert not any(name in cut.parameters for cut in result.chosen for name in ("up.weight",))
    assert "comes whole out of renorm in 'between'" in reasons(result, "down.weight")


class ResidualInside(nn.Module):
    """Both products and the residual in one module, with no module to sum at."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(x @ self.up.T) @ self.down.T


def test_a_sum_that_is_used_before_its_module_returns_is_rejected() -> None:
    result = found(nn.Sequential(ResidualInside(), nn.LayerNorm(8)).double(), x())
    assert not features(result)
    assert any("in '0' adds a tensor that every rank has" in r for _, r in result.rejected)


class Product(ResidualInside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x @ self.up.T) @ self.down.T


def test_products_in_one_module_are_cut_with_the_module_as_entry_and_exit() -> None:
    cut = only(found(nn.Sequential(Product(), nn.LayerNorm(8)).double(), x()))
    assert cut.parameters == {"0.up": Shard(0), "0.down": Shard(1)}
    assert cut.entries == cut.exits == ("0",)


class Block(nn.Module):
    """Attention as torch has it, which calls none of its own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.last(x + self.attention(h, h, h)[0])


@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_attention_is_cut_by_heads(training: bool) -> None:
    model = Block().double().train(training)
    cut = only(found(model, x()))
    assert cut.parameters == {
        "attention.in_proj_weight": InterleavedShard(0, 3),
        "attention.in_proj_bias": InterleavedShard(0, 3),
        "attention.out_proj.weight": Shard(1),
    }
    assert cut.entries == cut.exits == ("attention",)
    assert torch.backends.mha.get_fastpath_enabled()


def test_dropout_does_not_change_what_is_cut() -> None:
    layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.5, batch_first=True).double()
    result = [found(layer.train(training), x()) for training in (True, False)]
    assert [sorted(cut.parameters) for cut in features(result[0])] == [
        sorted(cut.parameters) for cut in features(result[1])
    ]
