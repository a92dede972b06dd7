"""Tensor parallelism on plain local tensors: hooks with collectives where regions begin and end.

Weights are already cut when these hooks run. A column-wise linear reads a whole activation and
leaves one that is cut; a row-wise linear reads that and leaves partial values. Between the two the
user's own code runs on this rank's heads or features. See [Note: regions].
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import merged, once_each, renamed_owner, stack_of
from vescale_parallel._model.linear_layout import (
    LinearKind,
    computes_plainly,
    linear_kind,
    product,
)

from .attention_heads import AttentionCuts, attend_by_heads, cut_attention
from .chunks import part_sizes
from .conversion_hooks import moved, on_argument, on_output, shard_in_forward
from .conversions import Boundary
from .placements import buffer_placement
from .read_by_forward.arguments import slice_arguments
from .read_by_forward.bypassed_sums import refuse_bypass
from .read_by_forward.parameters import ReadParts, add_on_first_rank, read_parts, replaced
from .shard_module import count_local
from .sharding_spec import PlacementChange, ShardingSpec, shard_dim
from .tensor_sharding import TensorSharding
from .vocabulary.vocab_parallel import shard_embedding_rows


class KeepCut(Protocol):
    """Makes a column-wise linear hand on its output as it is sharded."""

    def __call__(self, module: nn.Module, *, num_features: int) -> None: ...


def install(
    model: nn.Module,
    sharding: TensorSharding,
    boundary: Boundary,
    *,
    prefix: str = "",
    keep_cut: KeepCut | None = None,
    with_ends: bool = True,
) -> None:
    """Add the collectives of tensor parallelism to a module, in place.

    Names outside ``prefix``, the FQN of ``model`` in the model of the plan, are passed over.
    ``keep_cut`` is for outputs that stay cut; None gathers them. Without ``with_ends``
    what shards a sequence within forwards is for :func:`.conversion_hooks.shard_in_forward`.

    Raises:
        ValueError: If a divided attribute is no multiple of the number of ranks.
    """
    named = {
        f"{prefix}.{fqn}".strip("."): module
        for fqn, module in model.named_modules(remove_duplicate=False)
    }
    modules, first_names = once_each(named)
    spec = sharding.spec.renamed(first_names)
    placements = merged(sharding.placements, lambda fqn: renamed_owner(fqn, first_names))
    attention = cut_attention(modules, placements)
    ends = sharding.sequence_ends().values() if sharding.in_forward else ()
    left_out = frozenset(fqn for pair in ends for fqn in pair)
    target = _Target(modules, spec, placements, boundary, attention, left_out)
    for fqn, module in attention.items():
        attend_by_heads(module, boundary, _attention_cuts(fqn, spec))
    _keep_from_nesting(modules, attention)
    count_local(modules, spec, placements, boundary.ranks.size)
    # Hooks before forward run in the order in which they are added, those after it in the
    # opposite one: what a region reads enters before its layers run, and leaves after them.
    _add_entrances(target)
    _add_linears(target, keep_cut)
    _add_shared_linears(target)
    _add_biases(target)
    _add_read_parts(target)
    _add_whole_modules(target)
    _add_reentered(target)
    _add_exits(target)
    if with_ends and sharding.in_forward:
        shard_in_forward(model, sharding, boundary, prefix=prefix)


@dataclass(frozen=True)
class _Target:
    """A module that collectives are added to, by names that are unique."""

    modules: Mapping[str, nn.Module]
    spec: ShardingSpec
    placements: Mapping[str, Placement]
    boundary: Boundary
    attention: Mapping[str, nn.MultiheadAttention]
    ends_left_out: frozenset[str]

    def is_in_region(self, fqn: str) -> bool:
        """Whether a module is inside of one whose input enters a region."""
        return any(f"{fqn}.".startswith(f"{region}.") for region, _ in self.spec.entered)


def _add_entrances(target: _Target) -> None:
    modules, boundary = target.modules, target.boundary
    for (fqn, argument), arrives in target.spec.entered.items():
        if fqn in modules and fqn not in target.attention:
            _enter(modules[fqn], argument, shard_dim(arrives), stack_of(fqn), boundary)
    for (fqn, argument), move in target.spec.inputs.items():
        if fqn not in modules or fqn in target.ends_left_out:
            continue
        if linear_kind(modules[fqn]) is None:
            on_argument(modules[fqn], argument, moved(move, stack_of(fqn), boundary))
    slice_arguments(modules, target.spec.slices, boundary.ranks)


def _add_linears(target: _Target, keep_cut: KeepCut | None) -> None:
    """Make linear layers column- or row-wise, as their weights are cut."""
    modules, spec, boundary = target.modules, target.spec, target.boundary
    layers: dict[str, tuple[list[str], list[str]]] = {}
    for fqn, placement in target.placements.items():
        owner, _, name = fqn.rpartition(".")
        if name != "weight" or owner not in modules or isinstance(modules[owner], nn.Embedding):
            continue
        kind = linear_kind(modules[owner])
        if kind is None or not isinstance(placement, Shard | InterleavedShard):
            continue
        outer, _, layer = owner.rpartition(".")
        if outer in target.attention:
            continue  # whose forward reads the weight
        layers.setdefault(outer, ([], []))[placement.dim != kind.out_dim].append(layer)
        if placement.dim == kind.out_dim:
            enters = not target.is_in_region(owner)
            boundary.take_columns(modules[owner], owner, kind, placement)
            _column_wise(modules[owner], owner, kind, boundary, enters=enters)
            if owner in spec.outputs:
                _output(modules[owner], owner, spec.outputs[owner], boundary, keep_cut)
        else:
            split = (owner, "") in spec.inputs
            boundary.take_rows(modules[owner], owner, kind, placement)
            _row_wise(modules[owner], owner, kind, boundary, spec.left.get(owner), split=split)
    for outer, (entered, summed) in layers.items():
        if outer in modules:
            refuse_bypass(modules[outer], outer, entered, summed)


def _add_shared_linears(target: _Target) -> None:
    """Have whole linear layers compute this rank's part of their output."""
    for fqn, parts in target.spec.shared.items():
        module = target.modules.get(fqn)
        kind = None if module is None else linear_kind(module)
        if module is None or kind is None:
            continue
        _one_part(module, kind, parts, target.boundary)
        if not target.is_in_region(fqn):
            _enter(module, "", None, stack_of(fqn), target.boundary)


