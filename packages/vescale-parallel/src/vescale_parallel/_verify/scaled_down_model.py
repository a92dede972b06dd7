"""A scaled-down model of the same class as a large one of transformers, to compare plans on."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vescale_parallel._model.blocks import block_stacks, numel_of
from vescale_parallel._model.copies import deep_copied
from vescale_parallel._model.fqns import generalize
from vescale_parallel._trace.generators import untouched_generators

# Sizes that a transformers configuration may name, and what they become. Numbers of heads stay:
# they decide what can be cut. There are fewer experts, which divide where all of them do.
_HEAD_DIM, _NARROW = 8, 2
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "n_embed")
# May be as wide as the hidden state, or project from another width.
_AS_WIDE = ("word_embed_proj_dim", "embedding_size")
# Of a part for images: as wide as the text, whatever the part is within. The latter two are so
# where the width within has another name.
_OF_TEXT, _WITHIN = ("out_hidden_size", "hidden_size"), "embed_dim"
# Of its layers, those whose features go to layers of the text.
_TAPPED = "deepstack_visual_indexes"
# Configurations in that of a model.
_PARTS = ("text_config", "vision_config", "audio_config")
_ROTARY = ("rope_parameters", "rope_scaling")
# Of sounds, which are as long as there are positions.
_POSITIONS, _FEW_POSITIONS = ("max_source_positions",), 16
# Of latent attention head_dim is that of the rotated features.
_HEAD_DIMS = (
    "head_dim", "d_kv", "attention_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
_FEATURES = (
    "intermediate_size", "d_ff", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim",
    "moe_intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim",
    "shared_expert_intermediate_size",
)  # fmt: skip
# Of mixers of Mamba: how many heads, how many features together unless they are a multiple of the
# hidden state, and how many positions are computed at once.
_MIXER_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_MIXER_HEAD_DIMS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_INNER, _EXPANDS = ("mamba_d_ssm",), ("mamba_expand", "expand")
_STATES = ("mamba_d_state", "ssm_state_size", "state_size")
_CHUNKS, _FEW_POSITIONS_A_CHUNK = ("mamba_chunk_size", "chunk_size"), 8
_MIXER_HEAD_DIM, _STATE_A_RANK = 4, 2
# What a mixer of Mamba that has channels instead of heads keeps of each.
_STATE, _CHANNELS_A_RANK = ("state_size",), 6
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
# Of every rank: grouped products of matrices need rows of 16 bytes, in bfloat16 too.
_FEATURES_A_RANK = 8
_ROWS = ("vocab_size",)
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers",
    "encoder_layers", "decoder_layers", "depth",
)  # fmt: skip
_FEW_LAYERS = 4
# What is compared in float64 takes about 50 bytes an element, on every rank of a machine.
_MAX_NUMEL = 2**22
# Of a block that is run at its own size on an example that somebody gave.
LARGE_BLOCK = 2**24


def is_large(model: nn.Module, most: int = _MAX_NUMEL, most_of_block: int = _MAX_NUMEL) -> bool:
    """Return whether a block, or the model with few of its blocks, has more elements than that."""
    total = numel_of(model)
    for stack in block_stacks(model):
        numels = [numel_of(model.get_submodule(fqn)) for fqn in stack]
        if max(numels) > most_of_block:
            return True
        total -= sum(numels[2:-1])
    return total > most


def scaled_down(model: nn.Module, size: int, *, shorter: bool = True) -> nn.Module | None:
    """Return a model of the same class with few small layers, on the meta device.

    The features of the small layers divide by ``size``. What is as long as all inputs are, as
    sounds, is ``shorter``, unless the model is to be run on somebody's inputs. None if the class
    or its configuration is not understood, or the modules differ.
    """
    config = copy.deepcopy(getattr(model, "config", None))
    if shorter:
        _set(config, _POSITIONS, _FEW_POSITIONS)
    heads = _first(config, _HEADS)
    if heads is None:
        small = _small_parts(config, size) or _of_channels(config, size)
        scaled = _made_of(model, small)
        found = scaled if scaled is not None and _layout(scaled) == _layout(model) else None
        return _scaled_down_inside(model, size) if found is None else found
    # Heads have a width of their own in most models: what is between layers may be narrow then.
    # In a mixer of Mamba they are together a multiple of it.
    expand = getattr(config, "expand", 0)
    scaled = None
    is_mixer = isinstance(expand, int) and expand and _first(config, _MIXER_HEADS) is None
    mixed = (_HEAD_DIM * heads // expand,) if is_mixer else ()
    for hidden in mixed or (_NARROW * heads, _HEAD_DIM * heads):
        small = _small_config(config, heads, _with_mixers(config, hidden), size)
        if mixed or _first(config, _MIXER_HEADS) is not None:
            _shrink_mixers(small, size)
        scaled = _made_of(model, small)
        if scaled is not None and _has_heads_of_their_own(scaled, model, heads):
            break
    return scaled if scaled is not None and _layout(scaled) == _layout(model) else None


def shortened(model: nn.Module) -> nn.Module | None:
    """Return a model of the same class and widths with as many layers as a scaled-down one has.

    None if the class or its configuration is not understood, or it is one of several parts.
    """
    config = copy.deepcopy(getattr(model, "config", None))
    if _first(config, _HEADS) is None:
        return None
    _shorten(config)
    short = _made_of(model, config)
    return short if short is not None and _layout(short) == _layout(model) else None


def _small_parts(config: Any, size: int) -> Any:
    """Return a copy of a configuration of several parts, as of text and images, with small ones.

    None if it has none.
    """
    parts = {name: getattr(config, name, None) for name in _PARTS}
    heads = {name: count for name, part in parts.items() if (count := _first(part, _HEADS))}
    if not heads:
        return None
    config = copy.deepcopy(config)
    small = {
        name: _small_config(parts[name], count, _HEAD_DIM * count, size)
        for name, count in heads.items()
    }
    for name, part in small.items():
        if name != _PARTS[0] and _PARTS[0] in small:
            _fit_to_text(part, parts[name], _HEAD_DIM * heads[name], small[_PARTS[0]])
        setattr(config, name, part)
    return config


def _fit_to_text(part: Any, before: Any, within: int, text: Any) -> None:
    """Have a small part return what is as wide as a small text, in place."""
    has_own = isinstance(getattr(before, _WITHIN, None), int)
    if has_own:
        _set(part, (_WITHIN,), within)
    width = _first(text, _HIDDEN)
    for name in _OF_TEXT[: 2 if has_own else 1]:
        if width is not None and isinstance(getattr(part, name, None), int):
            setattr(part, name, width)
    if tapped := getattr(part, _TAPPED, None):
        setattr(part, _TAPPED, [*range(min(len(tapped), _FEW_LAYERS))])


def _of_channels(config: Any, size: int) -> Any:
    """Return a copy of a configuration whose mixers have channels, with few; None for others."""
    if _first(config, _STATE) is None or _first(config, _HIDDEN) is None:
        return None
    small = _small_config(config, 1, _CHANNELS_A_RANK * size, size)
    _set(small, ("time_step_rank",), 5)
    return small


def _small_config(config: Any, heads: int, hidden: int, size: int) -> Any:
    """Return a copy of a configuration with small sizes."""
    config = copy.deepcopy(config)
    _set(config, _HEAD_DIMS, _HEAD_DIM)
    _set(config, ("rotary_dim",), _HEAD_DIM // 2)
    for rotary in (getattr(config, name, None) for name in _ROTARY):
        if isinstance(rotary, dict) and "mrope_section" in rotary:  # times, heights and widths
            rotary["mrope_section"] = [1, 1, _HEAD_DIM // 2 - 2]
    if isinstance(getattr(config, "qk_head_dim", None), int):
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    width = _first(config, _HIDDEN)
    _set(config, [name for name in _AS_WIDE if getattr(config, name, None) == width], hidden)
    _set(config, _HIDDEN, hidden)
    _set(config, _FEATURES, _FEATURES_A_RANK * size)
    # Of lengths of their own: keys are packed beside features that are rotated.
    _set(config, ("q_lora_rank",), 10 * size)
    _set(config, ("kv_lora_rank",), 6 * size)
    if (experts := _first(config, _EXPERTS)) is not None:
        groups = getattr(config, "n_group", None) or 1
        _set(config, _EXPERTS, _fewer(experts, size, groups, _first(config, _CHOSEN) or 1))
    # More rows than columns, as tables of a vocabulary have.
    _set(config, _ROWS, size * (2 * hidden // size + 1))
    _shorten(config)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 0)
    return config


def _with_mixers(config: Any, hidden: int) -> int:
    """Return a multiple of a width whose own multiple the heads of mixers divide, if it has to."""
    mixer_heads, expand = _first(config, _MIXER_HEADS), _first(config, _EXPANDS)
    if not mixer_heads or not expand or not _widens(config, mixer_heads):
        return hidden
    least = mixer_heads * _MIXER_HEAD_DIM
    wider = hidden * math.ceil(least / (expand * hidden))
    while expand * wider % mixer_heads:
        wider += hidden
    return wider


def _widens(config: Any, mixer_heads: int) -> bool:
    """Whether what mixers compute with is as many times as wide as the hidden state."""
    head_dim, hidden = _first(config, _MIXER_HEAD_DIMS), _first(config, _HIDDEN)
    expand = _first(config, _EXPANDS)
    if _first(config, _INNER) is not None or None in (head_dim, hidden, expand):
        return False
    return mixer_heads * (head_dim or 0) == (expand or 0) * (hidden or 0)


def _shrink_mixers(config: Any, size: int) -> None:
    """Leave mixers of Mamba narrow heads, small states and short chunks, in place."""
    mixer_heads = _first(config, _MIXER_HEADS)
    if mixer_heads is not None:
        inner, expand = _MIXER_HEAD_DIM * mixer_heads, _first(config, _EXPANDS) or 0
        if _first(config, _INNER) is None and expand * (_first(config, _HIDDEN) or 0) > inner:
            inner = expand * (_first(config, _HIDDEN) or 0)
        _set(config, _INNER, inner)
        _set(config, _MIXER_HEAD_DIMS, inner // mixer_heads)
    _set(config, _STATES, _STATE_A_RANK * size)
    _set(config, _CHUNKS, _FEW_POSITIONS_A_CHUNK)


def _shorten(config: Any) -> None:
    """Leave few layers, of every type, in place."""
    types = getattr(config, "layer_types", None) or []
    few = max(_FEW_LAYERS, *(1 + types.index(each) for each in set(types)), 0)
    _set(config, _LAYERS, few)
    if types and _can_set(config, "layer_types"):
        config.layer_types = types[:few]


def _made_of(model: nn.Module, config: Any) -> nn.Module | None:
    """Return a model of the same class, None if it does not take the small sizes."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    make: Any = type(model)
    try:
        # Constructors draw, some on the host whatever the device is: torch.Tensor(n).uniform_().
        with torch.device("meta"), untouched_generators():
            return make(config)
    # Arbitrary constructors.
    except Exception:
        return None
    finally:
        logger.setLevel(level)


