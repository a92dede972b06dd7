"""What ranks on slices of a sequence compute, and which models they are refused for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_parallel import ParallelPlan, with_constraints
from vescale_parallel._cross_replica.context.attention.heads import Heads, HeadsAttention
from vescale_parallel._cross_replica.context.blocks import SlicedBlocks
from vescale_parallel._cross_replica.context.guard import ContextGuard
from vescale_parallel._cross_replica.context.proof import proven_slicing
from vescale_parallel._cross_replica.context.slices import (
    ContextThreads,
    Method,
    SequenceSlices,
    slice_sizes,
)
from vescale_parallel._cross_replica.context.slicing import ShortSequenceError, Slicing
from vescale_parallel._rng.known_draws import Place
from vescale_parallel._rng.sharded_rng import ShardedRng
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._verify.threads import run_in_threads

FEATURES, HEADS, LENGTH = 8, 4, 10


def test_slices_differ_by_one_position_at_most() -> None:
    assert slice_sizes(9, 4) == [3, 2, 2, 2]
    assert slice_sizes(8, 4) == [2, 2, 2, 2]


@pytest.mark.parametrize(("queries", "keys", "size"), [(8, 2, 4), (8, 8, 4), (6, 3, 4), (5, 1, 3)])
def test_ranks_have_the_keys_that_their_queries_read(queries: int, keys: int, size: int) -> None:
    heads = Heads.over(queries, keys, size)
    whole = torch.arange(keys)[:, None, None]
    expected = whole.repeat_interleave(queries // keys, 0)
    for rank, ((first, end), (low, high)) in enumerate(
        zip(heads.queries, heads.keys, strict=True)
    ):
        assert torch.equal(heads.repeated(whole[low:high], rank), expected[first:end])
    assert (heads.queries[0][0], heads.queries[-1][1]) == (0, queries)


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_largest_tensor_of_attention_falls_as_ranks_share_it(size: int) -> None:
    rows, heads, length = 2, 8, 64

    def by_definition(q: Tensor, k: Tensor, v: Tensor, _: Heads) -> tuple[Tensor, None]:
        return (q @ k.mT).softmax(-1) @ v, None

    def watched(rank: int, threads: ThreadExchange) -> int:
        attention = HeadsAttention(ContextThreads(threads, rank))
        attention.slices = SequenceSlices.over(length, size, "all_to_all")
        of_slice = (rows, heads, attention.slices.sizes[rank], FEATURES)
        given = [torch.ones(of_slice, requires_grad=True) for _ in range(3)]
        with Largest() as largest:
            made, _ = attention.attend(given[0], given[1], given[2], by_definition)
            made.sum().backward()
        return largest.numel

    scores = rows * heads * length * length
    assert run_in_threads(size, watched) == [scores // size] * size


Mix = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Attention, and something else beside it."""

    def __init__(self, beside: nn.Module, *, is_causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.beside, self.is_causal, self.drop = beside, is_causal, nn.Dropout(dropout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        ]
        x = x + self.drop(self.out(self.attend(*heads).transpose(1, 2).flatten(2)))
        return x + self.beside(x)


class Model(nn.Module):
    def __init__(self, make: Callable[[], Block]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, FEATURES), nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.cumsum(1))  # outside of blocks sequences are whole


class Convolution(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES, 3, padding=1)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


