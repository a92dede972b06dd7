"""Attention of slices of a sequence: whole sequences of some heads on every rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._cross_replica.context.conversions import to_heads, to_slices
from vescale_parallel._cross_replica.context.slices import (
    ContextRanks,
    Range,
    SequenceSlices,
    slice_sizes,
)
from vescale_parallel._trace.extents import Extent

from .intercept import refuse_checkpoint_within

_NUM_DIMS = 3  # heads, positions, features
_GROUPS = "num_key_value_groups"  # of transformers' attention modules
# Of F.scaled_dot_product_attention.
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class Heads:
    """Which heads each rank attends with.

    Attributes:
        queries: Of each rank.
        keys: Of keys and values, likewise; those that its queries read.
        group: Queries that read one key.
    """

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    group: int

    @staticmethod
    def over(num_queries: int, num_keys: int, size: int) -> Heads:
        """Share out heads over ranks, in order.

        Raises:
            ValueError: If there are fewer heads than ranks, or keys do not divide queries.
        """
        if num_queries < size:
            raise ValueError(
                f"context_parallel.size {size} shares out the heads of attention, of which there "
                f"are {num_queries}; use a size of at most {num_queries}"
            )
        if num_queries % num_keys:
            raise ValueError(
                f"expected heads of queries to be a multiple of those of keys, got {num_queries} "
                f"and {num_keys}"
            )
        group, ends = num_queries // num_keys, [0]
        for count in slice_sizes(num_queries, size):
            ends.append(ends[-1] + count)
        queries = tuple(itertools.pairwise(ends))
        return Heads(queries, tuple((a // group, -(-b // group)) for a, b in queries), group)

    def is_aligned(self, rank: int) -> bool:
        """Whether a rank's queries are all that read its keys, as on one device."""
        (first, end), keys = self.queries[rank], self.keys[rank]
        return (keys[0] * self.group, keys[1] * self.group) == (first, end)

    def repeated(self, keys: Tensor, rank: int) -> Tensor:
        """Return the keys (.., heads, S, D) of a rank once for each of its queries."""
        first, end = self.queries[rank]
        read = torch.arange(first, end, device=keys.device) // self.group - self.keys[rank][0]
        return keys.index_select(-3, read)


class HeadsAttention:
    """Attention of ranks that have slices of one sequence.

    Attributes:
        slices: Of the sequence that runs.
    """

    def __init__(self, ranks: ContextRanks) -> None:
        self.ranks = ranks
        self.slices = SequenceSlices(())
        self._inside: Heads | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, compute: _Compute) -> Any:
        """Return this rank's slice of attention, of whole sequences of its heads.

        ``compute`` is given those, and which they are, and returns a tensor of their shape and
        anything else.
        """
        check_slices((query, key, value), self.slices, self.ranks.rank)
        refuse_checkpoint_within()
        rank, sizes = self.ranks.rank, self.slices.sizes
        heads = Heads.over(query.shape[-3], key.shape[-3], self.ranks.size)
        whole = [
            to_heads(x, of_ranks, sizes, self.ranks)
            for x, of_ranks in ((query, heads.queries), (key, heads.keys), (value, heads.keys))
        ]
        if not heads.is_aligned(rank):
            whole[1:] = [heads.repeated(x, rank) for x in whole[1:]]
        self._inside = heads
        try:
            made, more = compute(whole[0], whole[1], whole[2], heads)
        finally:
            self._inside = None
        return to_slices(made, heads.queries, sizes, self.ranks), more

    def scaled_dot_product(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute what ``F.scaled_dot_product_attention`` is called for on one device."""
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        query, key, value = (given.pop(name) for name in ARGUMENTS[:3])
        rank = self.ranks.rank

        def compute(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> tuple[Tensor, None]:
            mine = {name: _own(x, heads, rank) for name, x in given.items()}
            return F.scaled_dot_product_attention(q, k, v, **mine), None

        return self.attend(query, key, value, compute)[0]

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute what one of transformers' attention functions is called for on one device.

        They return (batch, positions, heads, features) and weights.
        """
        module, query, key, value, *others = args
        rank, num_heads = self.ranks.rank, query.shape[-3]

        def compute(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> tuple[Tensor, Any]:
            mine = [_own(x, heads, rank) for x in others]
            named = {name: _own(x, heads, rank) for name, x in kwargs.items()}
            with _of_heads(module, num_heads, heads, rank):
                made, weights = function(module, q, k, v, *mine, **named)
            return made.transpose(1, 2), weights

        made, weights = self.attend(query, key, value, compute)
        return made.transpose(1, 2).contiguous(), weights

    def wants(self) -> bool:
        """Whether attention that is called now is that of slices."""
        return self._inside is None

    def computes(self, mask: Tensor | None, dropout: float, others: Mapping[str, Any]) -> bool:
        """Whether it knows scores with these, which the model's own function computes."""
        return True

    @property
    def is_along_sequence(self) -> bool:
        """Whether this rank has a slice of the sequence now, and not some heads."""
        return self._inside is None

    def extent(self) -> Extent:
        """Return what this rank has now: of the sequence, or of the heads that attend."""
        rank = self.ranks.rank
        if self._inside is not None:
            queries = self._inside.queries
            return Extent(queries[-1][1], (queries[rank],))
        return Extent(self.slices.length, self.slices.ranges[rank])


def check_slices(given: Sequence[Tensor], slices: SequenceSlices, rank: int) -> None:
    """Refuse attention within blocks that is not of a rank's slice of the sequence."""
    own = slices.sizes[rank]
    shapes = [tuple(x.shape) for x in given]
    if min(map(len, shapes)) < _NUM_DIMS or any(shape[-2] != own for shape in shapes):
        raise ValueError(
            f"expected attention within blocks to be of this rank's {own} of "
            f"{slices.length} positions, (batch, heads, positions, features), got queries, "
            f"keys and values of {', '.join(map(str, shapes))}; attention to another "
            "sequence, or with a cache, needs context_parallel.size 1"
        )


_Compute = Callable[[Tensor, Tensor, Tensor, Heads], tuple[Tensor, Any]]


def _own_heads(x: Tensor, heads: Heads, rank: int) -> Tensor:
    """Return a rank's heads of a mask or bias (.., heads or 1, S, S)."""
    first, end = heads.queries[rank]
    if x.dim() < _NUM_DIMS or x.shape[-3] != heads.queries[-1][1] or x.shape[-3] == 1:
        return x
    return x.narrow(-3, first, end - first)


def _own(x: Any, heads: Heads, rank: int) -> Any:
    """Return what of an argument belongs to a rank's heads: a bias, or one number a head."""
    if not isinstance(x, Tensor):
        return x
    first, end = heads.queries[rank]
    return x[first:end] if x.shape == (heads.queries[-1][1],) else _own_heads(x, heads, rank)


@contextlib.contextmanager
def _of_heads(module: nn.Module, num_heads: int, heads: Heads, rank: int) -> Iterator[None]:
    """Have an attention module hold what belongs to a rank's heads: sinks, groups of queries."""
    first, end = heads.queries[rank]
    held = dict(module._parameters)
    groups = getattr(module, _GROUPS, None)
    for name, parameter in held.items():
        if parameter is not None and parameter.shape == (num_heads,):
            part: Any = parameter[first:end]
            module._parameters[name] = part
    if groups is not None and not heads.is_aligned(rank):
        setattr(module, _GROUPS, 1)
    try:
        yield
    finally:
        module._parameters.update(held)
        if groups is not None:
            setattr(module, _GROUPS, groups)
