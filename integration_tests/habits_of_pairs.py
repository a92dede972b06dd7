"""What people do with two models in one loop, each a program for every plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from .programs import WIDTH, Plain, Run, rows


class Net(Plain):
    """Returns what it makes of a batch, and leaves the loss to the loop."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.logits({"x": x})


class Score(Net):
    """Says of every row how good it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(-1)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def _start(run: Run, *models: nn.Module) -> Iterator[tuple[Any, Optimizer]]:
    return (run.start(model, adamw) for model in models)


def _finish(run: Run, *models: nn.Module) -> None:
    for model in models:
        run.finish(model)


def adversaries(run: Run) -> None:
    """A generator and a discriminator take turns."""
    (maker, maker_steps), (judge, judge_steps) = _start(run, Net(), Score())
    for batch in rows():
        part = run.part(batch)
        judge_steps.zero_grad()
        real, fake = judge(part["y"]), judge(maker(part["x"]).detach())
        loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        loss.backward()
        judge_steps.step()
        maker_steps.zero_grad()
        loss = F.softplus(-judge(maker(part["x"]))).mean()
        loss.backward()
        maker_steps.step()
    _finish(run, maker, judge)


def adversaries_of_one_call(run: Run) -> None:
    """The discriminator judges real and made rows together, and is frozen for the other's turn."""
    (maker, maker_steps), (judge, judge_steps) = _start(run, Net(), Score())
    for batch in rows():
        part = run.part(batch)
        real, made = part["y"], maker(part["x"])
        judge_steps.zero_grad()
        scores = judge(torch.stack([real, made.detach()], 1))
        loss = F.softplus(-scores[:, 0]).mean() + F.softplus(scores[:, 1]).mean()
        loss.backward()
        judge_steps.step()
        judge.requires_grad_(False)
        maker_steps.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        maker_steps.step()
        judge.requires_grad_(True)
    _finish(run, maker, judge)


def chained(run: Run) -> None:
    """One model reads what the other returns, and the loss trains both."""
    (first, first_steps), (second, second_steps) = _start(run, Net(), Net())
    for batch in rows():
        part = run.part(batch)
        loss = F.mse_loss(second(first(part["x"])), part["y"])
        loss.backward()
        for steps in (first_steps, second_steps):
            steps.step()
            steps.zero_grad()
    _finish(run, first, second)


def clipped_together(run: Run) -> None:
    """The gradients of both models are clipped by one norm."""
    (actor, actor_steps), (critic, critic_steps) = _start(run, Net(), Score())
    for batch in rows():
        part = run.part(batch)
        values = critic(part["x"])
        advantage = (part["y"].mean(-1) - values).detach()
        chosen = -(actor(part["x"]).log_softmax(-1)[:, 0] * advantage).mean()
        loss = chosen + F.mse_loss(values, part["y"].mean(-1))
        loss.backward()
        both = [*actor.parameters(), *critic.parameters()]
        run.keep(torch.nn.utils.clip_grad_norm_(both, 0.1))
        for steps in (actor_steps, critic_steps):
            steps.step()
            steps.zero_grad()
    _finish(run, actor, critic)


def distilled(run: Run) -> None:
    """A student learns what a parallelized teacher says."""
    teacher, _ = run.start(Net())
    teacher.eval().requires_grad_(False)
    student, steps = run.start(Net(), adamw)
    for batch in rows():
        part = run.part(batch)
        with torch.no_grad():
            target = teacher(part["x"])
        said = student(part["x"]).log_softmax(-1)
        loss = F.kl_div(said, target.softmax(-1), reduction="batchmean")
        loss.backward()
        steps.step()
        steps.zero_grad()
    _finish(run, student)


def plain_teacher(run: Run) -> None:
    """A student learns what a teacher says that every rank has whole."""
    teacher = Net().double().requires_grad_(False)
    student, steps = run.start(Net(), adamw)
    for batch in rows():
        part = run.part(batch)
        loss = F.mse_loss(teacher(student(part["x"])), teacher(part["y"]))
        loss.backward()
        steps.step()
        steps.zero_grad()
    _finish(run, student)


def momentum_teacher(run: Run) -> None:
    """A teacher is the running average of its student, kept by hand."""
    (student, steps), (teacher, _) = _start(run, Net(), Net())
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    for batch in rows():
        part = run.part(batch)
        with torch.no_grad():
            target = teacher(part["y"])
        loss = F.mse_loss(student(part["x"]), target)
        loss.backward()
        steps.step()
        steps.zero_grad()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
    _finish(run, student, teacher)