class Cumulative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class Placed(nn.Module):
    """Positions that a block makes itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1], dtype=x.dtype)[:, None]


class Mixer(nn.Module):
    """A product over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(FEATURES, FEATURES, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class BatchNorm(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(FEATURES)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


def draws_by(blocks: SlicedBlocks) -> ShardedRng:
    """Have modules draw the part of a rank that shares sequences alone."""
    return ShardedRng(Place.alone(), {}, None, blocks)


def ids() -> Tensor:
    return torch.arange(2 * LENGTH).view(2, LENGTH) % 16


def model_with(beside: type[nn.Module], *, is_causal: bool = True) -> Model:
    return Model(lambda: Block(beside(), is_causal=is_causal))


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_that_mix_positions_by_attention_alone_are_proven(
    method: Method, size: int, is_causal: bool
) -> None:
    model = model_with(nn.Identity, is_causal=is_causal)
    found = proven_slicing(
        model, {"ids": ids()}, size, draws_by=draws_by, training=True, method=method
    )
    assert found.stacks == {"blocks"}


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        (Convolution, "'blocks.0.beside' returns something else"),
        (Cumulative, "'blocks.0.beside' returns something else"),
        (Recurrent, "'blocks.0.beside.*' returns something else|GRU"),
        (BatchNorm, "'blocks.0.beside' returns something else"),
        (Mixer, "does not run on slices"),
    ],
)
def test_what_mixes_positions_otherwise_is_refused_by_name(
    beside: type[nn.Module], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        ContextGuard(model_with(beside), 2, ids(), draws_by)


class NoneAttends(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * k + v


class OwnMask(Block):
    """A mask that a block makes of the length that it sees."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask)


class OneHead(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(2)[:, None] for x in (q, k, v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return made[:, 0].unflatten(-1, (HEADS, -1)).transpose(1, 2)


class DropsTurned(Block):
    """Dropout of (positions * rows), in which positions are not innermost."""

    def forward(self, x: Tensor) -> Tensor:
        turned = F.dropout(super().forward(x).transpose(0, 1).flatten(0, 1), 0.5)
        return turned.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


class DropsPairs(Block):
    """Noise of pairs of the positions that a block sees."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(x.shape[1], x.shape[1]).mean()


class DropsTwice(Block):
    """One draw of a module that is called twice, for other features."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        again = self.beside(q), self.beside(k[..., :1])
        return super().attend(again[0], again[1] + k, v)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: NoneAttends(nn.Identity()), "found no list of two or more blocks"),
        (lambda: OneHead(nn.Identity()), "there are 1; use a size of at most 1"),
        (lambda: DropsTurned(nn.Identity()), "is not one device's on slices"),
        (
            lambda: DropsTwice(nn.Dropout(0.5)),
            "'blocks.0.beside' draws random numbers of several shapes",
        ),
    ],
)
def test_attention_that_is_not_understood_is_refused(make: Callable[[], Block], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ContextGuard(Model(make), 2, ids(), draws_by)


class DropsBetween(Model):
    """Dropout before blocks, between them and behind them; only that between is of slices."""

    def __init__(self, **chances: float) -> None:
        super().__init__(lambda: Block(nn.Identity()))
        self.chances = chances

    def drop(self, x: Tensor, place: str) -> Tensor:
        return F.dropout(x, self.chances.get(place, 0.0), self.training)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids), "before")
        x = self.blocks[0](x)
        x = self.blocks[1](self.drop(x, "between"))
        return self.head(self.drop(x, "behind"))


def test_dropout_of_whole_sequences_is_no_matter_of_slices() -> None:
    model = DropsBetween(before=0.2, behind=0.3)
    assert proven_slicing(model, {"ids": ids()}, 2, draws_by=draws_by, training=True).stacks == {
        "blocks"
    }


METHODS: tuple[Method, ...] = ("all_to_all", "ring")


@pytest.mark.parametrize("method", METHODS)
def test_dropout_of_slices_is_that_of_one_device(method: Method) -> None:
    model = Model(lambda: Block(nn.Identity(), dropout=0.1))
    found = proven_slicing(
        model, {"ids": ids()}, 2, draws_by=draws_by, training=True, method=method
    )
    assert {fqn: each.dim for (fqn, *_), each in found.drawn.items()} == {
        "blocks.0.drop": 1,
        "blocks.1.drop": 1,
    }


def test_dropout_between_blocks_is_of_slices() -> None:
    model = DropsBetween(before=0.2, between=0.1, behind=0.3)
    found = proven_slicing(model, {"ids": ids()}, 2, draws_by=draws_by, training=True)
    assert [(key, each.dim) for key, each in found.drawn.items()] == [(("", 1, 3), 1)]


def test_dropout_does_not_matter_in_evaluation() -> None:
    model = Model(lambda: Block(nn.Identity(), dropout=0.1)).eval()
    found = proven_slicing(model, {"ids": ids()}, 2, draws_by=draws_by, training=False)
    assert found.stacks == {"blocks"}


def test_later_calls_slice_the_dims_of_the_call_that_was_compared() -> None:
    slicing = Slicing()
    assert slicing.dim("blocks.0", 1, torch.zeros(2, 9, 4), 9) == 1
    assert slicing.dim("blocks.0", 2, torch.zeros(2, 5, 4), 9) is None
    # Memory that is as long as the sequence by chance.
    assert slicing.dim("blocks.0", 2, torch.zeros(2, 5, 4), 5) is None
    with pytest.raises(ValueError, match=r"a tensor of 7 positions in dim 1, .* \(2, 9, 4\)"):
        slicing.dim("blocks.0", 1, torch.zeros(2, 9, 4), 7)


def test_sequences_of_one_position_a_rank_prove_nothing() -> None:
    model = model_with(nn.Identity)
    with pytest.raises(ShortSequenceError, match=r"needs sequences of 12 positions or more"):
        proven_slicing(model, {"ids": ids()}, 6, draws_by=draws_by, training=True)
    assert ContextGuard(model, 6, ids(), draws_by)._known == {}


@pytest.mark.parametrize(
    ("data", "context", "experts", "axes"),
    [
        (2, 2, 2, {"ep": 2, "dp_shard": 1, "cp": 2}),
        (1, 4, 2, {"ep": 2, "dp_shard": 1, "cp": 2}),
        (2, 2, 4, {"ep": 4, "dp_shard": 1, "cp": 1}),
        (6, 2, 4, {"ep": 4, "dp_shard": 3, "cp": 1}),
    ],
)
def test_experts_take_ranks_of_the_batch_before_those_of_a_sequence(
    data: int, context: int, experts: int, axes: dict[str, int]
) -> None:
    plan = with_constraints(
        ParallelPlan(),
        {
            "data_parallel.size": data,
            "data_parallel.zero_stage": 3,
            "context_parallel.size": context,
            "expert_parallel.size": experts,
        },
    )
    assert plan.world_size == data * context
    assert {name: plan.axes[name] for name in axes} == axes


def test_experts_divide_the_ranks_of_batch_and_sequence() -> None:
    sizes = {"data_parallel.size": 3, "context_parallel.size": 2, "expert_parallel.size": 4}
    with pytest.raises(ValueError, match=r"times context_parallel.size \(3 x 2\).* got 4"):
        with_constraints(ParallelPlan(), sizes)
