"""Forwards that transform functions of the model's blocks: torch.func, vmap, dual numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

from .programs import WIDTH, Plain, Run, rows

Batch = Mapping[str, Tensor]


class Energy(Plain):
    """A number for each row, by blocks."""

    def energy(self, x: Tensor) -> Tensor:
        return self.logits({"x": x}).square().sum(-1)


class Forces(Energy):
    """Fits the derivative of what it computes, by torch.func, and what it computes."""

    def forward(self, batch: Batch) -> Tensor:
        x, y = batch["x"], batch["y"]
        forces = vmap(grad(self.energy))(x)
        return F.mse_loss(forces, y) + self.energy(x).mean()


class Tangents(Energy):
    """Fits a directional derivative, by jvp or by dual numbers."""

    def __init__(self, *, is_dual: bool) -> None:
        super().__init__()
        self.is_dual = is_dual

    def forward(self, batch: Batch) -> Tensor:
        x, y = batch["x"], batch["y"]
        if not self.is_dual:
            value, tangent = jvp(self.energy, (x,), (y,))[:2]
            return F.mse_loss(tangent, value)
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(self.energy(forward_ad.make_dual(x, y)))
            assert tangent is not None
            return F.mse_loss(tangent, value)


class Mapped(Energy):
    """Runs its blocks on one row at a time."""

    def forward(self, batch: Batch) -> Tensor:
        return (vmap(self.energy)(batch["x"]) - batch["y"][:, 0]).square().mean()


class Saliency(Plain):
    """Penalizes the derivative of a mean over targets, some of which do not count."""

    def forward(self, batch: Batch) -> Tensor:
        targets = some_targets(batch["y"])

        def loss_of(x: Tensor) -> Tensor:
            return F.cross_entropy(self.logits({"x": x}), targets, ignore_index=-1)

        slope, loss = torch.func.grad_and_value(loss_of)(batch["x"])
        return loss + slope.abs().mean()


class MeansOfRows(Plain):
    """A mean over the targets of each row, of which rows have other numbers; and over rows."""

    def forward(self, batch: Batch) -> Tensor:
        logits = self.logits(batch).view(-1, 4, 2)
        targets = (batch["y"][:, :4] > 0).long()
        targets = torch.where(batch["y"][:, 4:] > 0.3, -1, targets)
        targets[:, 0] = 1

        def loss_of(row: Tensor, wanted: Tensor) -> Tensor:
            return F.cross_entropy(row, wanted, ignore_index=-1)

        return vmap(loss_of)(logits, targets).mean()


class Ensemble(nn.Module):
    """Models whose parameters are stacked, and trained at once."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        stacked, _ = stack_module_state(members)  # pyright: ignore[reportArgumentType]: takes any sequence
        self.weight = nn.Parameter(stacked["0.weight"].detach().clone())
        self.bias = nn.Parameter(stacked["0.bias"].detach().clone())
        self.base = [members[0].to("meta")]  # no part of the model

    def forward(self, batch: Batch) -> Tensor:
        targets = some_targets(batch["y"])

        def loss_of(weight: Tensor, bias: Tensor) -> Tensor:
            values = {"0.weight": weight, "0.bias": bias}
            logits = functional_call(self.base[0], values, (batch["x"],))
            return F.cross_entropy(logits, targets, ignore_index=-1)

        return vmap(loss_of)(self.weight, self.bias).mean()


def some_targets(y: Tensor) -> Tensor:
    """Return a target for each row, or -1."""
    return torch.where(y[:, 1] > 0.2, -1, y.argmax(-1))


def _train_and_evaluate(run: Run, make: Callable[[], nn.Module]) -> None:
    run.train(make())
    model, _ = run.start(make())
    with torch.no_grad():
        run.keep(model(run.part(rows(1)[0])))


def forces(run: Run) -> None:
    _train_and_evaluate(run, Forces)


def tangents(run: Run) -> None:
    _train_and_evaluate(run, lambda: Tangents(is_dual=False))


def dual_numbers(run: Run) -> None:
    _train_and_evaluate(run, lambda: Tangents(is_dual=True))


def mapped(run: Run) -> None:
    _train_and_evaluate(run, Mapped)


def saliency(run: Run) -> None:
    run.train(Saliency())


def means_of_rows(run: Run) -> None:
    _train_and_evaluate(run, MeansOfRows)


def ensemble(run: Run) -> None:
    _train_and_evaluate(run, Ensemble)
