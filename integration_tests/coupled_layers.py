"""Layers that normalise over the batch, layouts without rows outermost, models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]


def _image_batch(rows: int, generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 5, (rows,), generator=generator),
    }


def _vector_batch(rows: int, generator: torch.Generator) -> Batch:
    return {
        "x": 2 + torch.randn(rows, 6, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 5, (rows,), generator=generator),
    }


def _sequence_batch(rows: int, generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(rows, 5, 6, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 5, (rows, 5), generator=generator),
    }


def _time_first_batch(rows: int, generator: torch.Generator) -> Batch:
    return {k: v.transpose(0, 1) for k, v in _sequence_batch(rows, generator).items()}


def _token_batch(rows: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, 40, (rows, 6), generator=generator)
    lengths = torch.randint(2, 7, (rows,), generator=generator)
    mask = torch.arange(6)[None] < lengths[:, None]
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }


def _pair_batch(rows: int, generator: torch.Generator) -> Batch:
    batch = _token_batch(rows, generator)
    batch["input_ids"][:, -1] = 49407 % 40  # the end of the text, which CLIP pools at
    batch["pixel_values"] = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    del batch["labels"]
    return batch


def _speech_batch(rows: int, generator: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(rows, 160, generator=generator, dtype=torch.float64),
        "labels": torch.randint(1, 8, (rows, 3), generator=generator),
    }


def _spectrum_batch(rows: int, generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(rows, 8, 24, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, 40, (rows, 5), generator=generator),
    }


# Norms


class _Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (x + self.norm2(self.conv2(y))).relu()


class ResNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, bias=False), norm(8)
        self.blocks = nn.ModuleList(_Residual(norm) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, batch: Batch) -> Tensor:
        x = self.norm(self.stem(batch["x"])).relu()
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), batch["target"])


class Perceptron(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 8), norm(8), nn.Linear(8, 5)
        )

    def forward(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.layers(batch["x"]), batch["target"])


class FrozenNorm(Perceptron):
    """Its batch norms stay in eval mode while the rest is trained."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class FunctionalNorm(nn.Module):
    """Calls the function with buffers of its own."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, batch: Batch) -> Tensor:
        x = F.batch_norm(self.up(batch["x"]), self.mean, self.var, training=self.training)
        return F.cross_entropy(self.head(x), batch["target"])


class RunningMean(nn.Module):
    """Keeps a mean of its inputs over all rows, as codebooks and normalised observations do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        x = self.up(x - self.mean).relu()
        return F.cross_entropy(self.head(x), batch["target"])


# Layouts


class TimeFirst(nn.Module):
    """Its encoder wants (time, rows, features); a batch comes with rows or with time first."""

    def __init__(self, dropout: float, *, given: str = "rows") -> None:
        super().__init__()
        self.given = given
        self.stem = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, batch: Batch) -> Tensor:
        x, target = batch["x"], batch["target"]
        if self.given == "rows":
            x, target = x.transpose(0, 1), target.transpose(0, 1)
        z = self.head(self.encoder(self.stem(x)))
        return F.cross_entropy(z.flatten(0, 1), target.flatten())


class Translator(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        x = self.stem(batch["x"]).transpose(0, 1)
        z = self.head(self.transformer(x, x[:3]))
        return F.cross_entropy(z.flatten(0, 1), batch["target"][:, :3].T.flatten())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], dropout: float, **kinds: bool) -> None:
        super().__init__()
        self.rows_first = kinds.get("batch_first", False)
        self.rnn = kind(6, 8, num_layers=2, dropout=dropout, **kinds)
        self.head = nn.Linear(8 * (2 if kinds.get("bidirectional") else 1), 5)

    def forward(self, batch: Batch) -> Tensor:
        x, target = batch["x"], batch["target"]
        if not self.rows_first:
            x, target = x.transpose(0, 1), target.transpose(0, 1)
        return F.cross_entropy(self.head(self.rnn(x)[0]).flatten(0, 1), target.flatten())