def _add_biases(target: _Target) -> None:
    """Have one rank add the parameters that belong to a sum over ranks."""
    names: dict[str, list[str]] = {}
    for fqn in target.spec.reads:
        owner, _, name = fqn.rpartition(".")
        names.setdefault(owner, []).append(name)
    for owner, added in names.items():
        if owner in target.modules:
            add_on_first_rank(target.modules[owner], added, target.boundary.ranks.rank)


def _add_read_parts(target: _Target) -> None:
    """Have modules find parts of sharded parameters whole that every rank uses."""
    names: dict[str, dict[str, ReadParts]] = {}
    for (fqn, name), parts in target.spec.read_parts.items():
        if fqn in target.modules:
            placement = target.placements.get(f"{fqn}.{name}")
            if placement is None:
                buffer = target.modules[fqn].get_buffer(name)
                placement = buffer_placement(target.spec, target.placements, fqn, name, buffer)
            names.setdefault(fqn, {})[name] = ReadParts(placement, parts)
    for fqn, read in names.items():
        bias = target.placements.get(f"{fqn}.bias")
        if "weight" in read and bias is not None:
            read.setdefault("bias", ReadParts(bias, read["weight"].parts))
        read_parts(target.modules[fqn], read, target.boundary)


def _add_whole_modules(target: _Target) -> None:
    """Gather what norms are called with, and shard what they return."""
    boundary = target.boundary
    for (fqn, argument), placement in target.spec.whole.items():
        if fqn not in target.modules:
            continue
        module, dim, key = target.modules[fqn], placement.dim, f"{fqn}.<whole>"
        on_argument(module, argument, lambda x, d=dim, key=key: boundary.gather_around(x, d, key))
        if not argument:
            on_output(module, lambda x, d=dim, key=key: boundary.split_behind(x, d, key))


def _add_reentered(target: _Target) -> None:
    for fqn, arrives in target.spec.reentered.items():
        if fqn in target.modules:
            dim, stack = shard_dim(arrives), stack_of(fqn)
            on_output(
                target.modules[fqn], lambda x, d=dim, s=stack: target.boundary.enter(x, d, s)
            )


def _add_exits(target: _Target) -> None:
    modules, spec, boundary = target.modules, target.spec, target.boundary
    for fqn, module in modules.items():
        if isinstance(module, nn.Embedding) and target.placements.get(f"{fqn}.weight") == Shard(0):
            shard_embedding_rows(module, boundary, spec.left.get(fqn), stack_of(fqn))
        elif fqn in target.attention:
            continue
        elif linear_kind(module) is None and spec.left.get(fqn, Partial()) != Partial():
            _leave(module, shard_dim(spec.left[fqn]), stack_of(fqn), boundary)
    for fqn, move in spec.outputs.items():
        if fqn not in modules or fqn in target.ends_left_out:
            continue
        if linear_kind(modules[fqn]) is None:
            on_output(modules[fqn], moved(move, stack_of(fqn), boundary))


