"""Small models of real families, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

# Their signatures leave out what every config takes.
_configs: Any = transformers

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_DECODER: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama(attention: str) -> nn.Module:
    config = _configs.LlamaConfig(**_DECODER, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


def _qwen2(attention: str) -> nn.Module:
    config = _configs.Qwen2Config(
        **_DECODER, tie_word_embeddings=True, attn_implementation=attention
    )
    return transformers.Qwen2ForCausalLM(config)


def _mixtral(attention: str) -> nn.Module:
    config = _configs.MixtralConfig(
        **_DECODER, num_local_experts=4, num_experts_per_tok=2, attn_implementation=attention
    )
    return transformers.MixtralForCausalLM(config)


def _gpt2(attention: str) -> nn.Module:
    config = _configs.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=4,
        vocab_size=50,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config)


def _bert(attention: str) -> nn.Module:
    config = _configs.BertConfig(
        **_SIZES, vocab_size=50, max_position_embeddings=32, attn_implementation=attention
    )
    return transformers.BertForMaskedLM(config)


def _t5(attention: str) -> nn.Module:
    config = _configs.T5Config(
        d_model=16,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        d_kv=4,
        vocab_size=50,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit(attention: str) -> nn.Module:
    config = _configs.ViTConfig(
        **_SIZES,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation=attention,
    )
    return transformers.ViTForImageClassification(config)


FAMILIES: dict[str, Callable[[str], nn.Module]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "t5": _t5,
    "vit": _vit,
}


def make(family: str, attention: str) -> nn.Module:
    """Return a model with the parameters that seed 0 gives."""
    torch.manual_seed(0)
    model = FAMILIES[family](attention)
    # The grouped matrix product of Mixtral's experts has no float64 kernel.
    return model if family == "mixtral" else model.double()


def batch(family: str) -> dict[str, Any]:
    """Return keyword arguments of a forward call; rows are samples."""
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        pixels = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels}
    ids = torch.randint(3, 50, (4, 8), generator=generator)
    if family == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1), "use_cache": False}
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    return given if family == "bert" else {**given, "use_cache": False}


def run(model: nn.Module, given: dict[str, Any]) -> Tensor:
    """Return the logits after a forward and a backward pass, the same draws every time."""
    torch.manual_seed(7)
    logits = model(**given).logits
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    (logits * weights.to(logits.dtype)).sum().backward()
    return logits