class Folded(nn.Module):
    """Folds rows and time into one dim, either outermost, and drops out there."""

    def __init__(self, dropout: float, *, time_outer: bool) -> None:
        super().__init__()
        self.time_outer, self.dropout = time_outer, dropout
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, batch: Batch) -> Tensor:
        x, target = batch["x"], batch["target"]
        if self.time_outer:
            x, target = x.transpose(0, 1), target.transpose(0, 1)
        x = self.down(self.up(x.reshape(-1, 6)).relu())
        x = F.dropout(x, self.dropout, self.training)
        return F.cross_entropy(self.head(x), target.reshape(-1))


# transformers


class Calls(nn.Module):
    """A model of transformers that takes a batch as keywords; what it gives is its own loss."""

    def __init__(self, model: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.model, self.keywords = model, keywords

    def forward(self, batch: Batch) -> Tensor:
        output = self.model(**batch, **self.keywords)
        return output["loss"] if "loss" in output else output[0]


_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
_TEXT = {**_TOWER, "vocab_size": 40, "max_position_embeddings": 8, "bos_token_id": 0}
_SIGHT = {**_TOWER, "image_size": 8, "patch_size": 4}


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={**_TEXT, "eos_token_id": 2, "pad_token_id": 1}, vision_config=_SIGHT,
        projection_dim=8,
    )  # fmt: skip
    return Calls(CLIPModel(config), return_loss=True)


def _siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    text = {**_TEXT, "eos_token_id": 2, "pad_token_id": 1, "projection_size": 16}
    config = SiglipConfig(text_config=text, vision_config=_SIGHT)
    return Calls(SiglipModel(config), return_loss=True)


