"""Tiny models of many makes, each with a batch, that tensor parallelism is compared on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .models import HandWritten

ROWS, LENGTH, VOCABULARY = 4, 12, 64
ONE = torch.ones(())


class InDouble(TorchFunctionMode):
    """Has models that cast to float32 whatever their dtype compute in float64 throughout."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **kwargs)


def _double(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value == torch.float32 else value


class Branching(nn.Module):
    """Control flow over values, a Python list of layers, a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        layers = [nn.ModuleDict({"up": nn.Linear(16, 24), "down": nn.Linear(24, 16)})]
        layers += [nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)})]
        self.first, self.second = layers
        self.plain = [self.first, self.second, self.first]
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSF = self.embed(input_ids)
        for index, layer in enumerate(self.plain):
            hidden_BSF = layer["up"](x_BSF).relu()
            if int(input_ids[0, 0]) % 2 == index % 2:
                hidden_BSF = hidden_BSF * 2
            x_BSF = x_BSF + layer["down"](hidden_BSF)
        return F.cross_entropy(self.head(x_BSF).flatten(0, 1), labels.flatten())


class Encoding(nn.Module):
    """A stem of convolutions, torch's own layers, and a scale of what is cut behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.first, self.second = nn.Conv1d(16, 24, 3, padding=1), nn.Conv1d(24, 16, 3, padding=1)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.up, self.down, self.scale = nn.Linear(16, 24), nn.Linear(24, 16), nn.Parameter(ONE)
        self.to_logits = lambda x: x @ self.embed.weight.t()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BFS = self.embed(input_ids).transpose(1, 2)
        x_BSF = self.layers(self.second(F.gelu(self.first(x_BFS))).transpose(1, 2))
        x_BSF = x_BSF + self.down(F.gelu(self.up(x_BSF)) * self.scale)
        return F.cross_entropy(self.to_logits(x_BSF).flatten(0, 1), labels.flatten())


def tokens() -> dict[str, Tensor]:
    ids_BS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % 61
    labels_BS = ids_BS.roll(1, 1).clone()
    labels_BS[0, :5] = -100
    return {"input_ids": ids_BS, "labels": labels_BS}


def hugging_face(name: str, attention: str, **sizes: Any) -> nn.Module:
    """Return a transformers model with labels, by its model type."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **sizes)
    if name == "gemma2":
        attention = "eager"  # transformers has no sdpa with soft-capped scores
    makers: dict[str, Any] = {
        "bert": transformers.AutoModelForMaskedLM,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "bart": transformers.AutoModelForSeq2SeqLM,
        "vit": transformers.AutoModelForImageClassification,
        "whisper": transformers.AutoModelForSpeechSeq2Seq,
    }
    maker = makers.get(name, transformers.AutoModelForCausalLM)
    return maker.from_config(config, attn_implementation=attention)


_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": VOCABULARY,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "num_key_value_heads": 4},
    "two_key_value_heads": {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 2},
    "one_key_value_head": {**_SIZES, "num_key_value_heads": 1},
    "mixtral": {**_SIZES, "num_key_value_heads": 4, "num_local_experts": 4},
    "qwen3": {**_SIZES, "num_key_value_heads": 4, "head_dim": 8},
    "gemma2": {
        **_SIZES, "num_key_value_heads": 4, "head_dim": 8, "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 5.0, "sliding_window": 8,
    },
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "bert": {**_SIZES, **_NO_DROPOUT},
    "t5": {
        "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "vocab_size": VOCABULARY, "decoder_start_token_id": 0, "dropout_rate": 0.0,
    },
    "bart": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "dropout": 0.0,
    },
    "vit": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, **_NO_DROPOUT,
    },
    "opt": {
        "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": VOCABULARY, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    "gpt_neox": {**_SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "whisper": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "vocab_size": VOCABULARY, "max_source_positions": 20, "max_target_positions": 64,
        "num_mel_bins": 8, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    },
}  # fmt: skip


def make(family: str, attention: str = "sdpa") -> tuple[nn.Module, dict[str, Any]]:
    """Return a model, float64 but for Mixtral, and the keywords of a call that gives its loss."""
    torch.manual_seed(3)
    if family == "nanogpt":
        return HandWritten(vocabulary=VOCABULARY, depth=2).double(), {"batch": tokens()}
    if family == "branching":
        return Branching().double(), tokens()
    if family == "encoding":
        return Encoding().double(), tokens()
    name = "llama" if "key_value_head" in family else family
    model = hugging_face(name, attention, **CONFIGS[family])
    if family == "mixtral":
        return model, tokens()
    model = model.double()
    if family == "vit":
        pixels = torch.randn(ROWS, 3, 16, 16, dtype=torch.float64)
        return model, {"pixel_values": pixels, "labels": torch.arange(ROWS) % 2}
    if family == "whisper":
        features = torch.randn(ROWS, 8, 40, dtype=torch.float64)
        return model, {"input_features": features, "labels": tokens()["labels"]}
    return model, tokens()


FAMILIES = ("nanogpt", "branching", "encoding", *CONFIGS)
Call = Callable[..., Any]
