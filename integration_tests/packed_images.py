"""Tiny models of transformers that are given the images or sounds of all rows in one tensor.

Each has a batch of texts with as many of them in every row as a test says, of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
LENGTH = 48

# How many images every row has.
Counts = Sequence[int]
Batch = dict[str, Tensor]

_SIZES = ((4, 4), (2, 4), (4, 2))  # in patches
_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 2}
_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}
_OF_QWEN: dict[str, Any] = {
    **_VISION,
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TEXT: dict[str, Any] = {
    **_LAYERS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# As transformers 4 calls it, and newer ones.
_ROTARY = "rope_scaling" if version("transformers").startswith("4.") else "rope_parameters"
_ROTATED: dict[str, Any] = {
    **_TEXT,
    _ROTARY: {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def _model(auto: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = auto._from_config(config, attn_implementation="eager").double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def _made(kind: Any, **options: Any) -> Any:
    return kind(**options)


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {**_OF_QWEN, "embed_dim": 16, "mlp_ratio": 2}
    config = _made(Qwen2VLConfig, vision_config=vision, text_config=_ROTATED, **_TOKENS)
    return _model(Qwen2VLForConditionalGeneration, config)


def qwen2_5_vl() -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {**_OF_QWEN, "window_size": 8, "fullatt_block_indexes": [1]}
    config = _made(Qwen2_5_VLConfig, vision_config=vision, text_config=_ROTATED, **_TOKENS)
    return _model(Qwen2_5_VLForConditionalGeneration, config)


def qwen3_vl() -> nn.Module:
    """Its blocks are given features of images between them."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {**_OF_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {**_ROTATED, "head_dim": 8}
    config = _made(Qwen3VLConfig, vision_config=vision, text_config=text, **_TOKENS)
    return _model(Qwen3VLForConditionalGeneration, config)


def llava(dropout: float = 0.0) -> nn.Module:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    size = {"image_size": 8, "patch_size": 4, "projection_dim": 16}
    vision = _made(CLIPVisionConfig, **{**_VISION, **_LAYERS, **size}, attention_dropout=dropout)
    config = _made(
        LlavaConfig,
        vision_config=vision,
        text_config=_made(LlamaConfig, **_TEXT),
        image_token_index=IMAGE,
    )
    return _model(LlavaForConditionalGeneration, config)


