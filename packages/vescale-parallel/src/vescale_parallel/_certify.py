"""Prove, by running it, that a pair of linears may be sharded column- then row-wise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vescale_dtensor import Box, local_boxes

from ._linear_kinds import features, linear_kind
from ._sharding_plan import parse_placement

# Larger modules are not run: the certificate holds two copies of their weights in float64.
MAX_NUMEL = 2**26


def certified_region(
    module: nn.Module, linears: Mapping[str, nn.Module], size: int
) -> dict[str, str]:
    """Return a sharding plan for one module if running it proves the plan right.

    The last linear becomes row-wise, the others column-wise (fused projections in equal
    parts), and integers that count heads or features are divided where that is needed. Every
    variant is run on random weights, rank by rank, and its sum compared with the whole.

    Args:
        module: A module that can be called on one tensor (batch, sequence, features).
        linears: Its children that are linear layers, by name, in definition order.
        size: Ranks along the tensor-parallel axis.

    Returns:
        Names relative to ``module`` to placement text; empty if no variant is right.
    """
    if sum(p.numel() for p in module.parameters()) > MAX_NUMEL:
        return {}
    *columns, row = linears
    row_kind = linear_kind(linears[row])
    assert row_kind is not None
    inner, outer = features(linears[row], row_kind)
    if inner % size:
        return {}
    plan = {f"{row}.weight": f"Shard({row_kind.in_dim})"}
    for name in columns:
        kind = linear_kind(linears[name])
        assert kind is not None
        arriving, leaving = features(linears[name], kind)
        if arriving != outer or leaving % size:
            return {}
        parts = leaving // inner if leaving % inner == 0 and leaving > inner else 1
        if parts > 1 and inner % size == 0:
            plan[f"{name}.weight"] = f"InterleavedShard({kind.out_dim}, {parts})"
        else:
            plan[f"{name}.weight"] = f"Shard({kind.out_dim})"
    for attributes in _divisible_attributes(module, inner, size):
        variant = plan | {f"<attr:{name}>": "Shard(0)" for name in attributes}
        if _holds(module, variant, row, size, outer):
            return variant
    return {}


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


def _holds(module: nn.Module, plan: Mapping[str, str], row: str, size: int, outer: int) -> bool:
    """Run the module whole and rank by rank, and compare."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            whole = _random_copy(module)
            x_BSF = torch.randn(2, 3, outer, dtype=torch.float64)
            with torch.no_grad():
                expected = whole(x_BSF)
                parts = [_rank_copy(whole, plan, row, size, rank)(x_BSF) for rank in range(size)]
        # Arbitrary user code: whatever it raises only means that this variant is not proven.
        except Exception:
            return False
    if not isinstance(expected, Tensor) or any(not isinstance(part, Tensor) for part in parts):
        return False
    bias = whole.get_submodule(row)._parameters.get("bias")
    total = torch.stack(parts).sum(0)
    if bias is not None:
        total = total + bias
    return total.shape == expected.shape and torch.allclose(total, expected, rtol=1e-9, atol=1e-9)


def _random_copy(module: nn.Module) -> nn.Module:
    """Copy a module with random float64 parameters, whatever its tensors are made of."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(
            torch.randn(p.shape, dtype=torch.float64) / max(p.shape[-1:] or (1,)) ** 0.5
        )
        for p in module.parameters()
    }
    return copy.deepcopy(module, memo).eval()


def _rank_copy(
    whole: nn.Module, plan: Mapping[str, str], row: str, size: int, rank: int
) -> nn.Module:
    """Copy a module as one rank sees it: cut weights, divided integers, no row bias."""
    local = copy.deepcopy(whole)
    for name, text in plan.items():
        if name.startswith("<attr:"):
            attribute = name[6:-1]
            setattr(local, attribute, getattr(local, attribute) // size)
            continue
        owner = local.get_submodule(name.rpartition(".")[0])
        _cut(owner, "weight", text, size, rank)
        if owner is local.get_submodule(row):
            if owner._parameters.get("bias") is not None:
                owner.get_parameter("bias").data.zero_()
        elif owner._parameters.get("bias") is not None:
            _cut(owner, "bias", _bias_placement(text), size, rank)
        kind = linear_kind(owner)
        if kind is not None:
            setattr(owner, kind.out_attribute, owner.get_parameter("weight").shape[kind.out_dim])
    return local


def _bias_placement(weight_placement: str) -> str:
    """Return how the bias of a column-wise linear is cut: like the output features."""
    head, _, tail = weight_placement.partition("(")
    return f"{head}(0{tail[1:]}"


def _cut(owner: nn.Module, name: str, text: str, size: int, rank: int) -> None:
    tensor = owner.get_parameter(name).data
    boxes = local_boxes(tensor.shape, (size,), (rank,), (parse_placement(text),))
    dim = parse_placement(text).dim  # pyright: ignore[reportAttributeAccessIssue]: a shard
    pieces = [tensor[Box(held.box.offset, held.box.shape).slices] for held in boxes]
    owner._parameters[name] = nn.Parameter(torch.cat(pieces, dim).contiguous())