def _has_heads_of_their_own(scaled: nn.Module, model: nn.Module, heads: int) -> bool:
    """Whether a dim that is as long as all heads of the model is as long as all small ones."""
    named = (getattr(model.config, name, None) for name in _HEAD_DIMS)
    widths = {heads * width for width in named if isinstance(width, int)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return any(
        large in widths and small == heads * _HEAD_DIM
        for name, parameter in scaled.named_parameters()
        for small, large in zip(parameter.shape, shapes.get(name, ()), strict=False)
    )


def _scaled_down_inside(model: nn.Module, size: int) -> nn.Module | None:
    """Return a copy of a module that wraps a model, around a scaled-down one."""
    for child in model.children():
        if numel_of(child) == numel_of(model) > 0:
            scaled = scaled_down(child, size)
            return None if scaled is None else deep_copied(model, {id(child): scaled})
    return None


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _fewer(experts: int, size: int, groups: int, chosen: int) -> int:
    """Return a number of experts, of which as many are chosen, in as many groups."""
    step = math.lcm(groups, math.gcd(experts, size))
    fewer = step * math.ceil(2 * chosen / step)
    while (fewer % size == 0) != (experts % size == 0):
        fewer += step
    return fewer


def _set(config: Any, names: Sequence[str], value: int) -> None:
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, int) and _can_set(config, name):
            setattr(config, name, min(value, found))


def _can_set(config: Any, name: str) -> bool:
    # What follows from other sizes cannot be set, and need not be.
    own = getattr(type(config), "attribute_map", {}).get(name, name)
    return not isinstance(getattr(type(config), own, None), property)


def _layout(model: nn.Module) -> set[tuple[str, type]]:
    return {(generalize(fqn), type(module)) for fqn, module in model.named_modules()}
