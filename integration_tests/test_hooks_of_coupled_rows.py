"""Hooks by which a model keeps what a layer returned, where the rows of a batch meet."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, TP
from .programs import DATA, WIDTH, Block, Program, Run, right

Batch = Mapping[str, Tensor]


class Hooking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)
        self.block.register_forward_hook(self.keep)

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        raise NotImplementedError


class Centering(Hooking):
    """Keeps the running mean of what the layer returns, and takes it off, or only keeps it."""

    center: Tensor

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.is_read = is_read
        self.register_buffer("center", torch.zeros(WIDTH))

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        self.center.mul_(0.5).add_(0.5 * returned.detach().mean(0))

    def forward(self, batch: Batch) -> Tensor:
        x = self.block(batch["x"])
        return F.mse_loss(self.head(x - self.center if self.is_read else x), batch["y"])


class Scaling(Hooking):
    """Divides by the running mean of magnitudes, a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.magnitude = 1.0

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        self.magnitude = 0.5 * self.magnitude + 0.5 * returned.detach().abs().mean().item()

    def forward(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.head(self.block(batch["x"]) / self.magnitude), batch["y"])


class Correlated(Hooking):
    """Penalizes correlations of features over the rows, those that the hook kept."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        self.features.append(returned)

    def forward(self, batch: Batch) -> Tensor:
        loss = F.mse_loss(self.head(self.block(batch["x"])), batch["y"])
        features = self.features.pop()
        return loss + 0.01 * (features.T @ features / len(features)).square().mean()


class Tracked(Block):
    """Tracks the mean of what it returns itself, by a hook on itself."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_forward_hook(self.track)

    def track(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        self.center.mul_(0.5).add_(0.5 * returned.detach().mean(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.center


class OfTracked(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.head = block, nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.head(self.block(batch["x"])), batch["y"])


class Whitening(OfTracked):
    """Replaces what a layer returns by what is left of it without the mean over rows."""

    def __init__(self) -> None:
        super().__init__(Block())
        self.block.register_forward_hook(self.whiten, with_kwargs=True)

    def whiten(
        self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any], returned: Tensor
    ) -> Tensor:
        assert len(given) + len(named) == 1
        return returned - returned.mean(0)


class BehindNorm(OfTracked):
    """Keeps a mean of what a batch norm returns, in which rows meet without the hook."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block()))
        assert isinstance(self.block, nn.Sequential)
        self.block[1].register_forward_hook(self.keep)
        self.register_buffer("center", torch.zeros(WIDTH))

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        self.center = 0.5 * self.center + 0.5 * returned.detach().square().exp().mean(0)


class Centered(nn.Module):
    """Has a hook before a layer: takes the mean over rows off, and tracks it."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("center", torch.zeros(WIDTH))
        self.head.register_forward_pre_hook(self.take_off)

    def take_off(self, _: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        mean = given[0].mean(0)
        self.center.mul_(0.5).add_(0.5 * mean.detach())
        return (given[0] - mean,)

    def forward(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.head(self.block(batch["x"])), batch["y"])


def correlation(features: Tensor) -> Tensor:
    return 0.01 * (features.T @ features / len(features)).square().mean()


class Given(nn.Module):
    """Penalizes correlations of what a layer is given, which a hook behind it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.features = torch.zeros(0)
        self.head.register_forward_hook(self.keep, with_kwargs=True)

    def keep(self, _: nn.Module, given: tuple[Tensor], named: Any, returned: Tensor) -> None:
        self.features = given[0]

    def forward(self, batch: Batch) -> Tensor:
        loss = F.mse_loss(self.head(self.block(batch["x"])), batch["y"])
        return loss + correlation(self.features)


class Deep(nn.Module):
    """Penalizes correlations of features of layers deep within, before or behind them."""

    def __init__(self, *, is_before: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(Block(), Block()), Block())
        self.features: dict[str, Tensor] = {}
        for name, layer in self.net.named_modules():
            if isinstance(layer, Block):
                keep = functools.partial(self.keep, name)
                if is_before:
                    layer.register_forward_pre_hook(keep)
                else:
                    layer.register_forward_hook(keep)

    def keep(self, name: str, _: nn.Module, given: tuple[Tensor], *returned: Tensor) -> None:
        self.features[name] = returned[0] if returned else given[0]

    def forward(self, batch: Batch) -> Tensor:
        loss = F.mse_loss(self.net(batch["x"]), batch["y"])
        for name in [*self.features]:
            loss = loss + correlation(self.features.pop(name))
        return loss


class Store(nn.Module):
    """Keeps what a layer of another module returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.features = torch.zeros(0)
        layer.register_forward_hook(self.keep)

    def keep(self, _: nn.Module, given: tuple[Tensor], returned: Tensor) -> None:
        self.features = returned


class Stored(nn.Module):
    """Reads features of a layer deep within one module off another one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(Block(), Block()), Block())
        self.store = Store(self.net.get_submodule("0.0"))

    def forward(self, batch: Batch) -> Tensor:
        loss = F.mse_loss(self.net(batch["x"]), batch["y"])
        return loss + correlation(self.store.features)


def tracked(run: Run) -> None:
    block = Tracked()
    run.train(OfTracked(block))
    run.keep(block.center)


def whitened(run: Run) -> None:
    run.train(Whitening())


def behind_norm(run: Run) -> None:
    model = BehindNorm()
    run.train(model)
    run.keep(model.center)


def centered(run: Run) -> None:
    _train(run, Centering(is_read=True))


def center_kept(run: Run) -> None:
    _train(run, Centering(is_read=False))


def scaled(run: Run) -> None:
    run.train(Scaling())


def correlated(run: Run) -> None:
    run.train(Correlated())


def centered_before(run: Run) -> None:
    _train(run, Centered())


def given(run: Run) -> None:
    run.train(Given())


def deep(run: Run) -> None:
    run.train(Deep(is_before=False))


def deep_before(run: Run) -> None:
    run.train(Deep(is_before=True))


def stored(run: Run) -> None:
    run.train(Stored())


def _train(run: Run, model: Centering | Centered) -> None:
    run.train(model)
    run.keep(model.center)


PROGRAMS: list[Program] = [
    *(centered, center_kept, scaled, correlated),
    *(tracked, whitened, behind_norm),
    *(centered_before, given, deep, deep_before, stored),
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_hook_of_the_model_gets_the_rows_of_all_ranks(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, DATA[plan])


@pytest.mark.slow
@pytest.mark.by_day("given", "centered_before")
@pytest.mark.parametrize(
    "program", [given, centered, centered_before, whitened, deep_before, stored]
)
def test_a_hook_gets_them_beside_tensor_parallel_layers(world4: World, program: Program) -> None:
    right(world4, program, {DP: 2, TP: 2})
