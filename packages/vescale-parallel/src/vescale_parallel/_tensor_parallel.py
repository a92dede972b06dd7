"""Tensor parallelism on plain local tensors: hooks that put collectives at region borders.

Weights are already cut when these hooks run. A column-wise linear reads a replicated
activation and leaves a sharded one; a row-wise linear reads that and leaves addends, which
its hook sums. Between the two the user's own code runs on this rank's heads or features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import InterleavedShard, all_gather, all_reduce

from ._linear_kinds import LinearKind, linear_kind
from ._sharding_plan import Resolved


def complete_placements(resolved: Resolved, model: nn.Module, size: int) -> dict[str, Placement]:
    """Return the placement of every sharded parameter, biases of column-wise linears included.

    Raises:
        ValueError: If a sharded parameter does not belong to a layer that can be sharded so,
            or its dim does not divide into the ranks.
    """
    placements = dict(resolved.parameters)
    for fqn, placement in resolved.parameters.items():
        if not isinstance(placement, Shard | InterleavedShard):
            continue
        owner_fqn, _, name = fqn.rpartition(".")
        owner = model.get_submodule(owner_fqn)
        kind = linear_kind(owner)
        _check_divides(fqn, model.get_parameter(fqn).shape, placement, size)
        if name == "weight" and isinstance(owner, nn.Embedding) and placement == Shard(0):
            if owner.max_norm is not None:
                raise ValueError(f"{owner_fqn} has max_norm set and cannot be sharded")
            continue
        if name == "bias" and kind is not None:
            continue
        if name != "weight" or kind is None:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqn!r} cannot be {placement!r}; weights of "
                "linear layers and rows of embeddings can be sharded"
            )
        if placement.dim == kind.out_dim and owner._parameters.get("bias") is not None:
            placements[f"{owner_fqn}.bias"] = (
                Shard(0) if isinstance(placement, Shard) else InterleavedShard(0, placement.parts)
            )
    return placements


def _check_divides(
    fqn: str, shape: torch.Size, placement: Shard | InterleavedShard, size: int
) -> None:
    unit = size * (placement.parts if isinstance(placement, InterleavedShard) else 1)
    if not 0 <= placement.dim < len(shape):
        raise ValueError(
            f"tensor_parallel.sharding_plan: {fqn!r} has shape {tuple(shape)} and no dim "
            f"{placement.dim} to cut"
        )
    length = shape[placement.dim]
    if length % unit:
        raise ValueError(
            f"tensor_parallel.sharding_plan: dim {placement.dim} of {fqn!r} has size {length} "
            f"and needs a multiple of {unit} for tensor_parallel.size {size}; the nearest are "
            f"{length // unit * unit or unit} and {(length // unit + 1) * unit}"
        )


def install(
    model: nn.Module,
    resolved: Resolved,
    placements: dict[str, Placement],
    group: dist.ProcessGroup,
) -> None:
    """Add the collectives of tensor parallelism to a model's modules, in place.

    Raises:
        ValueError: If a divided attribute is no multiple of the group's size.
    """
    size = dist.get_world_size(group)
    for fqn, attribute in sorted(resolved.attributes):
        module = model.get_submodule(fqn)
        value = getattr(module, attribute, None)
        if not isinstance(value, int) or value % size:
            raise ValueError(
                f"expected {fqn}.{attribute} to be a multiple of tensor_parallel.size "
                f"({size}), got {value!r}"
            )
        setattr(module, attribute, value // size)
    for fqn, placement in placements.items():
        owner_fqn, _, name = fqn.rpartition(".")
        module = model.get_submodule(owner_fqn)
        if name != "weight" or not isinstance(placement, Shard | InterleavedShard):
            continue
        kind = linear_kind(module)
        if kind is None:
            _VocabularyParallel(module, group).install()
        elif placement.dim == kind.out_dim:
            gather = owner_fqn in resolved.outputs
            _column_wise(module, kind, group, gather=gather)
        else:
            _row_wise(module, kind, group, split=owner_fqn in resolved.inputs)


def _column_wise(
    module: nn.Module, kind: LinearKind, group: dist.ProcessGroup, *, gather: bool
) -> None:
    size = dist.get_world_size(group)
    setattr(module, kind.out_attribute, getattr(module, kind.out_attribute) // size)

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_CopyIn.apply(args[0], group), *args[1:])

    def after(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        return _GatherOut.apply(output, group)

    module.register_forward_pre_hook(before)
    if gather:
        module.register_forward_hook(after, prepend=True)


def _row_wise(
    module: nn.Module, kind: LinearKind, group: dist.ProcessGroup, *, split: bool
) -> None:
    bias: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        held = module._parameters.get("bias")
        bias.clear()
        if held is not None:
            # The bias is added once, after the sum over ranks.
            bias.append(held)
            module._parameters["bias"] = None if kind.bias_optional else _zeros(held)
        return (_SplitIn.apply(args[0], group), *args[1:]) if split else args

    def after(_: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Any:
        if bias:
            module._parameters["bias"] = bias[0]  # pyright: ignore[reportArgumentType]: a Parameter
        if output is None:
            return None
        total = _SumOut.apply(output, group)
        return total + bias[0] if bias else total

    module.register_forward_pre_hook(before)
    # Also when forward raises: the module must not be left without its bias.
    module.register_forward_hook(after, prepend=True, always_call=True)


def _zeros(bias: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(bias), requires_grad=False)


class _VocabularyParallel:
    """Rows of an embedding cut over ranks: look up what is here, sum over ranks."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        assert isinstance(module, nn.Embedding)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._module, self._group = module, group
        self._rows = -(-module.num_embeddings // size)
        self._first = rank * self._rows
        self._elsewhere: Tensor | None = None

    def install(self) -> None:
        module = self._module
        if module.padding_idx is not None:
            local = module.padding_idx - self._first
            module.padding_idx = local if 0 <= local < self._rows else None
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, prepend=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0] - self._first
        self._elsewhere = (ids < 0) | (ids >= self._module.get_parameter("weight").shape[0])
        return (ids.masked_fill(self._elsewhere, 0), *args[1:])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        assert self._elsewhere is not None
        here = output.masked_fill(self._elsewhere.unsqueeze(-1), 0.0)
        return _SumOut.apply(here, self._group)


class _CopyIn(torch.autograd.Function):
    """Identity forward, sum of gradients over ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(grad, ctx.group), None


class _SumOut(torch.autograd.Function):
    """Sum over ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _GatherOut(torch.autograd.Function):
    """Concatenate the last dim over ranks forward, take this rank's part backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return torch.cat(all_gather(x, group).unbind(), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _own_part(grad, ctx.group), None


class _SplitIn(torch.autograd.Function):
    """Take this rank's part of the last dim forward, concatenate gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _own_part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.cat(all_gather(grad, ctx.group).unbind(), -1), None


def _own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()
