"""Functions of sliced tensors within blocks, and modules that compute on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from vescale_parallel._cross_replica.batches.small_batches import within
from vescale_parallel._cross_replica.context.guard import ContextGuard
from vescale_parallel._cross_replica.context.proof import proven_slicing
from vescale_parallel._cross_replica.context.sliced.rules import computed
from vescale_parallel._cross_replica.context.sliced.tensor import Along, Call, SlicedTensor
from vescale_parallel._cross_replica.context.slices import ContextThreads, Method, SequenceSlices
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._verify.threads import run_in_threads

from .test_context import (
    Block,
    Convolution,
    DropsPairs,
    Model,
    OwnMask,
    Placed,
    Pooled,
    draws_by,
    ids,
    model_with,
)

ROWS, LENGTH, FEATURES, HEADS = 2, 7, 6, 2
Function = Callable[[Tensor, Tensor], Tensor]
BIAS = torch.arange(LENGTH * LENGTH, dtype=torch.float64).view(LENGTH, LENGTH).sin()
TABLE = torch.arange(LENGTH * FEATURES, dtype=torch.float64).view(LENGTH, FEATURES).cos()


def heads(x: Tensor) -> Tensor:
    return x.view(ROWS, LENGTH, HEADS, -1).transpose(1, 2)


def folded(x: Tensor) -> Tensor:
    return heads(x).reshape(ROWS * HEADS, LENGTH, -1)


def _added(x: Tensor, w: Tensor) -> Tensor:
    scores = torch.baddbmm(BIAS[None], folded(x), folded(x * w).mT, beta=0.5, alpha=0.25)
    return torch.bmm(scores.softmax(-1), folded(x))


def _kernels(x: Tensor, w: Tensor) -> Tensor:
    keys = F.elu(x * w) + 1
    return x @ (keys.mT @ x) / (x @ keys.sum(1, keepdim=True).mT)


def _complex(x: Tensor, w: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.reshape(ROWS, LENGTH, -1, 2)) * (1 + 2j)
    return torch.view_as_real(turned).flatten(2) * w


# Each with how many tensors every rank gathers, forward.
IN_BLOCKS: dict[str, tuple[Function, int]] = {
    "scores": (
        lambda x, w: ((x * w) @ x.transpose(1, 2) + BIAS).softmax(-1) @ x, 2,
    ),
    "heads": (lambda x, w: (heads(x * w) @ heads(x).mT).tril().flatten(1, 1) @ heads(x), 2),
    "folded": (lambda x, w: torch.bmm(folded(x), folded(x * w).transpose(1, 2)), 1),
    "added": (_added, 2),
    "summed as": (
        lambda x, w: torch.einsum("bid, bjd -> bij", x * w, x).softmax(-1) @ x, 2,
    ),
    "summed with dots": (
        lambda x, w: torch.einsum("...id,...jd->...ij", heads(x), heads(x * w)), 1,
    ),
    "keys first": (lambda x, w: torch.einsum("bjd,bid->bji", x, x * w), 1),
    "columns": (lambda x, w: (TABLE * w) @ x.transpose(1, 2), 0),
    "of each position": (
        lambda x, w: (x * w).unflatten(-1, (2, 3)) @ x.view(ROWS, LENGTH, 3, 2), 0,
    ),
    "kernels": (_kernels, 2),
    "kernels summed": (
        lambda x, w: torch.einsum("bsd,bde->bse", x, torch.einsum("bsd,bse->bde", x * w, x)), 1,
    ),
    "turned scores": (lambda x, w: x @ (x * w).mT + (x @ x.mT).mT, 3),
    "mixed positions": (lambda x, w: BIAS @ (x * w), 1),
    "complex": (_complex, 0),
    "joined": (lambda x, w: torch.cat([x[..., 3:] * w[3:], -x[..., :3]], -1), 0),
    "joined as by numpy": (lambda x, w: torch.cat([x * w, x], axis=-1), 0),  # pyright: ignore[reportCallIssue]: not in torch's stub
    "stacked": (lambda x, w: torch.stack([x, x * w], 1), 0),
    "with a table": (lambda x, w: torch.cat([x, TABLE.expand(ROWS, -1, -1)], -1), 0),
    "split": (lambda x, w: (x * w).split(2, -1)[1] * x.chunk(3, dim=2)[0], 0),
    "unbound": (lambda x, w: heads(x * w).unbind(1)[1], 0),
    "chosen": (lambda x, w: (x * w).view(ROWS, LENGTH, 2, 3)[:, :, 1, None], 0),
    "expanded": (lambda x, w: (x * w)[:, :, None].expand(-1, LENGTH, 4, -1).flatten(2), 0),
    "repeated": (lambda x, w: (x * w)[:, None].repeat(1, 3, 1, 2), 0),
    "interleaved": (lambda x, w: (x * w).repeat_interleave(2, dim=-1), 0),
    "rolled": (lambda x, w: x.roll(1, -1) * w, 0),
    "larger": (lambda x, w: torch.max(x, TABLE * w), 0),
    "largest": (lambda x, w: x * w - x.max(-1, keepdim=True).values, 0),
    "of the top": (lambda x, w: (x * w).topk(2, dim=-1).values, 0),
    "typed": (lambda x, w: (x * w).type_as(heads(x)), 0),
    "new": (lambda x, w: x * w + x.new_ones(LENGTH, 1), 0),
    "mean": (lambda x, w: x * (x * w).mean(1, keepdim=True), 1),
}  # fmt: skip


class Counting(ContextThreads):
    """Ranks that are threads, which count what is gathered."""

    num_gathered = 0

    def all_gather(self, x: Tensor, dim: int, sizes: Any) -> Tensor:
        self.num_gathered += 1
        return super().all_gather(x, dim, sizes)


def given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
    w = torch.rand(FEATURES, generator=generator, dtype=torch.float64) + 0.5
    return x.requires_grad_(), w.requires_grad_()


def cotangent(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), dtype=torch.float64).view(like.shape).sin()


def on_rank(function: Function, method: Method, threads: ThreadExchange, rank: int) -> Any:
    ranks, (x, w) = Counting(threads, rank), given()
    slices = SequenceSlices.over(LENGTH, threads.size, method)
    along = Along(1, 1, slices, ranks, Call(0, lambda: None), computed, in_blocks=True)
    made = function(SlicedTensor.of(slices.part(x, 1, rank), along), w)
    assert isinstance(made, SlicedTensor)
    assert made.along.call.gathered_by == []
    num_gathered = ranks.num_gathered
    mine = made.along.part(cotangent(function(*given())), made.along.dim)
    (made.local * mine).sum().mul(threads.size).backward()
    return made.local.detach(), made.along.dim, x.grad, w.grad, num_gathered


@pytest.mark.parametrize(("method", "size"), [("all_to_all", 3), ("ring", 2)])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_functions_within_blocks_are_of_a_rank_s_positions(
    name: str, method: Method, size: int
) -> None:
    function, num_gathered = IN_BLOCKS[name]
    x, w = given()
    whole = function(x, w)
    (whole * cotangent(whole)).sum().backward()
    found = run_in_threads(size, lambda rank, threads: on_rank(function, method, threads, rank))
    slices = SequenceSlices.over(LENGTH, size, method)
    # Products of fewer rows, and sums over ranks, round in another order.
    for rank, (local, dim, *_, count) in enumerate(found):
        torch.testing.assert_close(local, slices.part(whole, dim, rank), rtol=1e-12, atol=1e-12)
        assert count == num_gathered
    for at, grad in ((2, x.grad), (3, w.grad)):
        parts = [each[at] for each in found if each[at] is not None]
        assert bool(parts) == (grad is not None)
        if grad is not None:  # gradients are averaged over the ranks of a sequence
            mean = sum(parts, torch.zeros_like(grad)) / size
            torch.testing.assert_close(mean, grad, rtol=1e-11, atol=1e-11)


class ByHand(Block):
    """Attention by matrix products."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Convolved(ByHand):
    """Queries that are a convolution over positions."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(F.avg_pool1d(q.flatten(0, 1).mT, 3, 1, 1).mT.view(q.shape), k, v)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(lambda: ByHand(nn.Identity())),
        lambda: Model(lambda: OwnMask(nn.Identity())),
        lambda: model_with(Placed),
        lambda: model_with(Pooled),
        lambda: Model(lambda: DropsPairs(nn.Identity())),
    ],
    ids=["products", "mask of the length", "positions", "mean of positions", "noise of pairs"],
)
def test_blocks_that_need_the_length_are_shown_whole_sequences(
    make: Callable[[], Model], size: int
) -> None:
    ContextGuard(make(), size, ids(), draws_by)


class Attention(nn.Module):
    """Attention that is a module, and returns a running sum."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ x.mT).softmax(-1) @ x).cumsum(1)


