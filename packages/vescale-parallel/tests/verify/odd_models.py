"""Small models whose parameters are used in ways that are easily overlooked."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, FEATURES, ROWS = 12, 24, 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stacked(nn.Module):
    """Three blocks, around which models differ."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x)


class ConvolutionStem(Stacked):
    """The second convolution's bias is one of all ranks together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, FEATURES, 3, padding=1)
        self.second = nn.Conv1d(FEATURES, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.gelu(self.first(x.transpose(1, 2)))).transpose(1, 2)
        return self.through(x)


class FunctionalHead(Stacked):
    """Layers that are no modules, of parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.zeros(24, 12)), nn.Parameter(torch.zeros(24))
        self.w2, self.b2 = nn.Parameter(torch.zeros(12, 24)), nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(F.linear(self.through(x), self.w1, self.b1))
        return F.linear(x, self.w2, self.b2)


class ScaledHead(Stacked):
    """A whole parameter that meets what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.through(x))) * self.scale)


class ReadOutside(Stacked):
    """A penalty on weights, and one row of them, outside of their blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.blocks[0], self.blocks[-1]
        assert isinstance(first, Block)
        assert isinstance(last, Block)
        return self.through(x) + last.down.weight.mean() + first.up.weight[0].sum()


class CalledTwice(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return self.through(self.through(x))


class CalledByMethods(Stacked):
    """Neither blocks nor their layers are called as modules."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, Block)
            x = x + block.down.forward(F.gelu(block.up.forward(block.norm.forward(x))))
        return x


class Borrowing(Stacked):
    """Another method than forward calls layers of a block."""

    def embed(self, x: Tensor) -> Tensor:
        first = self.blocks[0]
        assert isinstance(first, Block)
        return first.down(first.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.through(self.embed(x))


class PlainLists(nn.Module):
    """Blocks in a Python list, beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.plain = [(self.first, 0.5), (self.second, 2.0), (self.first, 1.0)]

    def forward(self, x: Tensor) -> Tensor:
        for block, scale in self.plain:
            x = block(x) * scale
        return x


class ParameterLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [(FEATURES, WIDTH), (WIDTH, FEATURES)] * 2
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = x + F.linear(F.linear(x, up).relu(), down)
        return x


class ParameterDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {
                "up": nn.Parameter(torch.zeros(WIDTH, FEATURES)),
                "down": nn.Parameter(torch.zeros(FEATURES, WIDTH)),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weights["up"]).relu() @ self.weights["down"]


class LayerScales(Stacked):
    """Scales of the width and of what is cut, outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(3)])
        self.inner = nn.ParameterList([nn.Parameter(torch.zeros(FEATURES)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block, outer, inner in zip(self.blocks, self.outer, self.inner, strict=True):
            assert isinstance(block, Block)
            x = x + outer * block.down(F.gelu(block.up(block.norm(x))) * inner)
        return x


class Modulated(Stacked):
    """A condition that meets what is cut in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.condition(x.mean(1, keepdim=True))
        for block in self.blocks:
            assert isinstance(block, Block)
            x = x + block.down(F.gelu(block.up(block.norm(x))) * scale)
        return x


class Parametrized(Stacked):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.utils.parametrizations.weight_norm(block.up)
            nn.utils.parametrizations.spectral_norm(block.down)


class NormedByHooks(Stacked):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.utils.spectral_norm(block.down)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        # Deprecated, and still in models that exist.
        hooked = getattr(nn.utils, "weight_norm", None)
        if hooked is not None:
            hooked(last.up)


class Heads(Stacked):
    """Two tasks on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict(
            {
                name: nn.Sequential(
                    nn.Linear(WIDTH, FEATURES), nn.GELU(), nn.Linear(FEATURES, WIDTH)
                )
                for name in ("first", "second")
            }
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.through(x)
        return {name: head(x) for name, head in self.tasks.items()}


class OneTask(Heads):
    """The example reaches one of the heads."""

    def forward(self, x: Tensor, task: str = "first") -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.tasks[task](self.through(x))


class Branching(Stacked):
    """Values decide how weights are used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        if bool(x.mean() > 0):
            return self.down(self.up(x).relu())
        return self.up(x) @ self.down.weight.t()


class Recomputed(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Cosine(Stacked):
    """Classes are compared by angle, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(self.through(x), dim=-1)
        return F.linear(x, F.normalize(self.classes, dim=-1)) * self.temperature.exp()


class Statistics(Stacked):
    """What is made of logits besides."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits = self.head(self.through(x)) * self.temperature
        return {"probabilities": logits.softmax(-1), "best": logits.argmax(-1), "logits": logits}


class Buffered(Stacked):
    """A buffer that is as long as what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(FEATURES) % 3)
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.through(x)) * self.get_buffer("mask"))


class SqueezeExcite(nn.Module):
    """Convolutions, and a gate of what they give: of linear layers or of convolutions."""

    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 8, 3)
        self.norm, self.head = nn.BatchNorm2d(12), nn.Linear(8, 10)
        self.squeeze = nn.Linear(12, 24) if linear else nn.Conv2d(12, 24, 1)
        self.excite = nn.Linear(24, 12) if linear else nn.Conv2d(24, 12, 1)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        if self.linear:
            gate = self.excite(self.squeeze(x.mean((2, 3))).relu()).sigmoid()[..., None, None]
        else:
            mean = x.mean((2, 3), keepdim=True)
            gate = self.excite(self.squeeze(mean).relu()).sigmoid()
        return self.head(self.second(x * gate).relu().mean((2, 3)))


class Positions(nn.Module):
    """Learned positions of two kinds, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(ROWS, WIDTH), nn.Embedding(64, WIDTH)
        self.positions = nn.Parameter(torch.zeros(1, 64, WIDTH))
        self.stack, self.head = Stacked(), nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed(ids) + self.positions[:, :length] + self.table(torch.arange(length))
        return self.head(self.stack(x))


class TiedModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stack = nn.Embedding(ROWS, WIDTH), Stacked()
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.stack(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class TiedByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stack = nn.Embedding(ROWS, WIDTH), Stacked()

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.stack(self.embed(ids)), self.embed.weight)


class SharedKeys(nn.Module):
    """Attention with two key heads for four query heads, and a bias by distance (ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.key_heads, self.features = 4, 2, 6
        self.q = nn.Linear(WIDTH, 24, bias=False)
        self.k, self.v = nn.Linear(WIDTH, 12, bias=False), nn.Linear(WIDTH, 12, bias=False)
        self.out = nn.Linear(24, WIDTH, bias=False)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5).view(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.features)).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        k, v = (y.repeat_interleave(self.heads // self.key_heads, 1) for y in (k, v))
        place = torch.arange(x.shape[1])
        bias = -self.get_buffer("slopes") * (place[:, None] - place).abs()
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.features) + bias
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TiedByClosure(nn.Module):
    """As in x-transformers: the head is a function that reads the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"emb": nn.Embedding(ROWS, WIDTH)})
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.LayerNorm(WIDTH), SharedKeys(), Block()]) for _ in range(3)]
        )
        self.to_logits = lambda x: x @ self.embed.get_parameter("emb.weight").t()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed["emb"](ids)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            for module in layer:
                x = module(x)
        return F.cross_entropy(self.to_logits(x).flatten(0, 1), ids.flatten())


class ThreeHeads(nn.Module):
    """Attention by hand, of three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class WithThreeHeads(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([ThreeHeads() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for attention, block in zip(self.attention, self.blocks, strict=True):
            x = block(attention(x))
        return x
