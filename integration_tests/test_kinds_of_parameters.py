"""Parameters of every dtype, shape and order in memory train as on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import vescale
from vescale_testing import World

from .plans import TP, Constraints
from .programs import DATA, PIPELINE, WIDTH, Run, right
from .test_bad_input import check

PLANS: dict[str, Constraints] = {**DATA, "tp": {TP: 2}, "pp": PIPELINE}
HALF = WIDTH // 2 + 1


class Complex(nn.Module):
    """Mixes frequencies, as layers of Fourier neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HALF, HALF, dtype=torch.complex128) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=WIDTH)


class Quantized(nn.Module):
    """A frozen matrix of a narrow dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.randint(0, 4, (WIDTH, WIDTH)).to(dtype)
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * 0.1)


class Transposed(nn.Module):
    """A parameter that is no contiguous tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64).t() * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


class Scalars(nn.Module):
    """A parameter of one number, and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.nothing.sum()


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
        weight = self.conv.weight.detach().contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, 2, WIDTH // 4)).reshape(-1, WIDTH)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "complex": Complex,
    "int8": functools.partial(Quantized, torch.int8),
    "float8_e4m3fn": functools.partial(Quantized, torch.float8_e4m3fn),
    "float8_e5m2": functools.partial(Quantized, torch.float8_e5m2),
    "int16": functools.partial(Quantized, torch.int16),
    "uint16": functools.partial(Quantized, torch.uint16),
    "transposed": Transposed,
    "scalars": Scalars,
    "channels_last": ChannelsLast,
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        self.layer = KINDS[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) + self.layer(x)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block(kind) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def double(self) -> Any:
        """Keep the dtypes, which are what is tested."""
        return self

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), batch["y"])


def adamw(model: nn.Module) -> Optimizer:
    return AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def trained(kind: str, run: Run) -> None:
    run.train(Model(kind), adamw)


@pytest.mark.by_day("zero3-float8_e4m3fn", "pp-complex", "zero2-uint16", "pp-float8_e5m2")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_parameters_of_all_kinds(world2: World, plan: str, kind: str) -> None:
    right(world2, functools.partial(trained, kind), PLANS[plan])


class TiedByData(Model):
    def __init__(self) -> None:
        super().__init__("scalars")
        self.blocks[3].up.weight.data = self.blocks[0].up.weight.data


class TiedByViews(Model):
    def __init__(self) -> None:
        super().__init__("scalars")
        self.blocks[3].up.weight = nn.Parameter(self.blocks[0].up.weight.data)


def start(constraints: Constraints, tied: Callable[[], Model], *, deferred: bool) -> None:
    Run(constraints).start(vescale.deferred_init(tied) if deferred else tied())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("tied", [TiedByData, TiedByViews])
@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_parameters_that_are_tied_by_their_memory_are_refused(
    world2: World, plan: str, tied: Callable[[], Model], deferred: bool
) -> None:
    message = r"'blocks.0.up.weight' is trained, and 'blocks.3.up.weight' is another tensor in"
    refused = functools.partial(start, deferred=deferred)
    check(world2, ValueError, message, refused, PLANS[plan], tied)
