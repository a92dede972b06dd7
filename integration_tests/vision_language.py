"""A tiny LLaVA of transformers, whose forward takes a hidden state that hooks collect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS, NUM_PATCHES, VOCABULARY, IMAGE = 4, 4, 48, 40


def build(*, layers: int = 2) -> nn.Module:
    """Return a model in float64, the same each time."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration as Llava,
    )

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        image_size=8, patch_size=4, projection_dim=16,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    model = Llava._from_config(config, attn_implementation="eager").double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def batch_of(step: int, *, images: int = 1, rows: int = ROWS) -> dict[str, Tensor]:
    """Return texts behind as many images a row, without labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, IMAGE, (rows, 6), generator=generator)
    front = torch.full((rows, images * NUM_PATCHES), IMAGE)
    pixels = torch.randn(rows * images, 3, 8, 8, dtype=torch.float64, generator=generator)
    ids = torch.cat([front, ids], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def with_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch whose text is to be predicted."""
    ids = batch["input_ids"]
    return {**batch, "labels": ids.masked_fill(ids == IMAGE, -100)}


def rows_of(batch: dict[str, Any], part: int, num_parts: int) -> dict[str, Any]:
    """Return one of several equal parts of a batch."""
    return {name: tensor.chunk(num_parts)[part] for name, tensor in batch.items()}