def copied_teacher(run: Run) -> None:
    """A teacher is a deep copy of the parallelized student."""
    student, steps = run.start(Net(), adamw)
    teacher = copy.deepcopy(student).eval()
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    for batch in rows():
        part = run.part(batch)
        with torch.no_grad():
            target = teacher(part["y"])
        loss = F.mse_loss(student(part["x"]), target)
        loss.backward()
        steps.step()
        steps.zero_grad()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
    _finish(run, student, teacher)


def preferred(run: Run) -> None:
    """A policy is trained to prefer rows, against a frozen copy of itself, as in DPO."""
    plain = Net()
    reference, _ = run.start(copy.deepcopy(plain))
    reference.requires_grad_(False)
    policy, steps = run.start(plain, adamw)
    for batch in rows():
        part = run.part(batch)
        both = torch.stack([part["x"], part["y"]], 1)
        with torch.no_grad():
            before = reference(both).log_softmax(-1)[..., 0]
        now = policy(both).log_softmax(-1)[..., 0]
        margin = (now[:, 0] - before[:, 0]) - (now[:, 1] - before[:, 1])
        loss = -F.logsigmoid(0.5 * margin).mean()
        loss.backward()
        steps.step()
        steps.zero_grad()
    _finish(run, policy)


def synchronized(run: Run) -> None:
    """A target network gets the state of the other one every two steps, as in Q-learning."""
    (online, steps), (target, _) = _start(run, Net(), Net())
    for index, batch in enumerate(rows(4)):
        part = run.part(batch)
        if index % 2 == 0:
            target.load_state_dict(online.state_dict())
        with torch.no_grad():
            wanted = part["y"].mean(-1) + 0.9 * target(part["y"]).amax(-1)
        loss = F.smooth_l1_loss(online(part["x"])[:, 0], wanted)
        loss.backward()
        steps.step()
        steps.zero_grad()
    _finish(run, online, target)


class Sharing(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x)).squeeze(-1)


def sharing(run: Run) -> None:
    """Two models have one encoder."""
    encoder = Net()
    (actor, actor_steps), (critic, critic_steps) = _start(run, Sharing(encoder), Sharing(encoder))
    for batch in rows():
        part = run.part(batch)
        loss = actor(part["x"]).square().mean() + critic(part["y"]).square().mean()
        loss.backward()
        for steps in (actor_steps, critic_steps):
            steps.step()
            steps.zero_grad()
    _finish(run, actor, critic)


def of_both(run: Run) -> None:
    """One optimizer has the parameters of a parallelized model and of a plain one."""
    head = nn.Linear(WIDTH, WIDTH).double()

    def together(model: nn.Module) -> Optimizer:
        return AdamW([*model.parameters(), *head.parameters()], lr=1e-2)

    model, steps = run.start(Net(), together)
    for batch in rows():
        part = run.part(batch)
        loss = F.mse_loss(head(model(part["x"])), part["y"])
        loss.backward()
        steps.step()
        steps.zero_grad()
    _finish(run, model, head)


def head_beside(run: Run) -> None:
    """A plain head with an optimizer of its own reads what the parallelized model returns."""
    head = nn.Linear(WIDTH, WIDTH).double()
    head_steps = adamw(head)
    model, steps = run.start(Net(), adamw)
    for batch in rows():
        part = run.part(batch)
        loss = F.mse_loss(head(model(part["x"])), part["y"])
        loss.backward()
        steps.step()
        head_steps.step()
        steps.zero_grad()
        head_steps.zero_grad()
    _finish(run, model, head)


def cycled(run: Run) -> None:
    """Two generators undo each other, and one optimizer steps those of both."""
    (there, there_steps), (back, back_steps) = _start(run, Net(), Net())
    for batch in rows():
        part = run.part(batch)
        around = F.l1_loss(back(there(part["x"])), part["x"])
        again = F.l1_loss(there(back(part["y"])), part["y"])
        (around + again).backward()
        assert all(p.grad is not None for p in chain(there.parameters(), back.parameters()))
        for steps in (there_steps, back_steps):
            steps.step()
            steps.zero_grad()
    _finish(run, there, back)
