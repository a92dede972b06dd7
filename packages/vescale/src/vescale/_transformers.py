"""What transformers knows of its models: which names are saved, and how names were converted.

The package is imported where a model of it was given, and not before. Functions that are not
documented are of transformers 5; without them names stay as they are, as in transformers 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Convert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a module is one of transformers, which need not be installed."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


def kept_names(model: nn.Module, names: Mapping[str, int]) -> list[str]:
    """Return the names under which transformers saves the tensors of a model.

    Args:
        model: One of transformers.
        names: Those of its state dict, with what is the same for tied ones.
    """
    keys: Any = getattr(model, "_keys_to_ignore_on_save", None)
    ignored: set[str] = set(keys or ())
    names = {name: tied for name, tied in names.items() if name not in ignored}
    try:
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        return [name for name in names if _is_first(name, names)]
    alike = {tied: torch.empty(1) for tied in names.values()}
    tensors = {name: alike[tied] for name, tied in names.items()}
    return [*remove_tied_weights_from_state_dict(tensors, model)]  # pyright: ignore[reportArgumentType]: it is one


def _is_first(name: str, names: Mapping[str, int]) -> bool:
    return next(other for other, tied in names.items() if tied == names[name]) == name


def conversion(
    model: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[Convert | None, list[str], list[list[str]]]:
    """Return how transformers writes a model's tensors in the layout of the model's hub files.

    Returns:
        What converts whole tensors, None if they stay as they are; their names in the order in
        which they are written; and which of them are converted together.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None, [*tensors], []

    def convert(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return revert_weight_conversion(model, dict(given))  # pyright: ignore[reportArgumentType]: of transformers

    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    everything = {name: tuple(x.shape) for name, x in convert(empty).items()}
    if everything == {name: tuple(tensor.shape) for name, tensor in empty.items()}:
        return None, [*everything], []
    together = _together(convert, empty, everything)
    places = {name: at for at, name in enumerate(everything)}
    of_unit = {name: unit for unit in together for name in unit}

    def place(name: str) -> int:
        unit = of_unit.get(name, [name])
        return min(places[found] for found in convert({each: empty[each] for each in unit}))

    return convert, sorted(tensors, key=place), [unit for unit in together if len(unit) > 1]


def _together(
    convert: Convert, empty: Mapping[str, Tensor], everything: Mapping[str, tuple[int, ...]]
) -> list[list[str]]:
    """Return units of tensors that are converted as if with all others."""
    units: dict[str, list[str]] = {}
    left: list[str] = []
    for name in empty:
        if not _is_as_with_all(convert, [name], empty, everything):
            units.setdefault(re.sub(r"(^|\.)(\d+)\..*", r"\1\2", name), []).append(name)
    for unit in list(units.values()):
        if not _is_as_with_all(convert, unit, empty, everything):
            left += unit
    return [left] if left else list(units.values())


def _is_as_with_all(
    convert: Convert,
    names: Sequence[str],
    empty: Mapping[str, Tensor],
    everything: Mapping[str, tuple[int, ...]],
) -> bool:
    try:
        found = convert({name: empty[name] for name in names})
    # Whatever it raises of a part of what it is made for.
    except Exception:
        return False
    return all(everything.get(name) == tuple(x.shape) for name, x in found.items())


def names_of_files(model: nn.Module) -> Callable[[Sequence[str]], Mapping[str, str | None]]:
    """Return what tells how tensors of hub files are called in a model."""
    here = model.state_dict().keys()
    prefix = str(getattr(model, "base_model_prefix", ""))
    unexpected = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    unexpected += _once_saved(model)

    def names(in_files: Sequence[str]) -> dict[str, str | None]:
        renamed = _renaming(model, here)
        found: dict[str, str | None] = {}
        for name in in_files:
            key = renamed(name)
            if key not in here and key.startswith(f"{prefix}."):
                key = key if (bare := key[len(prefix) + 1 :]) not in here else bare
            elif key not in here and f"{prefix}.{key}" in here:
                key = f"{prefix}.{key}"
            is_left_out = key not in here and any(re.search(each, key) for each in unexpected)
            found[name] = None if is_left_out else key
        return found

    return names


def _once_saved(model: nn.Module) -> list[str]:
    """Return patterns of buffers that models of earlier versions saved, of those it has."""
    buffers = [name for name, _ in model.named_buffers()]
    patterns = {
        "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
        "position_ids": r"(^|\.)position_ids$",
    }
    return [each for end, each in patterns.items() if any(name.endswith(end) for name in buffers)]


def optional_names(model: nn.Module) -> Callable[[str], bool]:
    """Return what tells whether files may lack a tensor: none is saved, or it has its values."""
    unsaved: set[str] = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
    return lambda name: name in unsaved or any(re.search(each, name) for each in patterns)


def _renaming(model: nn.Module, here: Any) -> Callable[[str], str]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:
        return lambda name: name
    rules = get_model_conversion_mapping(model)  # pyright: ignore[reportArgumentType]: of transformers
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def renamed(name: str) -> str:
        if name in here:
            return name
        key, converted = rename_source_key(name, renamings, converters)
        if converted is not None:
            raise ValueError(
                f"{name!r} of these files is converted when transformers loads it, joined with "
                f"others into {key!r} for example, which load_pretrained does not do. Convert the "
                "files once: load them with from_pretrained on one device, then "
                "save_pretrained(path, save_original_format=False)"
            )
        return key

    return renamed
