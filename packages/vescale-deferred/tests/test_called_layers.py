"""Constructors that run their own layers, against ordinary construction."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from vescale_deferred import DeferredWarning, deferred_init, materialize

Check = Callable[[Callable[[], nn.Module]], Any]


class Called(nn.Module):
    """Runs a layer twice while it is constructed, and keeps what came out."""

    def __init__(self, layer: nn.Module, *batch: Tensor) -> None:
        super().__init__()
        self.layer = layer
        for number in range(2):
            found = layer(*batch)
            kept = found if isinstance(found, Tensor) else found[0]
            self.register_buffer(f"result{number}", kept.detach())


def _images() -> Tensor:
    return torch.rand(2, 3, 8, 8)


def _fake_quantized() -> nn.Module:
    return Called(torch.ao.quantization.FusedMovingAvgObsFakeQuantize(), torch.rand(4))


def _half_real_statistics() -> nn.Module:
    layer = nn.BatchNorm1d(3)
    layer.running_mean = torch.tensor([1.0, 2.0, 3.0])
    layer.running_var = torch.tensor([3.0, 2.0, 1.0])
    return Called(layer, torch.rand(4, 3))


_KEEPING_STATISTICS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Called(nn.BatchNorm2d(3), _images()),
    "without momentum": lambda: Called(nn.BatchNorm2d(3, momentum=None), _images()),
    "without statistics": lambda: Called(nn.BatchNorm2d(3, track_running_stats=False), _images()),
    "in evaluation": lambda: Called(nn.BatchNorm2d(3).eval(), _images()),
    "half real": _half_real_statistics,
    "instance norm": lambda: Called(
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True), _images()
    ),
    "behind a convolution": lambda: Called(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), _images()
    ),
    "bfloat16": lambda: Called(nn.BatchNorm2d(3).bfloat16(), _images().bfloat16()),
    "spectral norm": lambda: Called(
        parametrizations.spectral_norm(nn.Linear(4, 5)), torch.rand(2, 4)
    ),
    "renormalised embedding": lambda: Called(
        nn.Embedding(5, 3, max_norm=0.5), torch.tensor([1, 2])
    ),
    "bag of embeddings": lambda: Called(nn.EmbeddingBag(5, 3, mode="max"), torch.tensor([[1, 2]])),
    "noise of rrelu": lambda: Called(nn.RReLU(), torch.randn(9)),
    "fake quantization": _fake_quantized,
}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", _KEEPING_STATISTICS)
def test_what_layers_write_when_they_run_is_kept(name: str, same_as_ordinary: Check) -> None:
    same_as_ordinary(_KEEPING_STATISTICS[name])
