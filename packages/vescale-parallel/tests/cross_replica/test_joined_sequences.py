"""Slices of a sequence that are joined with another one, which every rank has whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._cross_replica.context.attention.cross import AttendsAcross
from vescale_parallel._cross_replica.context.attention.heads import HeadsAttention
from vescale_parallel._cross_replica.context.attention.intercept import AttentionMode
from vescale_parallel._cross_replica.context.attention.of_sliced import AttendsSliced
from vescale_parallel._cross_replica.context.conversions import gather_slices
from vescale_parallel._cross_replica.context.proof import proven_slicing
from vescale_parallel._cross_replica.context.sliced.rules import computed
from vescale_parallel._cross_replica.context.sliced.tensor import Along, Call, SlicedTensor
from vescale_parallel._cross_replica.context.slices import ContextThreads, Method, SequenceSlices
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._verify.threads import run_in_threads

from .test_context import draws_by, ids
from .test_shown_modules import Counting, cotangent

ROWS, LENGTH, TEXT, FEATURES = 2, 7, 3, 6
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
TABLE = torch.arange((TEXT + LENGTH) * FEATURES, dtype=torch.float64).view(-1, FEATURES).cos()


def _attended(joined: Tensor) -> Tensor:
    return (joined @ joined.mT).softmax(-1) @ joined


def _twice(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    """Attend in two layers, of which the second reads what the first made of the text."""
    made = _attended(torch.cat([t, x * w], 1))
    t, x = made.split([TEXT, LENGTH], dim=1)
    return _attended(torch.cat([x, t * w], 1))[:, :LENGTH]


def _fused(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    joined = torch.cat([t, x * w], 1)[:, None] + TABLE
    q, k, v = joined, joined * w, joined.flip(-1)
    return F.scaled_dot_product_attention(q, k, v).squeeze(1)[:, TEXT:]


def _causal(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    joined = torch.cat([t, x * w], 1)[:, None]
    made = F.scaled_dot_product_attention(joined, joined, joined, is_causal=True)
    return made.squeeze(1).narrow(1, TEXT, LENGTH)


def _queries_alone(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    q, k = (x * w)[:, None], torch.cat([t, x], 1)[:, None]
    hidden = torch.ones(LENGTH, TEXT + LENGTH, dtype=torch.bool).tril(TEXT)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=hidden).squeeze(1)


def _shifted(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return x * w + torch.cat([x.new_zeros(ROWS, 1, FEATURES), (x * w)[:, :-1]], 1)


# Each with how many tensors every rank gathers, forward.
JOINED: dict[str, tuple[Function, int]] = {
    "attended": (lambda x, t, w: _attended(torch.cat([t * w, x], 1))[:, TEXT:], 2),
    "twice": (_twice, 4),
    "fused": (_fused, 2),
    "causal": (_causal, 2),
    "queries alone": (_queries_alone, 2),
    "chunks": (
        lambda x, t, w: torch.cat(torch.cat([t, x, t * w], 1).chunk(3, 1), 1)[:, TEXT : -TEXT],
        0,
    ),
    "padded": (lambda x, t, w: F.pad(x * w, (1, 0, 2, 1), value=2.0)[:, 2:-1, 1:], 0),
    "shifted": (_shifted, 1),
    "with nothing": (lambda x, t, w: torch.cat([x.new_zeros(0), x * w], 1), 0),
    "meeting": (lambda x, t, w: torch.cat([x, x * w], 1)[:, LENGTH:], 0),
    "mean": (
        lambda x, t, w: x * torch.cat([t * w, x], 1).mean(1, keepdim=True), 1,
    ),
    "kernels": (
        lambda x, t, w: x @ (torch.cat([t, x * w], 1).mT @ torch.cat([t, x], 1)), 2,
    ),
    "summed as": (
        lambda x, t, w: x @ torch.einsum(
            "bsd,bse->bde", torch.cat([t, x * w], 1), torch.cat([t, x], 1)
        ), 2,
    ),
}  # fmt: skip


def given() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, LENGTH, FEATURES), (ROWS, TEXT, FEATURES), (FEATURES,)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.requires_grad_() for x in made]


def on_rank(function: Function, method: Method, threads: ThreadExchange, rank: int) -> Any:
    ranks, (x, t, w) = Counting(threads, rank), given()
    slices = SequenceSlices.over(LENGTH, threads.size, method)
    along = Along(1, 1, slices, ranks, Call(0, lambda: None), computed, in_blocks=True)
    of_slices = HeadsAttention(ranks)
    of_slices.slices = slices
    attention = AttendsSliced(AttendsAcross(of_slices, rank, lambda _: False))
    with AttentionMode(attention):
        made = function(SlicedTensor.of(slices.part(x, 1, rank), along), t, w)
    assert isinstance(made, SlicedTensor)
    assert made.along.slices.is_like(slices)
    num_gathered, mine = ranks.num_gathered, slices.part(cotangent(x), 1, rank)
    (made.local * mine).sum().mul(threads.size).backward()
    return made.local.detach(), [x.grad, t.grad, w.grad], num_gathered


@pytest.mark.parametrize(("method", "size"), [("all_to_all", 3), ("ring", 2)])
@pytest.mark.parametrize("name", JOINED)
def test_sequences_are_joined_and_taken_apart(name: str, method: Method, size: int) -> None:
    function, num_gathered = JOINED[name]
    inputs = given()
    whole = function(*inputs)
    (whole * cotangent(whole)).sum().backward()
    found = run_in_threads(size, lambda rank, threads: on_rank(function, method, threads, rank))
    slices = SequenceSlices.over(LENGTH, size, method)
    # Products of fewer rows, and sums over ranks, round in another order.
    for rank, (local, _, count) in enumerate(found):
        torch.testing.assert_close(local, slices.part(whole, 1, rank), rtol=1e-12, atol=1e-12)
        assert count == num_gathered
    for at, x in enumerate(inputs):  # gradients are averaged over the ranks of a sequence
        parts = [grads[at] for _, grads, _ in found if grads[at] is not None]
        expected = torch.zeros_like(x) if x.grad is None else x.grad
        mean = sum(parts, torch.zeros_like(x)) / size
        torch.testing.assert_close(mean, expected, rtol=1e-11, atol=1e-11)


def test_what_every_rank_has_is_not_sent() -> None:
    """Of a sequence between two others, with ranges of a ring."""
    ring = SequenceSlices.over(9, 2, "ring")
    shifted = (((2 + a, 2 + b) for a, b in ranges) for ranges in ring.ranges)
    slices = SequenceSlices(tuple(((0, 2), *ranges, (11, 14)) for ranges in shifted))
    assert (slices.length, slices.shared) == (14, [(0, 2), (11, 14)])
    assert slices.apart() == slices.narrowed(2, 11) == ring
    assert slices.narrowed(0, 2).is_whole
    whole, sent = torch.arange(14.0), list[int]()

    class Sending(ContextThreads):
        def all_gather(self, x: Tensor, dim: int, sizes: Any) -> Tensor:
            sent.append(x.numel())
            return super().all_gather(x, dim, sizes)

    def gathered(rank: int, threads: ThreadExchange) -> Tensor:
        part = slices.part(whole, 0, rank)
        return gather_slices(part, 0, slices, Sending(threads, rank), sums=True)

    for found in run_in_threads(2, gathered):
        assert torch.equal(found, whole)
    assert sorted(sent) == sorted(ring.sizes)


class Stream(nn.Module):
    """Text and an image that attend to both, and return text first."""

    def __init__(self) -> None:
        super().__init__()
        self.of_image, self.of_text = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.of_text(text), self.of_image(image)], 1)
        q_BHSF = joined[:, None]
        made = F.scaled_dot_product_attention(q_BHSF, q_BHSF, q_BHSF).squeeze(1)
        text_made, made = made.split([text.shape[1], image.shape[1]], 1)
        return text + text_made, image + made


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Stream() for _ in range(2))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        image, text = self.embed(ids), self.embed(ids[:, :3])
        for block in self.blocks:
            text, image = block(image, text)
        return image, text


def test_the_next_block_says_which_of_two_streams_is_the_activation() -> None:
    found = proven_slicing(Streams(), {"ids": ids()}, 2, draws_by=draws_by, training=True)
    assert (found.stacks, found.returned_at) == ({"blocks"}, {"blocks": 1})
    assert found.shown.modules == {"blocks.0", "blocks.1"}
