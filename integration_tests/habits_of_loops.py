"""What people do in a training loop, each a program for one device and for every plan."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW
from torch.optim.lr_scheduler import LambdaLR

from .programs import Plain, Run, rows
from .training import whole


def loop(run: Run, model: Any, optimizer: Any, steps: int = 3) -> None:
    for batch in rows(steps):
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


# Optimizers


def by_hand_sgd(run: Run) -> None:
    model, _ = run.start(Plain())
    loop(run, model, SGD(model.parameters(), lr=0.1, momentum=0.9))


def by_hand_adamw(run: Run) -> None:
    model, _ = run.start(Plain())
    loop(run, model, AdamW(model.parameters(), lr=0.1))


def by_hand_fused(run: Run) -> None:
    model, _ = run.start(Plain())
    loop(run, model, AdamW(model.parameters(), lr=0.1, fused=True))


def by_hand_plain_loop(run: Run) -> None:
    model, _ = run.start(Plain())
    loop(run, model, AdamW(model.parameters(), lr=0.1, foreach=False))


def by_hand_adafactor(run: Run) -> None:
    model, _ = run.start(Plain())
    loop(run, model, Adafactor(model.parameters(), lr=0.1))


def by_hand_lbfgs(run: Run) -> None:
    model, _ = run.start(Plain())
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for batch in rows(2):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = model(run.part(batch))
            loss.backward()
            return loss

        run.keep(optimizer.step(closure))
    run.finish(model)


def lbfgs(run: Run) -> None:
    model, optimizer = run.start(Plain(), lambda model: LBFGS(model.parameters(), lr=0.1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(run.part(rows(1)[0]))
        loss.backward()
        return loss

    run.keep(torch.as_tensor(optimizer.step(closure)))
    run.finish(model)


def two_optimizers(run: Run) -> None:
    """One of the body, one of the head, as for two networks that play against each other."""
    model, optimizer = run.start(
        Plain(), lambda m: SGD(m.get_submodule("blocks").parameters(), 0.1)
    )
    head = AdamW(model.head.parameters(), lr=0.1)
    for batch in rows(4):
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        head.step()
        optimizer.zero_grad()
        head.zero_grad()
        run.keep(loss)
    run.finish(model)


def other_model(run: Run) -> None:
    """Trains another, plain model beside it."""
    torch.manual_seed(7)
    other = nn.Linear(3, 3).double()
    of_other = SGD(other.parameters(), 0.1)
    model, optimizer = run.start(Plain())
    of_other.zero_grad()
    other(torch.ones(2, 3).double()).sum().backward()
    of_other.step()
    run.finish(other)
    loop(run, model, optimizer)


def frozen_parts(run: Run) -> None:
    plain = Plain()
    plain.embed.requires_grad_(False)
    model, optimizer = run.start(plain)
    loop(run, model, optimizer)


def frozen_later(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for step, batch in enumerate(rows(4)):
        if step == 2:
            model.embed.requires_grad_(False)
            model.blocks[1].requires_grad_(False)
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def unfrozen_later(run: Run) -> None:
    plain = Plain()
    plain.embed.requires_grad_(False)
    plain.blocks[1].requires_grad_(False)
    model, optimizer = run.start(plain)
    for step, batch in enumerate(rows(4)):
        if step == 2:
            model.requires_grad_(True)
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def kept_gradients(run: Run) -> None:
    model, optimizer = run.start(Plain(), lambda m: SGD(m.parameters(), 0.1, momentum=0.9))
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.keep(loss)
    run.finish(model)


def model_zero_grad(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        model.zero_grad()
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        run.keep(loss)
    run.finish(model)


def scaled(run: Run) -> None:
    model, optimizer = run.start(Plain(), lambda m: AdamW(m.parameters(), 0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step, batch in enumerate(rows(5)):
        factor = torch.inf if step == 2 else 1.0
        loss = model(run.part(batch)) * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.keep(torch.tensor(scaler.get_scale()))
    run.finish(model)


def one_rank_overflows(run: Run) -> None:
    """The gradient of one block is infinite: every rank has to skip the step."""
    model, optimizer = run.start(Plain())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step, batch in enumerate(rows(4)):
        loss = model(run.part(batch))
        scaler.scale(loss).backward()
        if step == 1:
            with torch.no_grad():
                for parameter in model.blocks[3].parameters():
                    parameter.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.keep(torch.tensor(scaler.get_scale()))
    run.finish(model)


def lr_by_hand(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for step, batch in enumerate(rows(4)):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def scheduler_after(run: Run) -> None:
    model, optimizer = run.start(Plain())
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for batch in rows(4):
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def reloaded_optimizer(run: Run) -> None:
    model, optimizer = run.start(Plain(), lambda m: AdamW(m.parameters(), 0.1))
    for batch in rows(2):
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    for batch in rows(2):
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    loop(run, model, optimizer)


def new_group_with_own_lr(run: Run) -> None:
    model, optimizer = run.start(
        Plain(), lambda m: SGD(m.get_submodule("blocks").parameters(), 0.1)
    )
    for step, batch in enumerate(rows(4)):
        if step == 2:
            optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.01})
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def optimizer_hooks(run: Run) -> None:
    model, optimizer = run.start(Plain())
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: calls.append(2))
    loop(run, model, optimizer)
    run.keep(torch.tensor(calls))


# Gradients


def doubled(run: Run) -> None:
    """Reads and changes gradients between backward and step."""
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.mul_(2.0)
            parameter.grad.add_(parameter.detach(), alpha=0.01)
            run.keep(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def grad_replaced(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign() * 0.5
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def plain_grad(run: Run) -> None:
    """Sets whole, plain gradients by hand."""
    model, optimizer = run.start(Plain())
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=torch.float64)
    optimizer.step()
    run.finish(model)


def clip_value(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def norms(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        run.keep(torch.nn.utils.get_total_norm(grads))
        run.keep(torch.stack([g.norm() for g in grads]).norm())
        run.keep(torch.stack([(g.detach() ** 2).sum() for g in grads]).sum())
        run.keep(torch.tensor([p.abs().max().item() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def parameter_hooks(run: Run) -> None:
    model, optimizer = run.start(Plain())
    seen: list[Tensor] = []
    model.head.weight.register_hook(lambda grad: grad * 3.0)
    model.blocks[0].up.weight.register_hook(lambda grad: seen.append(whole(grad)))
    loop(run, model, optimizer)
    for each in seen:
        run.keep(each)


def hooks_before(run: Run) -> None:
    plain = Plain().double()
    plain.head.weight.register_hook(lambda grad: grad * 3.0)
    model, optimizer = run.start(plain)
    loop(run, model, optimizer)


def accumulate_hooks(run: Run) -> None:
    """Steps within backward, parameter by parameter."""
    model, _ = run.start(Plain())

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward()
        run.keep(loss)
    run.finish(model)


def optimizers_in_backward(run: Run) -> None:
    """One optimizer a parameter, each stepping as soon as the gradient is there."""
    model, _ = run.start(Plain())
    each = {p: AdamW([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Any) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward()
        run.keep(loss)
    run.finish(model)


# Calls


def retained(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def twice(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def discarded(run: Run) -> None:
    """Calls the model twice and differentiates one of the losses."""
    model, optimizer = run.start(Plain())
    for batch in rows(4):
        model(run.part(batch))
        loss = model(run.part(batch))
        model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def not_differentiated(run: Run) -> None:
    """Skips a step whose loss is too large."""
    model, optimizer = run.start(Plain())
    for step, batch in enumerate(rows(4)):
        loss = model(run.part(batch))
        if step == 1:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def no_grad_between(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        loss = model(run.part(batch))
        with torch.no_grad():
            run.keep(model(run.part(batch)))
        loss.backward()
        with torch.inference_mode():
            run.keep(model(run.part(batch)).clone())
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def accumulated(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for step, batch in enumerate(rows(4)):
        (model(run.part(batch)) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    run.finish(model)


def evaluated(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows(3):
        model.train()
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        for each in rows(2):
            with torch.no_grad():
                run.keep(model(run.part(each)))
    run.finish(model)


def no_backward(run: Run) -> None:
    """Steps without any gradient."""
    model, optimizer = run.start(Plain())
    optimizer.step()
    optimizer.zero_grad()
    loop(run, model, optimizer)
