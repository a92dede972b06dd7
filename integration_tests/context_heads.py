"""Heads and losses of many habits behind blocks that compute on slices of a sequence."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning

from .contexts import VOCABULARY, ByHand, batch_of, rows_of
from .experts import Trained, adamw
from .families import InDouble
from .plans import make_plan
from .training import whole


class OfHabit(ByHand):
    """A causal model by hand whose loss is computed in a way of its own."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.norm = nn.LayerNorm(32)
        self.scale = nn.Parameter(torch.ones(VOCABULARY))
        if habit == "convolved":
            self.mix = nn.Conv1d(VOCABULARY, VOCABULARY, 3, padding=1)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]: returns more
        x_BSF = self.embed(input_ids)
        early_BSF, place = x_BSF, torch.arange(input_ids.shape[1], dtype=x_BSF.dtype)[:, None]
        angle_SD = place / torch.arange(1, 9, dtype=x_BSF.dtype)
        for block in self.blocks:
            x_BSF = block(x_BSF, angle_SD.cos(), angle_SD.sin())
        x_BSF = self.norm(x_BSF + 0.5 * early_BSF)
        return getattr(self, f"_{self.habit}")(x_BSF, labels)

    def _tied(self, x: Tensor, labels: Tensor) -> Any:
        logits = x @ self.embed.weight.T
        logits = 5 * torch.tanh(logits / 5) * self.scale
        kept = labels[:, 1:].flatten() != -100
        targets = labels[:, 1:].flatten().clamp(min=0)
        losses = F.cross_entropy(
            logits[:, :-1].contiguous().view(-1, VOCABULARY), targets, reduction="none"
        )
        return {"loss": (losses * kept).sum() / kept.sum(), "logits": logits}

    def _channels(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(x).transpose(1, 2)
        return self.criterion(logits[..., :-1], labels[:, 1:]), logits

    def _z_loss(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(x).float().double()
        z = torch.logsumexp(logits, dim=-1)
        shifted = logits[..., :-1, :].reshape(-1, logits.size(-1))
        loss = F.cross_entropy(shifted, labels[..., 1:].reshape(-1), label_smoothing=0.1)
        return loss + 1e-2 * z.pow(2).mean(), logits

    def _probabilities(self, x: Tensor, labels: Tensor) -> Any:
        chances = F.log_softmax(F.linear(x, self.embed.weight), dim=-1)
        targets = labels.clamp(min=0)[:, 1:]
        picked = chances[:, :-1].gather(2, targets.unsqueeze(-1)).squeeze(-1)
        mask = (labels[:, 1:] != -100).double()
        return -(picked * mask).sum() / mask.sum().clamp(min=1), chances.exp()

    def _in_place(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(x)
        logits /= 3.0
        logits.mul_(2.0)
        weight = torch.linspace(0.5, 1.5, VOCABULARY, dtype=x.dtype)
        flat = logits[:, :-1].flatten(0, 1)
        return self._weighed(flat, labels[:, 1:].flatten(), weight), logits

    def _weighed(self, flat: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(flat, labels, weight=weight)

    def _soft(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(x)
        targets = F.one_hot(labels.clamp(min=0), VOCABULARY).to(x.dtype) * 0.9 + 0.002
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1)), logits

    def _chunks(self, x: Tensor, labels: Tensor) -> Any:
        """Compute losses of parts of the sequence, which are of other positions than slices."""
        logits = self.head(x)[:, :-1]
        parts = zip(logits.split(4, 1), labels[:, 1:].split(4, 1), strict=True)
        total = sum(
            F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum") for a, b in parts
        )
        return total / (labels[:, 1:] != -100).sum(), logits

    def _convolved(self, x: Tensor, labels: Tensor) -> Any:
        """Mix positions in the head."""
        logits = self.mix(self.head(x).transpose(1, 2))
        return F.cross_entropy(logits, labels), logits

    def _pooled(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(x[:, 0])
        return F.cross_entropy(logits, labels[:, -1]), logits

    def _own_function(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return _Penalty.apply(loss, logits), logits


class _Penalty(torch.autograd.Function):
    """Adds something to the gradient of logits, as models by hand do to keep them small."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(logits)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (logits,) = ctx.saved_tensors
        return grad, grad * 1e-3 * logits / logits.numel()


ON_SLICES = ("tied", "channels", "z_loss", "probabilities", "in_place", "soft")
GATHERED = ("chunks", "convolved", "pooled", "own_function")


def build_habit(habit: str) -> nn.Module:
    """Return a model in float64."""
    torch.manual_seed(0)
    model = OfHabit(habit).double()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "mix" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def train_habit(
    habit: str, constraints: Mapping[str, Any] | None, length: int = 13, steps: int = 2
) -> Trained:
    """Train by AdamW; without constraints on one device."""
    model, optimizer = build_habit(habit), None
    if constraints is None:
        optimizer = adamw(model)
    else:
        model, optimizer = vescale.parallelize(make_plan(constraints), model, adamw)
    losses, norms, grads = list[float](), list[float](), dict[str, Tensor]()
    with InDouble(), warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        for step in range(steps):
            batch = batch_of(step, length - step, "")
            batch["labels"][:, -1] = batch["input_ids"][:, -1]  # of which a class is made
            output = model(**(batch if constraints is None else rows_of(model, batch)))
            loss = output["loss"] if isinstance(output, dict) else output[0]
            loss.backward()
            losses.append(loss.item())
            if not step:
                named = model.named_parameters()
                grads = {n: whole(p.grad).clone() for n, p in named if p.grad is not None}
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    params = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return Trained(losses=losses, grads=grads, norms=norms, parameters=params)