class Reversed(nn.Module):
    """Attention that returns its positions the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ x.mT).softmax(-1) @ x).flip(1)


class Gated(nn.Module):
    """Attention besides a recurrence that it scales, as blocks of hybrid models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrence = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.recurrence((x @ x.mT).softmax(-1) @ x)[0]


class Around(Block):
    def __init__(self, attention: Callable[[], nn.Module] = Attention) -> None:
        super().__init__(attention())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k * v


class Returning(Around):
    def __init__(self) -> None:
        super().__init__(Reversed)


class Recurring(Around):
    def __init__(self) -> None:
        super().__init__(Gated)


def test_functions_of_whole_sequences_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vescale.parallel"):
        ContextGuard(Model(Convolved), 2, ids(), draws_by)
    assert "blocks.0 computes 'avg_pool1d'" in caplog.text


@pytest.mark.parametrize(
    ("make", "function"), [(Around, "cumsum"), (Returning, "flip"), (Recurring, "gru")]
)
def test_modules_that_would_run_whole_are_refused_with_the_function_that_does(
    make: Callable[[], Block], function: str
) -> None:
    with pytest.raises(ValueError, match=f"every rank would compute '{function}' of whole"):
        ContextGuard(Model(make), 2, ids(), draws_by)


class CheckpointedWithin(ByHand):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(super().attend, q, k, v, use_reentrant=False)