def llava_next() -> nn.Module:
    """Of how many tokens an image is depends on its size; that of pixels is of the largest."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
    )

    size = {"image_size": 8, "patch_size": 4, "projection_dim": 16}
    config = _made(
        LlavaNextConfig,
        vision_config=_made(CLIPVisionConfig, **{**_VISION, **_LAYERS, **size}),
        text_config=_made(LlamaConfig, **_TEXT),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
    )
    return _model(LlavaNextForConditionalGeneration, config)


def mistral3() -> nn.Module:
    """It cuts the padding of images off, by their sizes."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        MistralConfig,
        PixtralVisionConfig,
    )

    vision = _made(PixtralVisionConfig, **{**_VISION, **_LAYERS}, image_size=16, head_dim=8)
    config = _made(
        Mistral3Config,
        vision_config=vision,
        text_config=_made(MistralConfig, **_TEXT, head_dim=8),
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    return _model(Mistral3ForConditionalGeneration, config)


def smolvlm() -> nn.Module:
    """It is given as many images of every row, of which it leaves out those that are zeros."""
    from transformers import (
        LlamaConfig,
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
        SmolVLMVisionConfig,
    )

    config = _made(
        SmolVLMConfig,
        vision_config=_made(SmolVLMVisionConfig, **{**_VISION, **_LAYERS}, image_size=8),
        text_config=_made(LlamaConfig, **_TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return _model(SmolVLMForConditionalGeneration, config)


def qwen2_audio() -> nn.Module:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2Config,
    )

    sounds = _made(
        Qwen2AudioEncoderConfig,
        num_mel_bins=8,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        d_model=16,
        max_source_positions=8,
    )
    config = _made(
        Qwen2AudioConfig,
        audio_config=sounds,
        text_config=_made(Qwen2Config, **_TEXT),
        audio_token_index=IMAGE,
    )
    return _model(Qwen2AudioForConditionalGeneration, config)


def with_tokens(
    step: int, rows: Sequence[Sequence[Sequence[int]]]
) -> tuple[Batch, torch.Generator]:
    """Return texts in which rows have runs of tokens for their images."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, IMAGE, (len(rows), LENGTH), generator=generator)
    for row, runs in zip(ids, rows, strict=True):
        at = 1
        for run in runs:
            row[at : at + len(run)] = torch.tensor(run)
            at += len(run) + 1
    labels = ids.masked_fill(ids >= IMAGE, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}, generator


def _runs(counts: Counts, run: Callable[[], Sequence[int]]) -> list[list[Sequence[int]]]:
    return [[run() for _ in range(count)] for count in counts]


def _sizes(step: int) -> Iterator[tuple[int, int]]:
    while True:
        yield _SIZES[step % len(_SIZES)]
        step += 1


def patches(step: int, counts: Counts) -> Batch:
    """Return a batch of Qwen's models: patches of images of several sizes."""
    found, sizes = list[tuple[int, int, int]](), _sizes(step)

    def run() -> list[int]:
        height, width = next(sizes)
        found.append((1, height, width))
        return [START, *[IMAGE] * (height * width // 4), END]

    batch, generator = with_tokens(step, _runs(counts, run))
    num_patches = sum(height * width for _, height, width in found)
    batch["pixel_values"] = torch.randn(num_patches, 24, dtype=torch.float64, generator=generator)
    batch["image_grid_thw"] = torch.tensor(found)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch


def videos(step: int, counts: Counts) -> Batch:
    """Return one of them whose every second image of a row is one, and the others videos."""
    found: dict[int, list[tuple[int, int, int]]] = {IMAGE: [], VIDEO: []}
    sizes, rows = _sizes(step), list[list[list[int]]]()
    for count in counts:
        rows.append([])
        for number in range(count):
            token, frames = (IMAGE, 1) if number % 2 else (VIDEO, 1 + step % 2 + number)
            height, width = next(sizes)
            found[token].append((frames, height, width))
            rows[-1].append([START, *[token] * (frames * height * width // 4), END])
    batch, generator = with_tokens(step, rows)
    names = {IMAGE: ("pixel_values", "image_grid_thw")}
    names[VIDEO] = ("pixel_values_videos", "video_grid_thw")
    for token, (pixels, grid) in names.items():
        if found[token]:
            total = int(torch.tensor(found[token]).prod(1).sum())
            batch[pixels] = torch.randn(total, 24, dtype=torch.float64, generator=generator)
            batch[grid] = torch.tensor(found[token])
    batch["second_per_grid_ts"] = torch.ones(len(found[VIDEO]))
    ids = batch["input_ids"]
    batch["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    return batch


def pictures(step: int, counts: Counts) -> Batch:
    """Return one of LLaVA: images of one size, of 4 tokens each."""
    batch, generator = with_tokens(step, _runs(counts, lambda: [IMAGE] * 4))
    size = sum(counts), 3, 8, 8
    batch["pixel_values"] = torch.randn(size, dtype=torch.float64, generator=generator)
    return batch


def crops(step: int, counts: Counts) -> Batch:
    """Return one of LLaVA-NeXT: an image is seen whole and in two halves."""
    batch, generator = with_tokens(step, _runs(counts, lambda: [IMAGE] * 14))
    size = sum(counts), 3, 3, 8, 8
    batch["pixel_values"] = torch.randn(size, dtype=torch.float64, generator=generator)
    batch["image_sizes"] = torch.tensor([[8, 16]] * sum(counts))
    return batch


def padded_pictures(step: int, counts: Counts) -> Batch:
    """Return one of Mistral: images of several sizes, padded to one."""
    found, sizes = list[tuple[int, int]](), _sizes(step)

    def run() -> list[int]:
        height, width = next(sizes)
        found.append((2 * height, 2 * width))
        return [*[IMAGE] * (height * width // 4), END]

    batch, generator = with_tokens(step, _runs(counts, run))
    size = len(found), 3, 8, 8
    batch["pixel_values"] = torch.randn(size, dtype=torch.float64, generator=generator)
    batch["image_sizes"] = torch.tensor(found)
    return batch


def padded_rows(step: int, counts: Counts) -> Batch:
    """Return one of SmolVLM: zeros where a row has fewer images than another one."""
    batch, generator = with_tokens(step, _runs(counts, lambda: [IMAGE] * 4))
    size = len(counts), max(counts), 3, 8, 8
    pixels = torch.randn(size, dtype=torch.float64, generator=generator)
    for row, count in zip(pixels, counts, strict=True):
        row[count:] = 0
    return {**batch, "pixel_values": pixels}


def sounds(step: int, counts: Counts) -> Batch:
    batch, generator = with_tokens(step, _runs(counts, lambda: [IMAGE] * 4))
    size = sum(counts), 8, 16
    batch["input_features"] = torch.randn(size, dtype=torch.float64, generator=generator)
    batch["feature_attention_mask"] = torch.ones(sum(counts), 16, dtype=torch.long)
    return batch


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, Counts], Batch]]] = {
    "qwen2_vl": (qwen2_vl, patches),
    "qwen2_5_vl": (qwen2_5_vl, patches),
    "qwen2_5_vl-videos": (qwen2_5_vl, videos),
    "qwen3_vl": (qwen3_vl, patches),
    "llava": (llava, pictures),
    "llava_next": (llava_next, crops),
    "mistral3": (mistral3, padded_pictures),
    "smolvlm": (smolvlm, padded_rows),
    "qwen2_audio": (qwen2_audio, sounds),
}


def part_of(batch: Batch, counts: Counts, part: int, num_parts: int) -> dict[str, Tensor | None]:
    """Return the rows of a part of a batch of Qwen's models, without images if they have none."""
    few = len(counts) // num_parts
    rows = slice(part * few, part * few + few)
    first, last = sum(counts[: rows.start]), sum(counts[: rows.stop])
    grid = batch["image_grid_thw"]
    patches = grid.prod(1).tolist()
    packed = "pixel_values", "image_grid_thw"
    own: dict[str, Tensor | None] = {
        name: x[rows] for name, x in batch.items() if name not in packed
    }
    own["pixel_values"] = batch["pixel_values"][sum(patches[:first]) : sum(patches[:last])]
    own["image_grid_thw"] = grid[first:last]
    if first == last:
        own["pixel_values"] = own["image_grid_thw"] = None
    return own
