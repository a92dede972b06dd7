"""What people do with optimizers, each a program for one device and for every plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from .programs import WIDTH, Plain, Run, rows


def loop(run: Run, model: Any, optimizer: Optimizer, steps: int = 2) -> None:
    for batch in rows(steps):
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)


def switches(run: Run) -> None:
    """The options of torch's optimizers."""
    for make in (
        lambda m: AdamW(m.parameters(), lr=torch.tensor(0.05), amsgrad=True, foreach=False),
        lambda m: Adam(m.parameters(), lr=0.05, maximize=True, weight_decay=0.1, foreach=False),
        lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.1, maximize=True),
    ):
        model, optimizer = run.start(Plain(), make)
        loop(run, model, optimizer)
        run.finish(model)


def zeroed_in_place(run: Run) -> None:
    model, optimizer = run.start(Plain(), lambda m: AdamW(m.parameters(), lr=0.05))
    for batch in rows(3):
        optimizer.zero_grad(set_to_none=False)
        model(run.part(batch)).backward()
        optimizer.step()
    for parameter in model.parameters():
        run.keep(parameter.grad)
    run.finish(model)


def clipped_by_a_hook(run: Run) -> None:
    """A hook of the step sees the gradients of all ranks, and one after it the new values."""

    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        run.keep(nn.utils.clip_grad_norm_(params, 0.05))

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        run.keep(optimizer.param_groups[0]["params"][0])

    model, optimizer = run.start(Plain(), lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9))
    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(look)
    loop(run, model, optimizer, 3)
    run.finish(model)


def unfrozen_in_steps(run: Run) -> None:
    """Groups of their own rates; a part is frozen first, then trained, then frozen again."""

    def make(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        first.requires_grad_(False)
        return AdamW(
            [{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02
        )

    model, optimizer = run.start(Plain(), make)
    for is_trained in (False, True, False):
        next(model.parameters()).requires_grad_(is_trained)
        loop(run, model, optimizer, 1)
    run.finish(model)


def scheduled_by_two(run: Run) -> None:
    model, optimizer = run.start(Plain(), lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9))
    warmup = LinearLR(optimizer, 0.1, total_iters=2)
    cycle = OneCycleLR(optimizer, 0.2, total_steps=4)
    for batch in rows(3):
        model(run.part(batch)).backward()
        optimizer.step()
        warmup.step()
        cycle.step()
        optimizer.zero_grad()
    run.finish(model)


def averaged_by_torch(run: Run) -> None:
    """An exponential average of distributed parameters by torch's own function."""
    model, optimizer = run.start(Plain(), lambda m: AdamW(m.parameters(), lr=0.05))
    average = [p.detach().clone() for p in model.parameters()]
    update = get_ema_multi_avg_fn(0.9)
    for number, batch in enumerate(rows(3)):
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        update(average, [p.detach() for p in model.parameters()], number)
    for each in average:
        run.keep(each)


def averaged_model(run: Run) -> None:
    """Two kinds of averages, which are evaluated between forward and backward of the model."""
    model, optimizer = run.start(Plain())
    averages = [
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        AveragedModel(model, use_buffers=True),
        AveragedModel(model, avg_fn=lambda old, new, count: old + (new - old) / (count + 2)),
    ]
    for batch in rows(3):
        loss = model(run.part(batch))
        for average in averages:
            with torch.no_grad():
                run.keep(average(run.part(batch)).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.update_parameters(model)
    for average in averages:
        assert int(average.n_averaged) == 3
        run.finish(average)


class Normed(Plain):
    """With batch norm, whose statistics a pass over data sets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, batch: Any) -> Any:
        return super().forward({**batch, "x": self.norm(batch["x"])})


# update_bn passes a batch that is no tensor, but for a list, on as it is.
def statistics_anew(run: Run) -> None:
    model, optimizer = run.start(Normed())
    loop(run, model, optimizer)
    with torch.no_grad():
        update_bn([[run.part(batch)] for batch in rows(3)], model)
    for buffer in model.buffers():
        run.keep(buffer)
    run.finish(model)


def statistics_of_an_average(run: Run) -> None:
    model, optimizer = run.start(Normed())
    average, same = AveragedModel(model), AveragedModel(model, use_buffers=True)
    for _ in range(3):
        loop(run, model, optimizer)
        average.update_parameters(model)
        same.update_parameters(model)
    update_bn([[run.part(batch)] for batch in rows(3)], average)
    for buffer in (*average.module.buffers(), *same.module.buffers(), *model.buffers()):
        run.keep(buffer)
    run.finish(average)