def test_checkpoints_within_what_multiplies_are_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint around the module that multiplies"):
        ContextGuard(Model(lambda: CheckpointedWithin(nn.Identity())), 2, ids(), draws_by)


class WithTower(Model):
    """Blocks before others that attend, too, and are not one device's on slices."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(nn.Identity()))
        self.tower = nn.ModuleList(Block(Convolution()) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in (*self.tower, *self.blocks):
            x = block(x)
        return x


def test_stacks_that_do_not_run_on_slices_run_whole_before_others() -> None:
    given = {"ids": ids()}
    found = proven_slicing(WithTower(), given, 2, draws_by=draws_by, training=True)
    assert found.stacks == {"blocks"}


class Pair(nn.Module):
    """Two lists of blocks, of sequences of two lengths; the first makes positions itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = model_with(Placed), model_with(nn.Identity)

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids[:, :7]).sum(1) + self.second(ids).sum(1)


def test_what_differs_is_named_in_sequences_of_every_length() -> None:
    found = proven_slicing(Pair(), {"ids": ids()}, 2, draws_by=draws_by, training=True)
    assert found.stacks == {"first.blocks", "second.blocks"}
    assert found.shown.modules == {"first.blocks.0", "first.blocks.1"}


class Largest(TorchDispatchMode):
    """Notes the most elements of what is made with as many columns as there are positions."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.numel = length, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.ndim and made.shape[-1] == self.length:
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scores_that_are_written_out_fall_as_ranks_share_them(size: int) -> None:
    length = 32

    def watched(rank: int, threads: ThreadExchange) -> int:
        slices = SequenceSlices.over(length, size, "all_to_all")
        ranks = ContextThreads(threads, rank)
        along = Along(2, 1, slices, ranks, Call(0, lambda: None), computed, in_blocks=True)
        local = torch.ones(2, 4, length // size, 3, requires_grad=True)
        x = SlicedTensor.of(local, along)
        with Largest(length) as largest:
            made: Any = (x @ x.transpose(-2, -1)).softmax(-1) @ x
            made.local.sum().backward()
        return largest.numel

    assert run_in_threads(size, watched) == [2 * 4 * length * length // size] * size


class WithEntities(nn.Module):
    """A vocabulary, and a larger table of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.entities = nn.Embedding(10, 2), nn.Embedding(50, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


def test_tokens_of_a_small_example_are_of_the_vocabulary() -> None:
    found = within(WithEntities(), torch.tensor([3, 12, 40]))
    assert found.tolist() == [3, 2, 0]
