"""Ring attention: keys and values travel round the ranks of a sequence while blocks compute.

[Note: ring attention] After Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers
for Near-Infinite Context" (2023). A rank keeps its queries. Keys and values of all ranks pass by,
one rank's at a time, and a softmax that is kept unfinished (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018) takes them in: the highest score so far, the sum of
exponentials, and the values that they weight. Sums are in float32 at least.

Backward goes round again: with the logarithm of every row's sum a block's weights are made anew.
Gradients of keys and values travel along as sums over the ranks that have passed, home at last.

Under a causal mask early queries read little. A rank has one part of the sequence from its start
and one from its end, so that all ranks compute alike (the zig-zag of Zhu's ring-flash-attention;
"Striped Attention", Brandon et al. 2023, has another balance). Pairs of parts of which no key is
read are left out. Which they are, and every mask, is known from the positions that parts have in
the whole sequence.

Shapes: batch dims (..), H heads of keys, G queries of each, Q and K positions, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vescale_parallel._cross_replica.context.draws import MasksOfAttention
from vescale_parallel._cross_replica.context.slices import ContextRanks, Range, SequenceSlices
from vescale_parallel._trace.extents import Extent


@dataclass(frozen=True)
class Scoring:
    """How queries score keys.

    Attributes:
        scale: What products are multiplied with.
        is_causal: Whether queries read no later keys.
        mask: Of the whole sequence, (.., H * G or 1, S or 1, S or 1): True for what is read, or
            what is added to scores. None for all.
    """

    scale: float
    is_causal: bool = False
    mask: Tensor | None = None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    *,
    slices: SequenceSlices,
    ranks: ContextRanks,
    sinks: Tensor | None = None,
    masks: MasksOfAttention | None = None,
) -> Tensor:
    """Return attention of this rank's queries to the whole sequence. Every rank must call this.

    Args:
        query: (.., H * G, Q, D).
        key: (.., H, Q, D).
        value: (.., H, Q, Dv).
        scoring: Of all queries and keys of the sequence.
        slices: Which positions ranks have.
        ranks: Those that share the sequence.
        sinks: One score a head of queries, of a key that has no value.
        masks: Of dropout; None without.

    Returns:
        (.., H * G, Q, Dv).
    """
    grouped = query.unflatten(-3, (key.shape[-3], -1))
    made: Any = _Ring.apply(grouped, key, value, sinks, scoring, slices, ranks, masks)
    return made.flatten(-4, -3)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scoring: Scoring,
        slices: SequenceSlices,
        ranks: ContextRanks,
        masks: MasksOfAttention | None,
    ) -> Tensor:
        softmax = _Softmax(query, value.shape[-1], sinks)
        own = slices.ranges[ranks.rank]
        for source, k, v in _passing(key, value, slices, ranks):
            for q_at, k_at in pairs_read(own, slices.ranges[source], is_causal=scoring.is_causal):
                scores = _scores(q_at.of(query), k_at.of(k), q_at, k_at, scoring)
                kept = None if masks is None else _kept(masks, scores, q_at, k_at, slices)
                softmax.take(q_at, scores, k_at.of(v), kept)
        made, logs = softmax.finished()
        made = made.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, made, logs)
        ctx.given = scoring, slices, ranks, masks
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, made, logs = ctx.saved_tensors
        scoring, slices, ranks, masks = ctx.given
        own, dtype = slices.ranges[ranks.rank], logs.dtype
        grad = grad.to(dtype)
        drift = (grad * made).sum(-1, keepdim=True)
        of_query = torch.zeros_like(query, dtype=dtype)
        coming: Callable[[], Tensor] | None = None
        shapes = [(*x.shape[:-2], x.shape[-1]) for x in (key, value)]
        for source, k, v in _passing(key, value, slices, ranks):
            of_key, of_value = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
            for q_at, k_at in pairs_read(own, slices.ranges[source], is_causal=scoring.is_causal):
                q_part, k_part, g_part = q_at.of(query), k_at.of(k), q_at.of(grad)
                scores = _scores(q_part, k_part, q_at, k_at, scoring)
                weights = (scores - q_at.of(logs)).exp_()
                kept = None if masks is None else _kept(masks, weights, q_at, k_at, slices)
                dropped = weights if kept is None else weights * kept
                k_at.of(of_value).add_((dropped.mT @ g_part).sum(-3))
                given = g_part @ k_at.of(v).to(dtype).unsqueeze(-3).mT
                given = given if kept is None else given.mul_(kept)
                # Of scores before they were scaled; of a softmax, with the mean of its row taken.
                given = given.sub_(q_at.of(drift)).mul_(weights).mul_(scoring.scale)
                q_at.of(of_query).add_(given @ k_part.to(dtype).unsqueeze(-3))
                k_at.of(of_key).add_((given.mT @ q_part.to(dtype)).sum(-3))
            packed = _packed(of_key, of_value)
            if coming is not None:
                packed = coming().add_(packed)
            # What the rank before has of its own keys' next; those of the next one go home last.
            received = _numel(shapes, slices.sizes[(source - 1) % ranks.size])
            coming = ranks.pass_on(packed, received)
        assert coming is not None
        of_key, of_value = _unpacked(coming(), shapes, slices.sizes[ranks.rank])
        of_sinks = None
        if sinks is not None:
            weights = (_of_heads(sinks, query).to(dtype) - logs).exp()
            of_sinks = _summed_to(-weights * drift, query).to(sinks.dtype)
        pairs = ((of_query, query), (of_key, key), (of_value, value))
        return *(x.to(like.dtype) for x, like in pairs), of_sinks, None, None, None, None


@dataclass(frozen=True)
class Part:
    """A part of what a rank holds: where it begins there and in the whole, and how long it is."""

    here: int
    whole: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """Return that part of a tensor (.., positions, features)."""
        return x.narrow(-2, self.here, self.length)


def _parts(ranges: Sequence[Range]) -> Iterator[Part]:
    here = 0
    for first, end in ranges:
        yield Part(here, first, end - first)
        here += end - first


def pairs_read(
    queries: Sequence[Range], keys: Sequence[Range], *, is_causal: bool
) -> Iterator[tuple[Part, Part]]:
    """Return the parts of queries and keys of which some keys are read."""
    for q_at in _parts(queries):
        for k_at in _parts(keys):
            if not is_causal or k_at.whole < q_at.whole + q_at.length:
                yield q_at, k_at


def _passing(
    key: Tensor, value: Tensor, slices: SequenceSlices, ranks: ContextRanks
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Return each rank with its keys and values, this one first, while the next ones travel."""
    shapes = [(*x.shape[:-2], x.shape[-1]) for x in (key, value)]
    held, size = _packed(key, value), ranks.size
    for step in range(size):
        source, coming = (ranks.rank - step) % size, None
        if step + 1 < size:
            following = slices.sizes[(source - 1) % size]
            coming = ranks.pass_on(held, _numel(shapes, following))
        if step:
            key, value = _unpacked(held, shapes, slices.sizes[source])
        yield source, key, value
        if coming is not None:
            held = coming()


