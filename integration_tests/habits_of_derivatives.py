"""Losses that are made of derivatives of what a model returns, each a program for every plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .programs import WIDTH, Plain, Run, rows


class Field(Plain):
    """A function of points, as physics-informed networks are."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.logits({"x": x})


def derivative(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def residual_alone(run: Run) -> None:
    """Trains on the second derivative; the loss is made of nothing that the model returned."""
    model, optimizer = run.start(Field())
    for batch in rows():
        part = run.part(batch)
        x = part["x"].requires_grad_()
        loss = F.mse_loss(derivative(derivative(model(x), x), x), part["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def residual_of_two_inputs(run: Run) -> None:
    """Burgers' equation at points (x, t), and values at a border, in one loss."""

    class OfTwo(Plain):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.logits({"x": torch.cat([x, t], 1)})[:, :1]

    model, optimizer = run.start(OfTwo())
    for batch in rows():
        part = run.part(batch)
        x, t = (each.clone().requires_grad_() for each in part["x"].split(WIDTH // 2, 1))
        u = model(x, t)
        u_x = derivative(u, x)
        residual = derivative(u, t) + u * u_x - 0.1 * derivative(u_x, x)
        border = model(*part["y"].split(WIDTH // 2, 1))
        (residual.square().mean() + (border - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def residual_beside_border(run: Run) -> None:
    """Two losses of two calls, each differentiated by itself, for one step."""
    model, optimizer = run.start(Field())
    for batch in rows():
        part = run.part(batch)
        x = part["x"].requires_grad_()
        F.mse_loss(derivative(derivative(model(x), x), x), part["y"]).backward()
        F.mse_loss(model(part["y"]), part["x"].detach()).backward()
        run.keep(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def third_derivative(run: Run) -> None:
    model, optimizer = run.start(Field())
    for batch in rows(2):
        x = run.part(batch)["x"].requires_grad_()
        value = model(x)
        for _ in range(3):
            value = derivative(value, x)
        value.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def residual_asked(run: Run) -> None:
    """Asks for gradients of parameters, of a residual with and without the value itself."""
    model, optimizer = run.start(Field())
    parameters = list(model.parameters())
    for batch in rows(2):
        part = run.part(batch)
        x = part["x"].requires_grad_()
        value = model(x)
        loss = F.mse_loss(derivative(value, x), part["y"]) + value.square().mean()
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(derivative(model(x), x), part["y"]).backward(inputs=parameters[:-1])
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def penalty_by_itself(run: Run) -> None:
    """A critic whose penalty on gradients is differentiated by itself, as WGAN-GP's first code."""

    class Critic(Plain):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.logits({"x": x}).mean(-1)

    model, optimizer = run.start(Critic())
    for batch in rows():
        part = run.part(batch)
        optimizer.zero_grad()
        (-model(part["x"]).mean()).backward()
        model(part["y"]).mean().backward()
        between = (0.3 * part["x"] + 0.7 * part["y"]).requires_grad_()
        grad = derivative(model(between), between)
        (10 * (grad.norm(2, dim=1) - 1).square().mean()).backward()
        optimizer.step()
    run.finish(model)


def penalty_on_a_loss(run: Run) -> None:
    """Differentiates a penalty on the gradient of a loss that the model returns, by itself."""
    model, optimizer = run.start(Plain())
    for batch in rows(2):
        part = run.part(batch)
        x = part["x"].requires_grad_()
        (100 * derivative(model(part), x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


class Within(Plain):
    """Computes the residual in its forward, by points of the batch as they are or its own."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_() if self.own else batch["x"]
        u = self.logits({"x": x})
        u_x = derivative(u, x)
        return (derivative(u_x, x) + u * u_x - batch["y"]).square().mean()


def residual_within(run: Run) -> None:
    run.train(Within(own=True))


def residual_within_of_inputs(run: Run) -> None:
    given = [{**batch, "x": batch["x"].requires_grad_()} for batch in rows()]
    run.train(Within(own=False), given=given)


def kept_by_a_hook(run: Run) -> None:
    """Trains on what a hook has kept, which no call returned."""
    model, optimizer = run.start(Field())
    kept: list[Tensor] = []
    model.blocks[2].register_forward_hook(lambda module, args, output: kept.append(output))
    for batch in rows(2):
        model(run.part(batch)["x"])
        kept[-1].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


class Normalized(nn.Module):
    """A block with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).tanh())


class FieldOfRows(Field):
    """What it says of a point depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normalized() for _ in range(2))


def residual_with_batch_norm(run: Run) -> None:
    model, optimizer = run.start(FieldOfRows())
    for batch in rows():
        part = run.part(batch)
        x = part["x"].requires_grad_()
        F.mse_loss(derivative(derivative(model(x), x), x), part["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def penalty_with_batch_norm(run: Run) -> None:
    """A penalty on gradients beside a loss of the results themselves."""
    model, optimizer = run.start(FieldOfRows())
    for batch in rows():
        x = run.part(batch)["x"].requires_grad_()
        score = model(x).mean(-1)
        penalty = (derivative(score, x).norm(2, dim=1) - 1).square().mean()
        (score.mean() + 10 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


class Masked(Plain):
    """A mean over chosen items, which all data-parallel ranks compute together."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return masked(self.logits(batch), batch["y"])


def masked(found: Tensor, wanted: Tensor) -> Tensor:
    mask = (wanted > 0).to(found.dtype)
    return ((found - wanted).square() * mask).sum() / mask.sum()


class MaskedForces(Plain):
    """A mean over chosen forces, by inputs of its own."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        return masked(derivative(self.logits({"x": x}), x), batch["y"])


def forces_of_some(run: Run) -> None:
    run.train(MaskedForces())


def attacked_by_coupled_loss(run: Run) -> None:
    """Moves inputs along the gradient of a masked mean, then penalizes that gradient."""
    model, optimizer = run.start(Masked())
    for batch in rows(2):
        part = run.part(batch)
        x = part["x"].requires_grad_()
        model(part).backward()
        assert x.grad is not None
        part["x"] = x = (x + 10 * x.grad).detach().requires_grad_()
        optimizer.zero_grad()
        loss = model(part)
        (loss + 100 * derivative(loss, x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


class WeighedByGradients(Plain):
    """Weighs two losses by the norms of their gradients at the last layer, as VQGAN does."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        y = self.logits(batch)
        losses = F.mse_loss(y, batch["y"]), F.l1_loss(y, batch["x"])
        first, second = (
            torch.autograd.grad(loss, self.head.weight, retain_graph=True)[0].norm()
            for loss in losses
        )
        return losses[0] + 0.8 * (first / (second + 1e-4)).detach() * losses[1]


def weighed_by_gradients(run: Run) -> None:
    run.train(WeighedByGradients())


class OfGradients(Plain):
    """Adds the size of its parameters' gradients to its loss."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss = F.mse_loss(self.logits(batch), batch["y"])
        by = [self.head.weight, self.embed.weight]
        grads = torch.autograd.grad(loss, by, create_graph=True)
        return loss + torch.stack([grad.square().sum() for grad in grads]).sum()


def of_gradients(run: Run) -> None:
    run.train(OfGradients())


class Adapting(Plain):
    """Takes a step of its head within forward, and computes with the result, as MAML does."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        held: dict[str, Tensor] = dict(self.head.named_parameters())
        inner = F.mse_loss(functional_call(self.head, held, (x,)), batch["y"])
        grads = torch.autograd.grad(inner, list(held.values()), create_graph=True)
        pairs = zip(held.items(), grads, strict=True)
        adapted = {name: value - 0.1 * grad for (name, value), grad in pairs}
        return F.mse_loss(functional_call(self.head, adapted, (x,)), batch["x"])


def adapting(run: Run) -> None:
    run.train(Adapting())


class AdaptingAll(Plain):
    """Likewise of all of its parameters."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        held: dict[str, Tensor] = dict(self.named_parameters())
        inner = F.mse_loss(self.logits(batch), batch["y"])
        grads = torch.autograd.grad(inner, list(held.values()), create_graph=True)
        return inner + torch.stack([grad.square().sum() for grad in grads]).sum()


def adapting_all(run: Run) -> None:
    run.train(AdaptingAll())
