"""How people ask for gradients, each a program for one device and for every plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .programs import WIDTH, Plain, Run, rows
from .training import whole


def backward_to_parameters(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def backward_to_some(run: Run) -> None:
    """Ends at some parameters; the others have no gradient."""
    model, optimizer = run.start(Plain())
    some = [model.head.weight, model.blocks[1].up.weight]
    for batch in rows(3):
        loss = model(run.part(batch))
        torch.autograd.backward(loss, inputs=some)
        run.keep(torch.tensor([p.grad is None for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def backward_to_some_then_all(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(2):
        model(run.part(batch)).backward(inputs=[model.embed.weight])
        model(run.part(batch)).backward()
        for parameter in model.parameters():
            run.keep(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def gradients_by_grad(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(run.part(batch)), parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            run.keep(grad)
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def gradients_of_two_losses(run: Run) -> None:
    model, optimizer = run.start(Plain())
    given = rows(4)
    for first, second in zip(given[::2], given[1::2], strict=True):
        losses = [model(run.part(first)), model(run.part(second))]
        torch.autograd.backward(losses, inputs=list(model.blocks.parameters()))
        losses = [model(run.part(first)), model(run.part(second))]
        torch.autograd.backward(losses)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def asked_with_hooks(run: Run) -> None:
    """Hooks are called once for each gradient, with it, and not where there is none."""
    model, optimizer = run.start(Plain())
    seen: list[Tensor] = []
    calls: list[int] = []
    model.head.weight.register_hook(lambda grad: seen.append(whole(grad)))
    model.head.weight.register_hook(lambda grad: grad * 3.0)
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: calls.append(index))
    for batch in rows(2):
        model(run.part(batch)).backward(inputs=[model.head.weight, model.head.bias])
        run.keep(torch.autograd.grad(model(run.part(batch)), model.head.weight)[0])
        run.keep(torch.tensor(sorted(calls)))
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for each in seen:
        run.keep(each)
    run.keep(torch.tensor(sorted(calls)))
    run.finish(model)


def asked_twice(run: Run) -> None:
    """Differentiates one graph for some parameters, then for all."""
    model, optimizer = run.start(Plain())
    for batch in rows(2):
        loss = model(run.part(batch))
        loss.backward(inputs=[model.head.bias], retain_graph=True)
        (grad,) = torch.autograd.grad(loss, model.embed.weight, retain_graph=True)
        run.keep(grad)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def asked_beside_inputs(run: Run) -> None:
    """Asks for the gradients of inputs, whose signs are taken, and of parameters at once."""
    model, optimizer = run.start(Plain())
    for batch in rows(2):
        part = run.part(batch)
        part["x"].requires_grad_()
        asked: Any = [part["x"], *model.parameters()]
        _, *grads = torch.autograd.grad(model(part), asked)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def asked_for_graph(run: Run) -> None:
    model, _ = run.start(Plain())
    loss = model(run.part(rows(1)[0]))
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + torch.stack([grad.square().sum() for grad in grads]).sum()).backward()


def asked_within_no_sync(run: Run) -> None:
    model, _ = run.start(Plain())
    with model.no_sync():
        model(run.part(rows(1)[0])).backward(inputs=list(model.parameters()))


# Inputs


def penalty_on_inputs(run: Run) -> None:
    """Adds the mean square of the gradient of the inputs to the loss."""
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        part = run.part(batch)
        part["x"].requires_grad_()
        loss = model(part)
        (grad,) = torch.autograd.grad(loss, part["x"], create_graph=True)
        (loss + 100 * grad.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


class Logits(Plain):
    """Returns a result for each row."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.logits(batch)


def penalty_on_norms(run: Run) -> None:
    """Has the gradient of each row's result be of length one, as critics of GANs have it."""
    model, optimizer = run.start(Logits())
    for batch in rows(3):
        part = run.part(batch)
        part["x"].requires_grad_()
        out = model(part)
        (grad,) = torch.autograd.grad(out.sum(), part["x"], create_graph=True)
        penalty = (grad.norm(dim=1) - 1).square().mean()
        (out.square().mean() + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


class Forces(Plain):
    """Its loss is of the gradient of what it computes, as that of energies is."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        with torch.enable_grad():
            x = batch["x"].detach().requires_grad_()
            energy = self.logits({"x": x}).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return (force - batch["y"]).square().mean()


def forces(run: Run) -> None:
    run.train(Forces())


class ForcesInTraining(Plain):
    """Likewise, but not where gradients are off."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        (force,) = torch.autograd.grad(self.logits({"x": x}).sum(), x, create_graph=True)
        return (force - batch["y"]).square().mean()


def forces_in_training(run: Run) -> None:
    run.train(ForcesInTraining())


def attacked(run: Run) -> None:
    """Moves the inputs along their gradient, by backward and by grad of a frozen model."""
    model, optimizer = run.start(Plain())
    for batch in rows(2):
        part = run.part(batch)
        part["x"].requires_grad_()
        model(part).backward()
        assert part["x"].grad is not None
        part["x"] = (part["x"] + 10 * part["x"].grad).detach().requires_grad_()
        optimizer.zero_grad()
        model.requires_grad_(False)
        (grad,) = torch.autograd.grad(model(part), part["x"])
        model.requires_grad_(True)
        part["x"] = (part["x"] + 10 * grad).detach()
        loss = model(part)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def encoded_outside(run: Run) -> None:
    """Trains another module through the inputs."""
    torch.manual_seed(2)
    encoder = torch.nn.Linear(WIDTH, WIDTH).double()
    model, _ = run.start(Plain())
    part = run.part(rows(1)[0])
    loss = model({**part, "x": encoder(part["x"])})
    loss.backward()


def mapped_by_rows(run: Run) -> None:
    model, _ = run.start(Plain())
    part = run.part(rows(1)[0])
    with torch.no_grad():
        torch.vmap(lambda x, y: model({"x": x[None], "y": y[None]}))(part["x"], part["y"])
