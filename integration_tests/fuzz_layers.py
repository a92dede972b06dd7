"""Layers and norms that random modules are put together from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Spec = Mapping[str, Any]


def _linear(spec: Spec, fan_in: int, fan_out: int) -> nn.Module:
    linear = nn.Linear(fan_in, fan_out, bias=spec["bias"])
    match spec["reparametrized"]:
        case "weight":
            return parametrizations.weight_norm(linear)
        case "spectral":
            return parametrizations.spectral_norm(linear)
        case _:
            return linear


def _activation(spec: Spec) -> nn.Module:
    made: dict[str, Callable[[], nn.Module]] = {
        "gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "prelu": nn.PReLU, "tanh": nn.Tanh,
    }  # fmt: skip
    return made[spec["activation"]]()


def damped(spec: Spec, where: str, x: Tensor) -> Tensor:
    """Halve what is large, by one number of all of it."""
    return x * 0.5 if spec["branches"] == where and x.square().mean() > 0.05 else x


class Mlp(nn.Module):
    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.spec = dict(spec)
        self.up, self.act = _linear(spec, width, 2 * width), _activation(spec)
        self.down = _linear(spec, 2 * width, width)
        self.dropout = nn.Dropout(spec["dropout"])

    def forward(self, x: Tensor) -> Tensor:
        hidden = damped(self.spec, "hidden", self.act(self.up(x)))
        return self.down(self.dropout(hidden))


class Gated(nn.Module):
    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.spec = dict(spec)
        self.gate, self.up = _linear(spec, width, 2 * width), _linear(spec, width, 2 * width)
        self.act, self.down = _activation(spec), _linear(spec, 2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(damped(self.spec, "hidden", self.act(self.gate(x)) * self.up(x)))


class FusedGate(nn.Module):
    """Both halves of a gated layer in one matrix."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.up, self.down = _linear(spec, width, 4 * width), _linear(spec, 2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.up(x), -1))


class Attention(nn.Module):
    def __init__(self, spec: Spec, width: int, *, groups: int = 1, fused: bool = False) -> None:
        super().__init__()
        self.heads = spec["heads"]
        self.kv_heads, self.dropout = self.heads // groups, spec["dropout"]
        self.head_dim = width // self.heads
        self.fused = fused
        if fused:
            self.qkv = _linear(spec, width, 3 * self.heads * self.head_dim)
        else:
            self.query = _linear(spec, width, self.heads * self.head_dim)
            self.key = _linear(spec, width, self.kv_heads * self.head_dim)
            self.value = _linear(spec, width, self.kv_heads * self.head_dim)
        self.out = _linear(spec, self.heads * self.head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.fused else None
        q, k, v = parts or (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.out(y.transpose(1, 2).flatten(2))


class ManualAttention(Attention):
    """Scores, softmax and a relative bias by hand."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__(spec, width)
        self.bias = nn.Parameter(torch.randn(self.heads, spec["time"], spec["time"]) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, _ = x.shape
        q, k, v = (
            layer(x).view(rows, time, self.heads, self.head_dim).permute(0, 2, 1, 3)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.mT / self.head_dim**0.5 + self.bias
        scores = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((scores @ v).permute(0, 2, 1, 3).reshape(rows, time, -1))


class Multihead(nn.Module):
    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            width, spec["heads"], dropout=spec["dropout"], bias=spec["bias"], batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Encoder(nn.Module):
    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, spec["heads"], 2 * width, dropout=spec["dropout"], batch_first=True,
            norm_first=True, bias=spec["bias"],
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Conv(nn.Module):
    """Over time; a wide one, then one for each channel by itself."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.wide = nn.Conv1d(width, 2 * width, 3, padding=1, bias=spec["bias"])
        self.deep = nn.Conv1d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.narrow = nn.Conv1d(2 * width, width, 1, bias=spec["bias"])

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.deep(self.wide(x.mT)))).mT


class Experts(nn.Module):
    """The best of some experts for each token, as a loop over experts."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, spec["experts"], bias=False)
        self.experts = nn.ModuleList(Gated(spec, width) for _ in range(spec["experts"]))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        y = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            (where,) = (chosen == index).nonzero(as_tuple=True)
            y = y.index_add(0, where, expert(tokens[where]) * weight[where, None])
        return y.view_as(x)


class StackedExperts(nn.Module):
    """Soft mixture of experts, their weights in one tensor each."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        experts = spec["experts"] + 1
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("btd,edf->btef", x, self.up).relu()
        y = torch.einsum("btef,efd->bted", hidden, self.down)
        return (y * self.router(x).softmax(-1)[..., None]).sum(2)


class Recurrent(nn.Module):
    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, width, batch_first=True, bias=spec["bias"])

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Mixer(nn.Module):
    """Mixes positions, then features."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(spec["time"], spec["time"])
        self.channels = Mlp(spec, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.channels(x + self.tokens(x.mT).mT)


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank update beside it, and a learned mix of both."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, width) * 0.3)
        self.b = nn.Parameter(torch.randn(width, 2) * 0.3)
        self.mix = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.mix * F.linear(F.linear(x, self.a), self.b)


# What works on tokens one by one, whatever dims they are along.
POINTWISE = {"mlp", "gated", "fused_gate", "experts", "adapter"}
LAYERS: dict[str, Callable[[Spec, int], nn.Module]] = {
    "mlp": Mlp,
    "gated": Gated,
    "fused_gate": FusedGate,
    "attention": Attention,
    "grouped": lambda spec, width: Attention(spec, width, groups=2 - spec["heads"] % 2),
    "fused_qkv": lambda spec, width: Attention(spec, width, fused=True),
    "manual": ManualAttention,
    "multihead": Multihead,
    "encoder": Encoder,
    "conv": Conv,
    "experts": Experts,
    "stacked_experts": StackedExperts,
    "recurrent": Recurrent,
    "mixer": Mixer,
    "adapter": Adapter,
}


class OwnRms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


class OverChannels(nn.Module):
    """A norm that wants channels second."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "none": lambda _: nn.Identity(),
    "rms": nn.RMSNorm,
    "own_rms": OwnRms,
    "batch": lambda width: OverChannels(nn.BatchNorm1d(width)),
    "group": lambda width: OverChannels(nn.GroupNorm(1, width)),
    "instance": lambda width: OverChannels(nn.InstanceNorm1d(width, affine=True)),
}
