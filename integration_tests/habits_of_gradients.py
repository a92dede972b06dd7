"""How people ask for gradients, each a program for one device and for every plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .programs import Plain, Run, rows
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
