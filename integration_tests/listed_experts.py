"""Layers that keep experts in a list, as people write them, and a small model of such layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning

from .experts import LENGTH, VOCABULARY, Trained, adamw, rows_of, tokens
from .plans import make_plan
from .training import whole

HIDDEN, INNER = 8, 12


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))


class Switch(nn.Module):
    """One expert a token, scaled by its probability; only experts with tokens run."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts)
        self.experts = nn.ModuleDict({f"expert_{i}": mlp() for i in range(num_experts)})

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts.values()):
            mask = chosen == index
            if mask.any():
                out[mask] = expert(x[mask]) * weight[mask][..., None]
        return out


class OldMixtral(nn.Module):
    """Two experts a token, renormalized, as transformers 4 had it; returns logits, too."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        logits = self.gate(hidden_states)
        weights, chosen = torch.topk(F.softmax(logits, dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        final = torch.zeros_like(hidden_states)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for index in range(self.num_experts):
            slot, row = torch.where(mask[index])
            if row.shape[0] == 0:
                continue
            current = hidden_states[None, row].reshape(-1, shape[-1])
            made = self.experts[index](current) * weights[row, slot, None]
            final.index_add_(0, row, made.to(hidden_states.dtype))
        return final.reshape(shape), logits


class Slots(nn.Module):
    """Slot by slot, with an expert that every token goes to, after the others."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, num_experts)
        self.experts = nn.ModuleList(mlp() for _ in range(num_experts))
        self.shared, self.norm = SwiGLU(), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).view(-1, HIDDEN)
        weights, chosen = self.gate(flat).topk(2)
        weights = weights.softmax(-1)
        out = torch.zeros_like(flat)
        for slot in range(2):
            for index, expert in enumerate(self.experts):
                (row,) = torch.where(chosen[:, slot] == index)
                if len(row):
                    out[row] += weights[row, slot].unsqueeze(1) * expert(flat[row])
        return (out + self.shared(flat)).view_as(x)


class Gate(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, HIDDEN))
        self.register_buffer("e_score_correction_bias", torch.linspace(0, 0.1, num_experts))
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        chosen = (scores + self.get_buffer("e_score_correction_bias")).topk(2, sorted=False)[1]
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