def _packed(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(
    packed: Tensor, shapes: Sequence[Sequence[int]], length: int
) -> tuple[Tensor, Tensor]:
    k_shape, v_shape = ((*shape[:-1], length, shape[-1]) for shape in shapes)
    keys, values = packed.split([torch.Size(k_shape).numel(), torch.Size(v_shape).numel()])
    return keys.view(k_shape), values.view(v_shape)


def _numel(shapes: Sequence[Sequence[int]], length: int) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes) * length


def _scores(query: Tensor, key: Tensor, q_at: Part, k_at: Part, scoring: Scoring) -> Tensor:
    """Return scores (.., H, G, Q, K) of parts of queries and keys, -inf for what is not read."""
    dtype = _summed_in(query.dtype)
    scores = query.to(dtype) @ key.to(dtype).unsqueeze(-3).mT
    scores = scores.mul_(scoring.scale)
    if scoring.mask is not None:
        mask = _mask_part(scoring.mask, q_at, k_at, scores.shape[-4:-2])
        if mask.dtype is torch.bool:
            scores = scores.masked_fill_(~mask, -torch.inf)
        else:
            scores = scores.add_(mask)
    if scoring.is_causal and k_at.whole + k_at.length > q_at.whole + 1:
        rows = torch.arange(q_at.whole, q_at.whole + q_at.length, device=query.device)
        columns = torch.arange(k_at.whole, k_at.whole + k_at.length, device=query.device)
        scores = scores.masked_fill_(columns > rows[:, None], -torch.inf)
    return scores


