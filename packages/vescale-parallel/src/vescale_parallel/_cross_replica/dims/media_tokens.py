"""Tokens that stand for images, sounds or others in a text, by what a model calls them."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

# Attributes that hold the id of a placeholder, and those of other tokens.
_NAMES_TOKEN = re.compile(r"token(_id|_index|_idx)?$")
_OF_TEXT = re.compile(
    r"(^|_)(pad|bos|eos|sep|cls|mask|unk|decoder|forced|suppress|max|min|num|n)(_|$)"
)
# The first that fits: videos are of pixels, too.
_KINDS = (
    ("video", re.compile("video")),
    ("audio", re.compile("audio|speech|sound|input_features")),
    ("image", re.compile("image|img|pixel")),
)
_AROUND = re.compile(r"start|begin|end|(^|_)(bo|eo)[iav]_")


def media_tokens(model: nn.Module) -> dict[int, str]:
    """Return the tokens that stand for images, sounds or others, and what the model calls them.

    They are looked for in attributes of ``model.config``, what is within it, and the modules that
    are no blocks. The likeliest are first: those for what is between a start and an end.
    """
    found: dict[str, int] = {}
    todo: list[Any] = [getattr(model, "config", None), model, *model.children()]
    seen = set[int]()
    while todo:
        held = todo.pop()
        if not hasattr(held, "__dict__") or id(held) in seen:
            continue
        seen.add(id(held))
        for name, value in vars(held).items():
            if name.endswith("config"):
                todo.append(value)
            is_token = type(value) is int and _NAMES_TOKEN.search(name) and value >= 0
            if is_token and not _OF_TEXT.search(name):
                found.setdefault(name, value)
    ordered = sorted(found, key=lambda name: (bool(_AROUND.search(name)), name))
    tokens: dict[int, str] = {}
    for name in ordered:
        tokens.setdefault(found[name], name)
    return tokens


def kind_of_media(name: str) -> str:
    """Return what a token or an argument of forward is of, by its name; "" if that does not tell.

    Example:
        >>> kind_of_media("pixel_values_videos"), kind_of_media("image_token_id")
        ('video', 'image')
    """
    return next((kind for kind, words in _KINDS if words.search(name)), "")