class DeepSeek(nn.Module):
    """Tokens repeated for each of their experts, all of which run, some without a row."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(SwiGLU() for _ in range(num_experts))
        self.gate, self.shared_experts = Gate(num_experts), SwiGLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        identity, shape = hidden_states, hidden_states.shape
        flat = hidden_states.view(-1, HIDDEN)
        chosen, weights = self.gate(flat)
        flat = flat.repeat_interleave(2, dim=0)
        y = torch.empty_like(flat)
        of_row = chosen.view(-1)
        for index, expert in enumerate(self.experts):
            y[of_row == index] = expert(flat[of_row == index]).to(flat.dtype)
        y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return y.view(*shape) + self.shared_experts(identity)


class Dense(nn.Module):
    """Every expert has all tokens, and most of what it makes is multiplied by zero."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(HIDDEN, num_experts))
        self.experts = nn.ModuleList(mlp() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.w_gate
        weights, chosen = logits.softmax(-1).topk(2)
        gates = torch.zeros_like(logits).scatter(-1, chosen, weights)
        made = torch.stack([expert(x) for expert in self.experts], -2)
        return torch.einsum("bse,bseh->bsh", gates, made)


class ListOfExperts(nn.ModuleList):
    """A list with a forward of rows, experts and weights."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        final = torch.zeros_like(rows)
        for index, expert in enumerate(self):
            row, slot = torch.where(chosen == index)
            final.index_add_(0, row, expert(rows[row]) * weights[row, slot, None])
        return final


class Called(nn.Module):
    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts)
        self.experts = ListOfExperts(SwiGLU() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, HIDDEN)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        return self.experts(flat, chosen, weights).view_as(x)


class DictOfExperts(nn.ModuleDict):
    """A list with a forward of rows, masks and weights, and dropout beside the experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__({f"expert_{i}": mlp() for i in range(num_experts)})
        self.dropout = nn.Dropout(0.0)

    def forward(self, rows: Tensor, masks: Tensor, weights: Tensor) -> Tensor:
        final = torch.zeros_like(rows)
        for index in masks.sum((0, 1)).nonzero()[:, 0].tolist():
            (row,) = torch.where(masks[:, 0, index])
            made = self.dropout(self[f"expert_{index}"](rows[row]) * weights[row])
            final.index_add_(0, row, made)
        return final


class CalledWithMasks(nn.Module):
    """As transformers 5 has Switch, with a capacity of each sequence."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts)
        self.experts = DictOfExperts(num_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.max(-1)
        masks = F.one_hot(chosen, scores.shape[-1])
        masks = masks * (masks.cumsum(-2) <= 3)
        made = self.experts(x.flatten(0, 1), masks.flatten(0, 1)[:, None], weights.view(-1, 1))
        return made.view_as(x)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    each.__name__: each
    for each in (Switch, OldMixtral, Slots, DeepSeek, Dense, Called, CalledWithMasks)
}


class Stacks(nn.Module):
    """Takes as many rows of each expert, on the first dim or flat, one expert after the other."""

    def __init__(self, num_experts: int, *, is_flat: bool) -> None:
        super().__init__()
        self.num_experts, self.is_flat = num_experts, is_flat
        self.up = nn.Parameter(torch.randn(num_experts, HIDDEN, INNER) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, INNER, HIDDEN) / 3)
        self.bias = nn.Parameter(torch.randn(num_experts, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(self.num_experts, -1, HIDDEN) if self.is_flat else x.flatten(1, -2)
        made = torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down) + self.bias[:, None]
        return made.view(x.shape)


class AllTokens(nn.Module):
    """As Llama 4: every expert has all tokens, times their scores, which are mostly zero."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = Stacks(num_experts, is_flat=True)

    def forward(self, x: Tensor) -> Tensor:
        flat, logits = x.view(-1, HIDDEN), self.router(x.view(-1, HIDDEN))
        weights, chosen = logits.topk(1, dim=-1)
        scores = torch.full_like(logits, float("-inf")).scatter(1, chosen, weights).sigmoid()
        routed = flat.repeat(logits.shape[1], 1) * scores.t().reshape(-1, 1)
        return self.experts(routed).view(logits.shape[1], *x.shape).sum(0)


class Capacity(nn.Module):
    """As GShard: one-hot products give each expert some tokens of every sequence."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(HIDDEN, num_experts))
        self.experts = Stacks(num_experts, is_flat=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.gate).softmax(-1).max(-1)
        mask = F.one_hot(chosen, self.gate.shape[1])
        place = (mask.cumsum(1) * mask).sum(-1)
        slots = F.one_hot(place.clamp(max=3), 4)[..., 1:] * mask.sum(-1, keepdim=True)
        sent = (mask[..., None] * slots[:, :, None]).to(x)
        made = self.experts(torch.einsum("bnd,bnec->ebcd", x, sent))
        return torch.einsum("ebcd,bnec,bn->bnd", made, sent, weights)


BATCHED: dict[str, Callable[[int], nn.Module]] = {
    each.__name__: each for each in (AllTokens, Capacity)
}


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer, self.moe = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), layer

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x.cumsum(1))
        made = self.moe(self.norm(x))
        return x + (made[0] if isinstance(made, tuple) else made)


class Model(nn.Module):
    def __init__(self, layer: str, num_experts: int = 4, *, skewed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(
            Block({**LAYERS, **BATCHED}[layer](num_experts)) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        for name, parameter in self.named_parameters():
            is_router = num_experts in parameter.shape and parameter.numel() <= 8 * num_experts
            if is_router and skewed:  # as drawn, but nothing for the last experts
                nn.init.zeros_(parameter)
            if is_router and "weight" in name and not skewed:
                nn.init.normal_(parameter, std=0.5)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), labels.view(-1))


def train_layers(
    layer: str,
    num_experts: int,
    constraints: Mapping[str, Any] | None,
    parts: int,
    skewed: bool = False,
) -> Trained:
    """Train three steps by AdamW; without constraints on one device, in ``parts``."""
    model: Any = Model(layer, num_experts, skewed=skewed)
    if constraints is None:
        optimizer = adamw(model)
    else:
        plan = make_plan(constraints)
        model, optimizer = vescale.parallelize(plan, model, adamw)
        parts //= plan.data_parallel.size
    losses, norms, grads = list[float](), list[float](), dict[str, Tensor]()
    for step in range(3):
        loss = 0.0
        batch = rows_of(model, tokens(step))
        assert batch["labels"].shape[1] == LENGTH
        for index in range(parts):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GatherWarning)
                made = model(**{k: v.chunk(parts)[index] for k, v in batch.items()}) / parts
            made.backward()
            loss += made.item()
        losses.append(loss)
        if not step:  # None for an expert that was not called
            of_each = {name: p.grad for name, p in model.named_parameters()}
            grads = {name: whole(g).clone() for name, g in of_each.items() if g is not None}
        norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
    final = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return Trained(losses=losses, grads=grads, norms=norms, parameters=final)
