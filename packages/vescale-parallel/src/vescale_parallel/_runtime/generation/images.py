"""Generation from images: transformers encodes them outside of calls, where ranks have parts.

``generate`` calls ``get_image_features`` once, before the first call of the model. Ranks have
parts of the tower then, and stages of a pipeline none or some of it. So images are given to the
first call, as in training, which encodes them as ranks run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
_COPIES = ("num_beams", "num_return_sequences")
_ENCODES = "_supports_mm_encoder_outputs"  # whether generate encodes images for a model


@contextlib.contextmanager
def images_in_calls(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, in_parts: bool
) -> Iterator[None]:
    """Have ``generate`` give images to calls of the model.

    Where it repeats each row, for beams, it repeats images only where each row has one: of others
    it encodes them outside of calls, unless the tower is ``in_parts`` there.

    Raises:
        ValueError: If it is, with beams and other than one image a row.
    """
    owners = [each for each in model.modules() if hasattr(type(each), _ENCODES)]
    has_images = any(kwargs.get(pixels) is not None for pixels in _PIXELS.values())
    if owners and has_images and not all(_can_be_given(each, args, kwargs) for each in owners):
        if in_parts:
            raise ValueError(
                "expected one image in each row, as pixel_values of as many rows, to generate "
                "with num_beams or num_return_sequences above 1 under a pipeline or ZeRO 2 and 3; "
                "use num_beams=1, or model.save_pretrained(...) and load that without them"
            )
        owners = []
    try:
        for owner in owners:
            object.__setattr__(owner, _ENCODES, lambda: False)
        yield
    finally:
        for owner in owners:
            object.__delattr__(owner, _ENCODES)


def _can_be_given(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether repeating rows of every argument repeats the images of each row."""
    if not _is_repeated(model, kwargs):
        return True
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, Tensor):
        return False
    for kind, pixels in _PIXELS.items():
        given = kwargs.get(pixels)
        if given is None:
            continue
        token = getattr(model.config, f"{kind}_token_id", None)
        # As many images as rows, and some in each row: that is one.
        if token is None or given.dim() < 4 or len(given) != len(ids):
            return False
        if not bool((ids == token).any(dim=1).all()):
            return False
    return True


def _is_repeated(model: Any, kwargs: Mapping[str, Any]) -> bool:
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    for name in _COPIES:
        said = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        if next((number for number in said if number is not None), 1) > 1:
            return True
    return False
