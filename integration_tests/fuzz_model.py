"""Small modules of every make, from a flat description that can be drawn, printed and shrunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Spec = Mapping[str, Any]
Batch = dict[str, Tensor]
IN, VOCABULARY, TIME = 6, 11, 4


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


class Mlp(nn.Module):
    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.up, self.act = _linear(spec, width, 2 * width), _activation(spec)
        self.down = _linear(spec, 2 * width, width)
        self.dropout = nn.Dropout(spec["dropout"])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.act(self.up(x))))


class Gated(nn.Module):
    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.gate, self.up = _linear(spec, width, 2 * width), _linear(spec, width, 2 * width)
        self.act, self.down = _activation(spec), _linear(spec, 2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


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
        self.bias = nn.Parameter(torch.randn(self.heads, TIME, TIME) * 0.1)

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
    """The best of three experts for each token, as a loop over experts."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(Gated(spec, width) for _ in range(3))

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
        self.router = nn.Linear(width, 4)
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) * 0.3)

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
        self.tokens, self.channels = nn.Linear(TIME, TIME), Mlp(spec, width)

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


class Block(nn.Module):
    def __init__(self, spec: Spec, kind: str) -> None:
        super().__init__()
        width = spec["width"]
        self.spec = dict(spec)
        self.norm, self.layer = NORMS[spec["norm"]](width), LAYERS[kind](spec, width)
        self.dropout = nn.Dropout(spec["dropout"])
        if spec["scale"] == "layer":
            self.gain = nn.Parameter(torch.full((width,), 0.7))
        elif spec["scale"] == "scalar":
            self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        if self.spec["post_norm"]:
            return self.norm(x + self._inner(x))
        return x + self._inner(self.norm(x))

    def _inner(self, x: Tensor) -> Tensor:
        if self.spec["checkpoint"] and self.training:
            y = checkpoint(self.layer, x, use_reentrant=False)
            assert isinstance(y, Tensor)
        else:
            y = self.layer(x)
        if self.spec["in_place"]:
            y = y.mul_(1.25).add_(0.01)
        y = self.dropout(y)
        return y if self.spec["scale"] == "none" else y * self.gain


