"""What people do with results of which one is computed from another, each for every plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .plans import DP
from .programs import WIDTH, Block, Run, rows


class Maker(nn.Module):
    """Returns what it makes of its input, and all that it made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        steps = [self.embed(x)]
        for block in self.blocks:
            steps.append(block(steps[-1]))
        return self.head(steps[-1].tanh()), steps


class Field(Maker):
    """Returns its points, too, of which it makes leaves."""

    def forward(self, x: Tensor) -> Any:
        points = x.detach().clone().requires_grad_(True)
        return super().forward(points)[0], points


class Energy(Maker):
    """Has whoever calls it differentiate by what it was given."""

    def forward(self, x: Tensor) -> Any:
        x.requires_grad_(True)
        return super().forward(x)[0].square().sum(1)


def _mean(run: Run, value: Tensor) -> Tensor:
    """Return the mean over data-parallel ranks."""
    value = value.detach().clone()
    if (run.constraints or {}).get(DP, 1) > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def _step(run: Run, model: Any, optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    for parameter in model.parameters():
        run.keep(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    run.keep(_mean(run, loss))


def path_lengths(run: Run) -> None:
    """A loss of the gradient by latents that were returned, alone (StyleGAN 2)."""
    model, optimizer = run.start(Maker())
    for batch in rows():
        part = run.part(batch)
        image, (latents, *_) = model(part["x"])
        (by,) = torch.autograd.grad((image * part["y"]).sum(), latents, create_graph=True)
        _step(run, model, optimizer, (by.square().sum(1).sqrt() - 0.1).square().mean())
    run.finish(model)


def by_several(run: Run) -> None:
    """Gradients by two intermediate results, one behind the other, and by the input."""
    model, optimizer = run.start(Maker())
    for batch in rows():
        part = run.part(batch)
        x = part["x"].requires_grad_()
        image, (first, middle, last) = model(x)
        total = image.square().sum() + (first * middle).sum() + last.tanh().sum()
        grads = torch.autograd.grad(total, (first, middle, x), create_graph=True)
        for grad in grads:
            run.keep(_mean(run, grad.square().mean()))
        penalty = torch.stack([grad.square().mean() for grad in grads]).sum()
        _step(run, model, optimizer, penalty + image.mean())
    run.finish(model)


def by_points_of_its_own(run: Run) -> None:
    """Trains on the gradient and the Laplacian by points that forward made (SIREN)."""
    model, optimizer = run.start(Field())
    for batch in rows():
        part = run.part(batch)
        image, points = model(part["x"])
        (slope,) = torch.autograd.grad(image.sum(), points, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        _step(run, model, optimizer, F.mse_loss(slope, part["y"]) + bend[:, 0].square().mean())
    run.finish(model)


def by_what_was_given(run: Run) -> None:
    """Trains on forces alone, by positions that forward has asked the gradient of."""
    model, optimizer = run.start(Energy())
    for batch in rows():
        part = run.part(batch)
        positions = part["x"].clone()
        (force,) = torch.autograd.grad(model(positions).sum(), positions, create_graph=True)
        _step(run, model, optimizer, F.mse_loss(force, part["y"]))
    run.finish(model)


def kept_and_turned(run: Run) -> None:
    """An intermediate result keeps its gradient, and a hook turns that of another one."""
    model, optimizer = run.start(Maker())
    for batch in rows():
        part = run.part(batch)
        image, (first, middle, last) = model(part["x"])
        first.retain_grad()
        middle.register_hook(lambda grad: -2 * grad)
        loss = F.mse_loss(image, part["y"]) + last.square().mean()
        _step(run, model, optimizer, loss)
        run.keep(_mean(run, first.grad.sum()))
    run.finish(model)


def of_all_results(run: Run) -> None:
    """Asks for gradients of parameters, of a loss that is made of all results."""
    model, optimizer = run.start(Maker())
    for batch in rows():
        part = run.part(batch)
        image, steps = model(part["x"])
        loss = F.mse_loss(image, part["y"]) + torch.stack([s.square().mean() for s in steps]).sum()
        loss.backward(inputs=list(model.blocks.parameters()), retain_graph=True)
        for parameter in model.blocks.parameters():
            run.keep(parameter.grad)
            parameter.grad = None
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
            run.keep(grad)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)
