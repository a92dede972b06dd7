"""Small modules of every make, from a flat description that can be drawn, printed and shrunk."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .fuzz_layers import LAYERS, NORMS, Spec, damped

Batch = dict[str, Tensor]
IN, VOCABULARY = 6, 11


class Block(nn.Module):
    def __init__(self, spec: Spec, kind: str) -> None:
        super().__init__()
        width = spec["width"]
        self.spec = dict(spec)
        self.norm, self.layer = NORMS[spec["norm"]](width), LAYERS[kind](spec, width)
        self.dropout = nn.Dropout(spec["dropout"])
        if spec["scale"] == "layer":
            dtype = torch.float32 if spec["single"] else None
            self.gain = nn.Parameter(torch.full((width,), 0.7, dtype=dtype))
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
        y = damped(self.spec, "layer", self.dropout(y))
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
        return self.conv(image).flatten(2).mT  # 2 x 2 patches: four positions


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
        time = spec["time"]
        self.reads, stem = STEMS[spec["stem"]]
        self.stem = stem(width)
        if spec["positions"] == "parameter":
            self.positions = nn.Parameter(torch.randn(1, time, width) * 0.3)
        elif spec["positions"] == "embedding":
            self.numbered = nn.Embedding(time, width)
        elif spec["positions"] == "buffer":
            self.register_buffer("noise", torch.randn(time, width), persistent=False)
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
                x = BETWEEN[self.spec["between"]](x)
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


# Code of the model itself, over the sequence that its blocks work on.
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "max": lambda x: x + 0.1 * x.amax(1, keepdim=True),
    "softmax": lambda x: x * x.softmax(1),
    "cumsum": lambda x: x + 0.1 * x.cumsum(1),
    "flip": lambda x: x + 0.1 * x.flip(1),
    "roll": lambda x: x + 0.1 * x.roll(1, 1),
    "last": lambda x: x + 0.1 * x[:, -1:],
    "length": lambda x: x * (1 + 0.01 * x.shape[1]),
    "counted": lambda x: x + 0.01 * torch.arange(x.shape[1])[:, None],
}


def build(spec: Spec) -> nn.Module:
    return Network(spec)


def batches(spec: Spec) -> list[Batch]:
    """Return the batches of a description, with the tensors that it reads."""
    generator, rows, time = torch.Generator().manual_seed(3), spec["rows"], spec["time"]
    found: list[Batch] = []
    for _ in range(spec["steps"] * spec["accumulate"]):
        every = {
            "x": torch.randn(rows, time, IN, generator=generator, dtype=torch.float64),
            "ids": torch.randint(0, VOCABULARY, (rows, time), generator=generator),
            "image": torch.randn(rows, 3, 6, 6, generator=generator, dtype=torch.float64),
            "y": torch.randn(rows, time, VOCABULARY, generator=generator, dtype=torch.float64),
            "target": torch.randint(0, VOCABULARY, (rows, time), generator=generator),
        }
        target = "y" if spec["loss"] in {"squares", "sum"} else "target"
        found.append({name: every[name] for name in (STEMS[spec["stem"]][0], target)})
    return found