class OwnLinear(nn.Module):
    """A linear function of parameters that no linear layer holds."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(fan_in, fan_out) * 0.3)
        self.offset = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Patches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, stride=3)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image).flatten(2).mT  # 2 x 2 patches: TIME of them


class Frames(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(IN, 2 * width, 3, padding=1)
        self.conv2 = nn.Conv1d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(F.gelu(self.conv1(x.mT))).mT


STEMS: dict[str, tuple[str, Callable[[int], nn.Module]]] = {
    "linear": ("x", lambda width: nn.Linear(IN, width)),
    "embedding": ("ids", lambda width: nn.Embedding(VOCABULARY, width)),
    "padded_embedding": ("ids", lambda width: nn.Embedding(VOCABULARY, width, padding_idx=0)),
    "own": ("x", lambda width: OwnLinear(IN, width)),
    "patches": ("image", Patches),
    "frames": ("x", Frames),
}


class Network(nn.Module):
    """A stem, blocks, a norm and a head, with whatever else the description says."""

    count: Tensor
    noise: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        width, self.spec, self.step = spec["width"], dict(spec), 0
        self.reads, stem = STEMS[spec["stem"]]
        self.stem = stem(width)
        if spec["positions"] == "parameter":
            self.positions = nn.Parameter(torch.randn(1, TIME, width) * 0.3)
        elif spec["positions"] == "embedding":
            self.numbered = nn.Embedding(TIME, width)
        elif spec["positions"] == "buffer":
            self.register_buffer("noise", torch.randn(TIME, width), persistent=False)
        self.blocks = nn.ModuleList(Block(spec, kind) for kind in spec["blocks"].split("+"))
        self.norm = NORMS["rms" if spec["norm"] == "rms" else "layer"](width)
        self.head = nn.Linear(width, VOCABULARY, bias=spec["bias"])
        if spec["second_head"]:
            self.second_head = nn.Linear(width, 3)
        if spec["unused"] == "module":
            self.unused = nn.Linear(3, 5)
        elif spec["unused"] == "parameter":
            self.unused_scale = nn.Parameter(torch.ones(3))
        self.calls = 0
        if spec["counter"] == "buffer":
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
        if spec["closure"]:
            first = self.blocks[0]
            self.called = lambda x: first(x) * 0.5
        self._tie(spec["tie"])
        self._freeze(spec["frozen"])

    def _tie(self, tie: str) -> None:
        if tie == "head" and isinstance(self.stem, nn.Embedding):
            self.head.weight = self.stem.weight
        elif tie in {"layers", "blocks"}:
            first, last = self.blocks[0], self.blocks[-1]
            if tie == "blocks" and len(self.blocks) > 1:
                self.blocks[-1] = first
                return
            theirs = dict(last.named_parameters())
            for name, parameter in first.named_parameters():
                fits = name in theirs and theirs[name].shape == parameter.shape
                if fits and parameter.dim() > 1 and "parametrizations" not in name:
                    owner = last.get_submodule(name.rpartition(".")[0])
                    setattr(owner, name.rpartition(".")[2], parameter)
                    return

    def _freeze(self, frozen: str) -> None:
        for name, parameter in self.named_parameters():
            whole = {
                "stem": name.startswith("stem"),
                "block": name.startswith("blocks.0."),
                "norms": "norm" in name,
                "matrices": parameter.dim() > 1 and not name.startswith("head"),
            }
            if whole.get(frozen, False):
                parameter.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        x = self._embedded(batch[self.reads])
        x = self._with_state_of_its_own(x)
        first, extra = x, torch.zeros(())
        rows, layout = len(x), self.spec["layout"]
        if layout == "folded":
            x = x.flatten(0, 1)
        elif layout == "time":
            x = x.transpose(0, 1)
        for _ in range(2 if self.spec["twice"] else 1):
            for index, block in enumerate(self.blocks):
                if self.spec["skips_by_step"] and index == 0 and self.step % 2:
                    continue
                x = block(x)
                if self.spec["auxiliary"]:
                    extra = extra + 0.1 * x.square().mean()
        if self.spec["closure"]:
            x = x + self.called(x)
        if layout == "folded":
            x = x.unflatten(0, (rows, -1))
        elif layout == "time":
            x = x.transpose(0, 1)
        if self.spec["functional"]:
            x = self._with_a_weight_of_a_block(x)
        if self.spec["long_skip"]:
            x = x + first
        return self._loss(self.norm(x), extra, batch)

    def _with_state_of_its_own(self, x: Tensor) -> Tensor:
        """Scale by what every call of one device changes once."""
        if self.spec["counter"] == "buffer":
            self.count += 1
            x = x * (1 + 0.1 * self.count.to(x.dtype))
        elif self.spec["counter"] == "attribute":
            self.calls += 1
            x = x * (1 + 0.1 * self.calls)
        return x * float(numpy.random.rand()) if self.spec["numpy"] else x

    def _with_a_weight_of_a_block(self, x: Tensor) -> Tensor:
        for parameter in self.blocks[0].parameters():
            if parameter.dim() == 2 and x.shape[-1] in parameter.shape:
                weight = parameter if parameter.shape[1] == x.shape[-1] else parameter.T
                return x + 0.1 * F.linear(x, weight) @ weight
        return x

    def _embedded(self, given: Tensor) -> Tensor:
        if self.spec["strided"] and given.is_floating_point():
            given = given.mT.contiguous().mT
        x = self.stem(given)
        match self.spec["positions"]:
            case "parameter":
                x = x + self.positions
            case "embedding":
                x = x + self.numbered(torch.arange(x.shape[1]))
            case "buffer":
                x = x + self.noise
            case _:
                pass
        return x

    def _loss(self, x: Tensor, extra: Tensor, batch: Batch) -> Tensor | dict[str, Tensor]:
        z = self.head(x)
        loss = LOSSES[self.spec["loss"]](z, batch)
        loss = loss + extra if self.spec["auxiliary"] else loss
        if not self.spec["second_head"]:
            return loss
        return loss + 0.3 * self.second_head(x.mean(1)).tanh().square().mean()


def _masked(z: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(z.mT, batch["target"], reduction="none")
    mask = (batch["target"] > 3).to(z.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _contrast(z: Tensor, batch: Batch) -> Tensor:
    a, b = F.normalize(z[:, 0], dim=-1), F.normalize(z[:, 1], dim=-1)
    return F.cross_entropy(3 * a @ b.T, torch.arange(len(a)))


def _ignoring(z: Tensor, batch: Batch) -> Tensor:
    target = batch["target"].masked_fill(batch["target"] < 4, -100)
    target = torch.where((target == -100).all(), batch["target"], target)
    return F.cross_entropy(z.flatten(0, 1), target.flatten(), label_smoothing=0.1)


LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "squares": lambda z, batch: F.mse_loss(z, batch["y"]),
    "tokens": lambda z, batch: F.cross_entropy(z.flatten(0, 1), batch["target"].flatten()),
    "ignoring": _ignoring,
    "last_token": lambda z, batch: F.cross_entropy(z[:, -1], batch["target"][:, -1]),
    "shifted": lambda z, batch: F.cross_entropy(z[:, :-1].mT, batch["target"][:, 1:]),
    "sum": lambda z, batch: 0.05 * F.mse_loss(z, batch["y"], reduction="sum"),
    "masked": _masked,
    "contrast": _contrast,
}


def build(spec: Spec) -> nn.Module:
    return Network(spec)


def batches(spec: Spec) -> list[Batch]:
    """Return the batches of a description, with the tensors that it reads."""
    generator, rows = torch.Generator().manual_seed(3), spec["rows"]
    found: list[Batch] = []
    for _ in range(spec["steps"]):
        every = {
            "x": torch.randn(rows, TIME, IN, generator=generator, dtype=torch.float64),
            "ids": torch.randint(0, VOCABULARY, (rows, TIME), generator=generator),
            "image": torch.randn(rows, 3, 6, 6, generator=generator, dtype=torch.float64),
            "y": torch.randn(rows, TIME, VOCABULARY, generator=generator, dtype=torch.float64),
            "target": torch.randint(0, VOCABULARY, (rows, TIME), generator=generator),
        }
        target = "y" if spec["loss"] in {"squares", "sum"} else "target"
        found.append({name: every[name] for name in (STEMS[spec["stem"]][0], target)})
    return found