def _mask_part(mask: Tensor, q_at: Part, k_at: Part, heads: Sequence[int]) -> Tensor:
    """Return what a mask says of parts of queries and keys, with dims of grouped heads."""
    for dim, at in ((-2, q_at), (-1, k_at)):
        if mask.shape[dim] > 1:
            mask = mask.narrow(dim, at.whole, at.length)
    if mask.dim() < 3:
        return mask
    return mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, tuple(heads))


def _kept(
    masks: MasksOfAttention, scores: Tensor, q_at: Part, k_at: Part, slices: SequenceSlices
) -> Tensor:
    """Return what dropout multiplies the weights (.., H, G, Q, K) of a block with."""
    queries, keys = (
        Extent(slices.length, ((at.whole, at.whole + at.length),)) for at in (q_at, k_at)
    )
    of_heads = scores.flatten(-4, -3)
    return masks.block(of_heads, queries, keys).view_as(scores)


class _Softmax:
    """Weighted values of which more scores are still to come, row by row."""

    def __init__(self, query: Tensor, features: int, sinks: Tensor | None) -> None:
        dtype, rows = _summed_in(query.dtype), query.shape[:-1]
        self._values = query.new_zeros(*rows, features, dtype=dtype)
        self._highest = query.new_full((*rows, 1), -torch.inf, dtype=dtype)
        self._sums = query.new_zeros(*rows, 1, dtype=dtype)
        if sinks is not None:
            self._highest.copy_(_of_heads(sinks, query))
            self._sums.fill_(1)

    def take(self, at: Part, scores: Tensor, values: Tensor, kept: Tensor | None = None) -> None:
        """Take in scores of some rows, and the values that they weight.

        Dropout is of weights as they are when all are known: it leaves sums as they are, and
        multiplies what weights values with ``kept``.
        """
        before, sums = at.of(self._highest), at.of(self._sums)
        highest = torch.maximum(before, scores.amax(-1, keepdim=True))
        # Rows that read nothing so far have no highest score.
        base = highest.masked_fill(highest == -torch.inf, 0)
        weights, shrunk = scores.sub_(base).exp_(), (before - base).exp_()
        sums.mul_(shrunk).add_(weights.sum(-1, keepdim=True))
        weights = weights if kept is None else weights.mul_(kept)
        more = weights @ values.to(weights.dtype).unsqueeze(-3)
        at.of(self._values).mul_(shrunk).add_(more)
        before.copy_(highest)

    def finished(self) -> tuple[Tensor, Tensor]:
        """Return weighted means, and the logarithms of sums; rows that read nothing are zero."""
        read_nothing = self._sums == 0
        sums = self._sums.masked_fill(read_nothing, 1)
        logs = (self._highest + sums.log()).masked_fill_(read_nothing, 0)
        return self._values / sums, logs


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_heads(sinks: Tensor, query: Tensor) -> Tensor:
    """Return one number a head of queries, along the heads (.., H, G, Q, D) of these."""
    return sinks.view(*query.shape[-4:-2], 1, 1)


def _summed_to(x: Tensor, query: Tensor) -> Tensor:
    """Return sums a head of queries: the opposite of :func:`_of_heads`."""
    return x.sum((*range(x.dim() - 4), -2, -1)).reshape(-1)