def _mixture(name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    sizes = {
        **_TOWER, "vocab_size": 40, "num_key_value_heads": 2, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.1,
        "experts_implementation": "eager",
    }  # fmt: skip
    own = {
        "mixtral": {"num_local_experts": 4},
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    }[name]
    return Calls(AutoModelForCausalLM.from_config(_config(name, **sizes, **own)))


def _mixtral() -> nn.Module:
    return _mixture("mixtral")


def _qwen3_moe() -> nn.Module:
    return _mixture("qwen3_moe")


def _wav2vec2() -> nn.Module:
    from transformers import AutoModelForCTC

    sizes = {
        **_TOWER, "vocab_size": 8, "conv_dim": (8, 8), "conv_stride": (4, 2),
        "conv_kernel": (4, 2), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.3, "mask_time_length": 2, "ctc_zero_infinity": True,
        "ctc_loss_reduction": "mean", "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "feat_proj_dropout": 0.0, "final_dropout": 0.0, "activation_dropout": 0.0,
        "layerdrop": 0.0,
    }  # fmt: skip
    return Calls(AutoModelForCTC.from_config(_config("wav2vec2", **sizes)))


def _whisper() -> nn.Module:
    from transformers import AutoModelForSpeechSeq2Seq

    sizes = {
        "vocab_size": 40, "num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2,
        "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 12,
        "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "dropout": 0.0, "use_cache": False, "suppress_tokens": [],
        "begin_suppress_tokens": [],
    }  # fmt: skip
    return Calls(AutoModelForSpeechSeq2Seq.from_config(_config("whisper", **sizes)))


def _resnet() -> nn.Module:
    from transformers import AutoModelForImageClassification

    sizes = {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
        "num_labels": 5,
    }  # fmt: skip
    return Calls(AutoModelForImageClassification.from_config(_config("resnet", **sizes)))


def _config(name: str, **sizes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(name, **sizes)


def _named(batch: Callable[[int, torch.Generator], Batch], **names: str) -> Any:
    def renamed(rows: int, generator: torch.Generator) -> Batch:
        return {names.get(name, name): tensor for name, tensor in batch(rows, generator).items()}

    return renamed


@dataclass(frozen=True)
class Model:
    """A model, its batches, and whether its rows are coupled.

    Attributes:
        build: Makes it.
        batch: Makes a batch of so many rows.
        meet: Whether a part of the batch alone gives other numbers: then a refusal will do.
        casts: Whether it casts to float32 by itself.
        row_dim: Where in a batch the rows are.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    meet: bool = True
    casts: bool = False
    row_dim: int = 0


MODELS: dict[str, Model] = {
    "batch_norm_2d": Model(lambda: ResNet(nn.BatchNorm2d), _image_batch),
    "batch_norm_1d": Model(lambda: Perceptron(nn.BatchNorm1d), _vector_batch),
    "batch_norm_cumulative": Model(
        lambda: Perceptron(lambda n: nn.BatchNorm1d(n, momentum=None)), _vector_batch
    ),
    "batch_norm_plain": Model(
        lambda: Perceptron(lambda n: nn.BatchNorm1d(n, affine=False)), _vector_batch
    ),
    "batch_norm_untracked": Model(
        lambda: ResNet(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), _image_batch
    ),
    "batch_norm_frozen": Model(
        lambda: FrozenNorm(nn.BatchNorm1d).train(), _vector_batch, meet=False
    ),
    "batch_norm_function": Model(FunctionalNorm, _vector_batch),
    "running_mean": Model(RunningMean, _vector_batch),
    "sync_batch_norm": Model(lambda: ResNet(nn.SyncBatchNorm), _image_batch),
    "group_norm": Model(lambda: ResNet(lambda n: nn.GroupNorm(2, n)), _image_batch, meet=False),
    "instance_norm": Model(lambda: ResNet(nn.InstanceNorm2d), _image_batch, meet=False),
    "instance_norm_tracked": Model(
        lambda: ResNet(lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True)),
        _image_batch,
    ),
    "time_first": Model(lambda: TimeFirst(0.0), _sequence_batch, meet=False),
    "time_first_dropout": Model(lambda: TimeFirst(0.1), _sequence_batch),
    # Refused: nothing but the caller knows that the second dim of all tensors is the rows.
    "time_first_given": Model(lambda: TimeFirst(0.0, given="time"), _time_first_batch, row_dim=1),
    "time_first_given_dropout": Model(
        lambda: TimeFirst(0.1, given="time"), _time_first_batch, row_dim=1
    ),
    "translator": Model(lambda: Translator(0.0), _sequence_batch, meet=False),
    "translator_dropout": Model(lambda: Translator(0.1), _sequence_batch),
    "lstm": Model(lambda: Recurrent(nn.LSTM, 0.0), _sequence_batch, meet=False),
    "lstm_dropout": Model(lambda: Recurrent(nn.LSTM, 0.2), _sequence_batch),
    "gru_rows_first": Model(
        lambda: Recurrent(nn.GRU, 0.0, batch_first=True), _sequence_batch, meet=False
    ),
    "gru_rows_first_dropout": Model(
        lambda: Recurrent(nn.GRU, 0.2, batch_first=True, bidirectional=True), _sequence_batch
    ),
    "folded": Model(lambda: Folded(0.0, time_outer=True), _sequence_batch, meet=False),
    "folded_dropout_rows_outer": Model(
        lambda: Folded(0.2, time_outer=False), _sequence_batch, meet=False
    ),
    "folded_dropout_time_outer": Model(lambda: Folded(0.2, time_outer=True), _sequence_batch),
    "clip": Model(_clip, _pair_batch),
    "siglip": Model(_siglip, _pair_batch),
    "mixtral": Model(_mixtral, _token_batch, casts=True),
    "qwen3_moe": Model(_qwen3_moe, _token_batch, casts=True),
    "wav2vec2": Model(_wav2vec2, _speech_batch, casts=True),
    "whisper": Model(_whisper, _spectrum_batch, meet=False, casts=True),
    "resnet": Model(_resnet, _named(_image_batch, x="pixel_values", target="labels"), casts=True),
}


def build(name: str) -> nn.Module:
    return MODELS[name].build()


def batches(name: str, rows: int, steps: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [MODELS[name].batch(rows, generator) for _ in range(steps)]