def _attention_cuts(fqn: str, spec: ShardingSpec) -> AttentionCuts:
    def arrives(argument: str) -> int | None:
        named = spec.entered.get((fqn, argument))
        return shard_dim(named if named is not None else spec.entered.get((fqn, "")))

    return AttentionCuts(
        query=arrives("query"),
        key=arrives("key"),
        value=arrives("value"),
        output=shard_dim(spec.left.get(fqn)),
        stack=stack_of(fqn),
    )


def _keep_from_nesting(
    modules: Mapping[str, nn.Module], attention: Mapping[str, nn.Module]
) -> None:
    """Have torch encoders with sharded attention pass on plain tensors in evaluation, too."""
    for fqn, module in modules.items():
        below = f"{fqn}." if fqn else ""
        is_above = any(each.startswith(below) for each in attention)
        if is_above and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _column_wise(
    module: nn.Module, fqn: str, kind: LinearKind, boundary: Boundary, *, enters: bool
) -> None:
    length: int = getattr(module, kind.out_attribute)
    ranks = boundary.ranks
    setattr(module, kind.out_attribute, part_sizes(length, ranks.size)[ranks.rank])
    boundary.lengths[f"{fqn}.<out>"] = length
    if enters:
        _enter(module, "", None, stack_of(fqn), boundary)


def _one_part(module: nn.Module, kind: LinearKind, parts: int, boundary: Boundary) -> None:
    """Compute one chunk of a whole layer's output: key-value heads that several ranks share.

    The gradient of the weight is zero outside the chunk; the sum over ranks is the whole one.
    """
    length: int = getattr(module, kind.out_attribute) // parts
    first = boundary.ranks.rank * parts // boundary.ranks.size * length
    setattr(module, kind.out_attribute, length)
    own = module.forward
    is_known = computes_plainly(module)

    @functools.wraps(own)
    def one_part(*args: Any, **kwargs: Any) -> Tensor:
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        assert weight is not None
        chunk = weight.narrow(kind.out_dim, first, length)
        bias_chunk = None if bias is None else bias.narrow(0, first, length)
        if is_known:
            (x,) = (*args, *kwargs.values())
            return product(kind, x, weight=chunk, bias=bias_chunk)
        chunks: dict[str, Tensor | None] = {"weight": chunk}
        with replaced(module, chunks if bias is None else {**chunks, "bias": bias_chunk}):
            return own(*args, **kwargs)

    module.forward = one_part


def _row_wise(
    module: nn.Module,
    fqn: str,
    kind: LinearKind,
    boundary: Boundary,
    leaves: Placement | None,
    *,
    split: bool,
) -> None:
    stack, dim, stays = stack_of(fqn), shard_dim(leaves), isinstance(leaves, Partial)
    own = module.forward
    is_known = computes_plainly(module)

    def without_bias(bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        zeros = None if bias is None or kind.bias_optional else torch.zeros_like(bias)
        if is_known:
            weight = module._parameters["weight"]
            assert weight is not None
            (x,) = (*args, *kwargs.values())
            return product(kind, x, weight=weight, bias=zeros)
        with replaced(module, {} if bias is None else {"bias": zeros}):
            return own(*args, **kwargs)

    @functools.wraps(own)
    def summed(*args: Any, **kwargs: Any) -> Tensor:
        # The bias is added once, after the sum over ranks.
        bias = module._parameters.get("bias")
        if stays:
            total = without_bias(bias, *args, **kwargs)
        else:
            given = list(args) or [kwargs.pop(next(iter(kwargs)))]
            total = boundary.leave_layer(
                lambda x: without_bias(bias, x, *given[1:], **kwargs), given[0], dim, stack
            )
        return total if bias is None else boundary.add_bias(total, bias, dim)

    module.forward = summed
    if split:
        on_argument(module, "", lambda x: boundary.split(x, -1, f"{fqn}.<in>"))


def _output(
    module: nn.Module,
    fqn: str,
    move: PlacementChange,
    boundary: Boundary,
    keep_cut: KeepCut | None,
) -> None:
    """Gather the output of a column-wise linear, or hand it on as it is sharded."""
    if move.source == move.target and keep_cut is not None:
        keep_cut(module, num_features=boundary.lengths[f"{fqn}.<out>"])
        return

    def after(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        boundary.forget()
        return boundary.gather(output, -1, f"{fqn}.<out>")

    module.register_forward_hook(after, prepend=True)


def _enter(
    module: nn.Module, argument: str, dim: int | None, stack: str, boundary: Boundary
) -> None:
    on_argument(module, argument, lambda x: boundary.enter(x, dim, stack))


def _leave(module: nn.Module, dim: int | None, stack: str, boundary: Boundary) -> None:
    on_output(module, lambda x: boundary.leave(x, dim, stack))
