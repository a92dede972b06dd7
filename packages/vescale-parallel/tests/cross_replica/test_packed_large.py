"""Rows of vision-language models of published widths are checked on scaled-down ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_parallel._cross_replica.call_guard import RowGuard

# Of each row, the images: frames, height and width in patches.
IMAGES = [[(1, 4, 4), (1, 4, 8)], [], [(1, 8, 8)], [(1, 4, 4)]]
LENGTHS = [(48, 0, 64, 16), (2, 0, 1, 1)]
SECTIONS = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}


def batch_of(config: Any, length: int) -> dict[str, Tensor]:
    token, vision = config.image_token_id, config.vision_config
    ids = torch.randint(10, 1000, (len(IMAGES), length))
    for row, images in zip(ids, IMAGES, strict=True):
        at = 1
        for _, height, width in images:
            row[at : at + height * width // 4] = token
            at += height * width // 4 + 2
    grid = torch.tensor([image for images in IMAGES for image in images])
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == token, -100),
        "mm_token_type_ids": (ids == token).long(),
        "pixel_values": torch.randn(int(grid.prod(1).sum()), width),
        "image_grid_thw": grid,
    }


def published(family: str) -> Any:
    import transformers

    kind = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    config = getattr(transformers, f"{kind}Config")()
    config.text_config.num_hidden_layers = 5
    if family == "qwen2_5_vl":
        config.text_config.rope_parameters = SECTIONS
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_of_large_models_have_their_images(family: str) -> None:
    """Their ids stay as they are, for code compares them with the configuration."""
    model = published(family)
    given = batch_of(model.config, 60)
    guard = RowGuard(model, lambda own: [own], losses_only=True)
    found, is_checked = guard.coupling(model, (), given)
    rows = guard.with_packed(found, model, (), given).rows_of((), given)
    assert (found.regions, is_checked) == ({}, True)
    assert rows is not None
    assert [each.lengths for each in rows if each and each.lengths] == [
        (48, 0, 64, 16),
        (2, 0, 1, 1),
    ]


def test_long_texts_are_cut_and_not_checked() -> None:
    model = published("qwen3_vl")
    given = batch_of(model.config, 800)
    guard = RowGuard(model, lambda own: [own], losses_only=True)
    with pytest.warns(UserWarning, match="texts of 800 tokens with images are longer than"):
        found, _ = guard.coupling(model, (), given)
    rows = guard.with_packed(found, model, (), given).rows_of((), given)
    assert rows is not None
    assert [each.lengths for each in rows if each and each.lengths] == [
        (48, 0, 64, 16),
        (2, 0, 1, 1),
    ]
