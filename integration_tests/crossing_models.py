"""Tiny models whose pipelines are cut where more than one hidden state crosses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .families import CONFIGS, hugging_face
from .models import HandWritten

ROWS, LENGTH, VOCABULARY = 8, 6, 64


class _Exchange(nn.Module):
    """A block of two streams, with keywords, None and arguments that are no tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, pair: tuple[Tensor, Tensor], mask: Tensor, *, scale: float, cache: None = None
    ) -> dict[str, Any]:
        left, right = pair
        left = left + self.left(F.gelu(right)) * mask
        return {"pair": (left, right + self.right(left) * scale), "cache": cache}


class TwoStreams(nn.Module):
    """Two streams by hand, a skip from the embedding to the head, code between the blocks."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(_Exchange(width) for _ in range(depth))
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = (input_ids != 0).unsqueeze(-1).to(self.embed.weight.dtype)
        left = self.embed(input_ids)
        right = self.positions(torch.arange(LENGTH, device=input_ids.device)).expand_as(left)
        first = left * 2  # needed far behind, and computed by no module
        for block in self.blocks:
            found = block((left, right), mask, scale=0.5)
            left, right = found["pair"]
            left = left + first.tanh() * 0.1
        logits = self.head(torch.cat([left + self.embed.weight.new_ones(()), right + first], -1))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "first": first, "left": left}


class _Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.attend(y, y, y, need_weights=False)[0]


class Parts(nn.Module):
    """Layers that are lists of modules, which nothing calls, with residuals around them."""

    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.ModuleList([_Attend(width), feed_forward(width), nn.Dropout(0.0)])
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            attend, feed, dropout = cast("nn.ModuleList", layer)
            x = attend(x) + x
            x = dropout(feed(x)) + x
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class NamedParts(nn.Module):
    """Layers that are dicts of modules, which are not called in the order of definition."""

    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(self._layer(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    @staticmethod
    def _layer(width: int) -> nn.Module:
        norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        return nn.ModuleDict(
            {"norms": norms, "feed": feed_forward(width), "mix": nn.Linear(width, width)}
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in cast("Iterable[nn.ModuleDict]", self.layers):
            norms = cast("nn.ModuleList", layer["norms"])
            x = layer["mix"](norms[0](x)) + x
            x = layer["feed"](norms[1](x)) + x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Mixing(nn.Module):
    """Parameters that the model itself holds and its loop uses, layer by layer, between blocks."""

    class Asks(nn.Module):
        """A block that is given a query, which is a parameter."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.attend, self.feed = _Attend(width), feed_forward(width)

        def forward(self, x: Tensor, query: Tensor) -> Tensor:
            x = self.attend(x) + x * query
            return self.feed(x) + x

    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.scales, self.firsts = (nn.Parameter(torch.rand(depth)) for _ in range(2))
        self.gates = nn.ParameterList(torch.randn(width) for _ in range(depth))
        self.queries = nn.ParameterDict({f"of_{i}": torch.randn(width) for i in range(depth)})
        self.values = nn.ModuleDict(
            {str(i): nn.Embedding(VOCABULARY, width) for i in range(0, depth, 2)}
        )
        self.layers = nn.ModuleList(self.Asks(width) for _ in range(depth))
        self.bias, self.unused = nn.Parameter(torch.zeros(VOCABULARY)), nn.Parameter(torch.ones(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = first = F.layer_norm(self.embed(input_ids), (self.embed.embedding_dim,))
        scales = self.scales.sigmoid() * 2  # depends on parameters alone, is used by many layers
        for i, layer in enumerate(self.layers):
            x = scales[i] * x + self.firsts[i] * first
            if str(i) in self.values:
                x = x + self.values[str(i)](input_ids) * self.gates[i]
            x = layer(x, self.queries[f"of_{i}"])
        logits = F.linear(x, self.embed.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )


class Written(nn.Module):
    """Code and blocks that write to tensors of others; blocks of two classes in turns."""

    class Adds(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            y = self.linear(x)
            seen += y.detach().mean(-1, keepdim=True)
            return x + y.tanh()

    class Scales(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(width))

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            return x * self.scale + seen

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        kinds = (Written.Adds, Written.Scales)
        self.blocks = nn.ModuleList(kinds[i % 2](width) for i in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x += 0.5
        start = x.new_zeros(*input_ids.shape, 2)
        start[..., 0] = x.sum(-1)
        seen = torch.zeros_like(x[..., :1])
        for block in self.blocks:
            x = block(x, seen)
        logits = self.head(x + start.mean(-1, keepdim=True))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Llava(nn.Module):
    """A tower over an image's patches, whose outputs take the place of tokens."""

    def __init__(self, tower: int = 2, depth: int = 2, width: int = 8) -> None:
        super().__init__()

        def layer() -> nn.Module:
            return nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)

        self.patches = nn.Linear(12, width)
        self.vision_layers = nn.ModuleList(layer() for _ in range(tower))
        self.projector = nn.Linear(width, width)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor) -> Tensor:
        image = self.patches(pixel_values)
        for each in self.vision_layers:
            image = each(image)
        image = self.projector(image)
        embedded = self.embed(input_ids)
        is_image = (input_ids == 1).unsqueeze(-1).expand_as(embedded)
        assert embedded[is_image].numel() == image.numel()
        x = embedded.masked_scatter(is_image, image.to(embedded.dtype))
        for each in self.layers:
            x = each(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(rows: int = ROWS) -> dict[str, Tensor]:
    """Return tokens, and targets of which every row ignores another number."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=generator)
    labels = ids.roll(-1, 1).clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
    return {"input_ids": ids, "labels": labels}


def _llava_batch() -> dict[str, Tensor]:
    batch = tokens()
    batch["input_ids"][:, :2] = 1
    generator = torch.Generator().manual_seed(6)
    return {**batch, "pixel_values": torch.randn(ROWS, 2, 12, generator=generator)}


def _whisper_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(ROWS, 8, 40, generator=generator)
    return {"input_features": features, "labels": tokens()["labels"]}


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "two_streams": (lambda depth: TwoStreams(depth), tokens),
    "parts": (lambda depth: Parts(depth), tokens),
    "named_parts": (lambda depth: NamedParts(depth), tokens),
    "mixing": (lambda depth: Mixing(depth), tokens),
    "written": (lambda depth: Written(depth), tokens),
    "llava": (lambda depth: Llava(depth // 2, depth - depth // 2), _llava_batch),
    "experts": (lambda depth: _causal("mixtral", depth), tokens),
    "opt": (lambda depth: _causal("opt", depth), tokens),
    "t5": (lambda depth: _encoder_decoder("t5", depth), tokens),
    "bart": (lambda depth: _encoder_decoder("bart", depth), tokens),
    "whisper": (lambda depth: _encoder_decoder("whisper", depth), _whisper_batch),
}


class _OfBatch(nn.Module):
    """A model of a batch, called by its names."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.model = HandWritten(vocabulary=VOCABULARY, depth=depth)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model({"input_ids": input_ids, "labels": labels})


def _vit_batch() -> dict[str, Tensor]:
    pixels = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(8))
    return {"pixel_values": pixels, "labels": torch.arange(ROWS) % 2}


# Of which a hidden state crosses, in some with a mask; GPT-2's and BERT's heads are tied.
ONE_STREAM: dict[str, tuple[Callable[[int], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "llama": (lambda depth: _causal("llama", depth), tokens),
    "gpt2": (lambda depth: hugging_face("gpt2", "sdpa", **_of_depth("gpt2", depth)), tokens),
    "bert": (lambda depth: hugging_face("bert", "sdpa", **_of_depth("bert", depth)), tokens),
    "vit": (lambda depth: hugging_face("vit", "sdpa", **_of_depth("vit", depth)), _vit_batch),
    "nanogpt": (_OfBatch, tokens),
}


def _of_depth(name: str, depth: int) -> dict[str, Any]:
    key = "n_layer" if name == "gpt2" else "num_hidden_layers"
    sizes = {"vocab_size": VOCABULARY} if name == "gpt2" else {}
    return {**CONFIGS[name], key: depth, **sizes}


def _causal(name: str, depth: int) -> nn.Module:
    sizes = {"num_hidden_layers": depth, "tie_word_embeddings": False, "attention_dropout": 0.0}
    return hugging_face(name, "sdpa", **{**CONFIGS[name], **sizes})


def _encoder_decoder(name: str, depth: int) -> nn.Module:
    half = depth // 2
    keys = {"t5": ("num_layers", "num_decoder_layers")}.get(
        name, ("encoder_layers", "decoder_layers")
    )
    sizes = {**CONFIGS[name], keys[0]: half, keys[1]: depth - half, "tie_word_embeddings": False}
    if name != "t5":
        sizes |= {"attention_dropout": 0.0, "activation_dropout": 0.0}
    return hugging_face(name, "sdpa" if name != "t5" else "eager", **sizes)


def make(name: str, depth: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of so many blocks, and a batch whose keys are its arguments."""
    torch.manual_seed(0)
    build, batch_of = {**MODELS, **ONE_STREAM}[name]
    model, batch = build(depth).to(dtype), batch_of()
    return model, {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
