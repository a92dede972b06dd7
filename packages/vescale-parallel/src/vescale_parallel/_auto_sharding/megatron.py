"""Pairs of linear layers, sharded column- then row-wise, as in Megatron-LM.

Which linears pair up is guessed from their order and features; that a guess is right is shown by
the numeric check, run on the module that holds them. Source: Shoeybi et al. 2019, "Megatron-LM:
Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.linear_layout import features, linear_kind, linears_of
from vescale_parallel._tensor_parallel.chunks import shard_of_parts
from vescale_parallel._verify.single_module import checked_alone


def paired_linears(
    model: nn.Module, size: int, covered: Iterable[str]
) -> tuple[dict[str, Placement], dict[str, str]]:
    """Return a sharding plan for modules whose linears pair up, each class checked by running it.

    And why others are wrong, by module. ``size`` is the number of tensor-parallel ranks;
    ``covered`` are patterns that are cut already.
    """
    taken = {pattern.rpartition(".")[0] for pattern in covered}
    plan: dict[str, Placement] = {}
    wrong: dict[str, str] = {}
    known: dict[Any, tuple[dict[str, Placement], str]] = {}
    for fqn, module in model.named_modules():
        linears = linears_of(module)
        base = generalize(fqn)
        if len(linears) < 2 or any(f"{base}.{name}" in taken for name in linears):
            continue
        if base != fqn and not _same_everywhere(model, base, module):
            continue
        shapes = tuple(tuple(child.get_parameter("weight").shape) for child in linears.values())
        key = (type(module), tuple(linears), shapes)
        if key not in known:
            fused = _fused_attention(module, size)
            known[key] = (fused, "") if fused else _checked_pair(module, linears, size)
        found, why = known[key]
        plan |= {f"{base}.{name}" if base else name: each for name, each in found.items()}
        wrong |= {base or type(module).__name__: why} if why else {}
    return plan, wrong


def _same_everywhere(model: nn.Module, base: str, module: nn.Module) -> bool:
    """Whether all modules that a pattern matches have this module's class and shapes."""
    reference = [tuple(p.shape) for p in module.parameters()]
    return all(
        type(other) is type(module) and [tuple(p.shape) for p in other.parameters()] == reference
        for fqn, other in model.named_modules()
        if generalize(fqn) == base
    )


def _fused_attention(module: nn.Module, size: int) -> dict[str, Placement]:
    """Recognise GPT-2's attention, which cannot be called on a tensor alone."""
    named = {base.__name__ for base in type(module).__mro__}
    heads = getattr(module, "num_heads", 1)
    if "GPT2Attention" not in named or getattr(module, "is_cross_attention", True) or heads % size:
        return {}
    return {
        "c_attn.weight": InterleavedShard(1, 3),
        "c_proj.weight": Shard(0),
        "<attr:split_size>": Shard(0),
    }


def _checked_pair(
    module: nn.Module, linears: Mapping[str, nn.Module], size: int
) -> tuple[dict[str, Placement], str]:
    """Return a sharding plan for one module if running it shows the plan right, or why it is not.

    ``linears`` are the linear layers among its children, in definition order. Names are relative
    to ``module``; there are none if no variant is right.

    The last linear becomes row-wise, the others column-wise (fused projections in equal
    parts), and integers that count heads or features are divided where that is needed.
    """
    *columns, row = linears
    row_kind = linear_kind(linears[row])
    assert row_kind is not None
    inner, outer = features(linears[row], row_kind)
    if inner % size:
        return {}, ""
    plan: dict[str, Placement] = {f"{row}.weight": Shard(row_kind.in_dim)}
    for name in columns:
        kind = linear_kind(linears[name])
        assert kind is not None
        arriving, leaving = features(linears[name], kind)
        if arriving != outer or leaving % size:
            return {}, ""
        parts = leaving // inner if leaving % inner == 0 and leaving > inner else 1
        plan[f"{name}.weight"] = shard_of_parts(kind.out_dim, parts)
    reasons: list[str] = []
    for attributes in _divisible_attributes(module, inner, size):
        variant = plan | {f"<attr:{name}>": Shard(0) for name in attributes}
        proven, why = checked_alone(module, variant, outer, size)
        if proven is not None:
            return proven, ""
        reasons.append(why)
    return {}, reasons[0]


def _divisible_attributes(module: nn.Module, inner: int, size: int) -> list[tuple[str, ...]]:
    """Sets of integer attributes that may have to be divided, fewest first."""
    numbers = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool) and value % size == 0 and value
    }
    heads = tuple(name for name in numbers if "head" in name and "dim" not in name)
    widths = tuple(name for name, value in numbers.items() if value == inner)
    return list(dict.fromkeys([(), heads, widths, (*heads, *widths)]))
