"""Activations and their gradients, of which every rank computes its part: nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from vescale_dtensor import DTensor, distribute_tensor, emulate, strict

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.full((4,), 0.2, dtype=x.dtype)),
    "hardtanh": F.hardtanh,
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "silu": F.silu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "rsub": lambda x: torch.rsub(x, x.square(), alpha=2),
    "polar": lambda x: torch.polar(x.abs(), x).abs(),
    "complex": lambda x: torch.complex(x, x.square()).abs(),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients_stay_on_parts(name: str, dim: int) -> None:
    plain = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(plain.detach(), mesh, [Shard(dim)]).requires_grad_()
        with strict():
            result = ACTIVATIONS[name](x)
            (grad,) = torch.autograd.grad(result.square().sum(), x)
        assert isinstance(result, DTensor)
        assert isinstance(grad, DTensor)
        assert result.placements == grad.placements == (Shard(dim),)
        expected = ACTIVATIONS[name](plain)
        (of_plain,) = torch.autograd.grad(expected.square().sum(), plain)
        # Kernels for some lengths compute exponentials otherwise: a rounding of float64.
        torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad.full_tensor(), of_plain, rtol=1e-12, atol=1e-12)
