"""Ring attention on threads, against attention to the whole sequence on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_parallel._cross_replica.context.attention.ring import (
    Scoring,
    pairs_read,
    ring_attention,
)
from vescale_parallel._cross_replica.context.slices import ContextThreads, SequenceSlices
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._verify.threads import run_in_threads

ROWS, FEATURES = 2, 8


class Sent(ContextThreads):
    """Counts what a rank sends, in elements."""

    def __init__(self, threads: ThreadExchange, rank: int) -> None:
        super().__init__(threads, rank)
        self.counts: list[int] = []

    def pass_on(self, x: Tensor, numel: int) -> Callable[[], Tensor]:
        self.counts.append(x.numel())
        return super().pass_on(x, numel)


def drawn(
    length: int, queries: int, keys: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return queries, keys, values and a gradient of the result."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(ROWS, heads, length, FEATURES, generator=generator, dtype=dtype)
        for heads in (queries, keys, keys, queries)
    ]


def reference(
    given: list[Tensor], scoring: Scoring, sinks: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """Return attention by its definition, and gradients."""
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    group = q.shape[1] // k.shape[1]
    scores = scoring.scale * q @ k.repeat_interleave(group, 1).mT
    if scoring.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    if scoring.mask is not None and scoring.mask.dtype is torch.bool:
        scores = scores.masked_fill(~scoring.mask, -torch.inf)
    elif scoring.mask is not None:
        scores = scores + scoring.mask
    if sinks is not None:
        sinks = sinks.clone().requires_grad_()
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num(0)  # rows that read nothing
    made = weights @ v.repeat_interleave(group, 1)
    wanted = [q, k, v, *([] if sinks is None else [sinks])]
    # Rows that read nothing have no gradient, not that of a softmax of nothing.
    grads = [x.nan_to_num(0) for x in torch.autograd.grad(made, wanted, given[3])]
    return [made.detach(), *grads[:3]], grads[3] if sinks is not None else None


def on_rank(
    rank: int, threads: ThreadExchange, given: list[Tensor], scoring: Scoring, sinks: Tensor | None
) -> tuple[list[Tensor], Tensor | None, list[int]]:
    ranks = Sent(threads, rank)
    slices = SequenceSlices.over(given[0].shape[-2], ranks.size, "ring")
    q, k, v, grad = (slices.part(x, -2, rank).contiguous() for x in given)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        sinks = sinks.clone().requires_grad_()
        inputs.append(sinks)
    made = ring_attention(q, k, v, scoring, slices=slices, ranks=ranks, sinks=sinks)
    grads = torch.autograd.grad(made, inputs, grad)
    return [made.detach(), *grads[:3]], grads[3] if sinks is not None else None, ranks.counts


def on_ranks(
    size: int, given: list[Tensor], scoring: Scoring, sinks: Tensor | None = None
) -> tuple[list[Tensor], Tensor | None, list[list[int]]]:
    """Return what all ranks have together: attention and gradients, and what each sent."""
    runs = run_in_threads(size, lambda rank, t: on_rank(rank, t, given, scoring, sinks))
    slices = SequenceSlices.over(given[0].shape[-2], size, "ring")
    whole = [
        slices.whole(torch.cat(parts, -2), -2) for parts in zip(*(r[0] for r in runs), strict=True)
    ]
    of_sinks = None if sinks is None else torch.stack([r[1] for r in runs]).sum(0)
    return whole, of_sinks, [r[2] for r in runs]


def masks(length: int, queries: int) -> dict[str, Scoring]:
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    document = torch.arange(length) // 4
    padded = torch.ones(ROWS, 1, 1, length, dtype=torch.bool)
    padded[1, ..., length // 2 :] = False
    bias = torch.randn(queries, length, length, generator=generator, dtype=torch.float64)
    lowest = torch.finfo(torch.float64).min
    window = (columns <= rows) & (columns > rows - 3)
    added = torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(~window, lowest)
    return {
        "bidirectional": Scoring(0.3),
        "causal": Scoring(0.3, is_causal=True),
        "window": Scoring(0.3, mask=window),
        "packed": Scoring(0.3, mask=(columns <= rows) & (document == document[:, None])),
        "padded": Scoring(0.3, mask=padded),
        "bias-per-head": Scoring(0.3, mask=bias),
        "added": Scoring(0.3, mask=added),
        "rows-that-read-nothing": Scoring(0.3, mask=(columns < rows)),
        "biased-causal": Scoring(0.3, is_causal=True, mask=bias),
    }


def check(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13 * scale)


@pytest.mark.parametrize("name", masks(8, 4))
@pytest.mark.parametrize(("size", "length"), [(2, 9), (3, 13), (4, 8), (4, 21)])
def test_a_ring_attends_as_one_device_does(name: str, size: int, length: int) -> None:
    given, scoring = drawn(length, 4, 2), masks(length, 4)[name]
    expected, _ = reference(given, scoring, None)
    for found, x in zip(on_ranks(size, given, scoring)[0], expected, strict=True):
        check(found, x)


@pytest.mark.parametrize("keys", [1, 2, 4])
def test_sinks_and_groups_of_queries_have_one_device_gradients(keys: int) -> None:
    given, scoring = drawn(11, 4, keys), Scoring(0.3, is_causal=True)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64)
    expected, of_sinks = reference(given, scoring, sinks)
    found, found_of_sinks, _ = on_ranks(4, given, scoring, sinks)
    for each, x in zip(found, expected, strict=True):
        check(each, x)
    assert found_of_sinks is not None
    assert of_sinks is not None
    check(found_of_sinks, of_sinks)


def test_bfloat16_is_summed_in_float32() -> None:
    given, scoring = drawn(16, 4, 2, torch.bfloat16), Scoring(0.3, is_causal=True)
    exact, _ = reference([x.double() for x in given], scoring, None)
    found, _, _ = on_ranks(4, given, scoring)
    assert found[0].dtype == torch.bfloat16
    # Rounded once, at the end: half of the last of 8 bits.
    torch.testing.assert_close(found[0].double(), exact[0], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("length", [16, 19])
def test_keys_and_values_go_round_and_their_gradients_come_home(length: int) -> None:
    size, keys = 4, 2
    given = drawn(length, 4, keys)
    *_, sent = on_ranks(size, given, Scoring(1.0))
    sizes = SequenceSlices.over(length, size, "ring").sizes
    of_slice = [2 * ROWS * keys * FEATURES * each for each in sizes]
    for rank, counts in enumerate(sent):
        passing = [of_slice[(rank - step) % size] for step in range(size)]
        # Forward, then backward: each step of gradients goes after what was to be computed.
        backward = [x for step in range(size - 1) for x in [passing[step]] * 2] + [passing[-1]]
        assert counts == [*passing[:-1], *backward]


def test_all_ranks_compute_alike_under_a_causal_mask() -> None:
    slices = SequenceSlices.over(32, 4, "ring")
    scores = [
        sum(
            q.length * k.length
            for source in slices.ranges
            for q, k in pairs_read(own, source, is_causal=True)
        )
        for own in slices.ranges
    ]
    assert scores == [scores[0]] * 4
    assert scores[0] * 4 < 0.6 * 32 * 32


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


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_tensor_of_a_rank_is_larger_than_scores_of_two_parts(size: int) -> None:
    length, heads = 256, 2
    given = drawn(length, heads, heads)

    def watched(rank: int, threads: ThreadExchange) -> int:
        with Largest() as largest:
            on_rank(rank, threads, given, Scoring(1.0, is_causal=True), None)
        return largest.numel

    part = length // (2 * size)
    of_scores, of_slice = heads * ROWS * part**2, 2 * heads * ROWS * 2 * part * FEATURES
    assert set(run_in_threads(size, watched)) == {max(of_scores, of_slice)}


def test_attention_to_nothing_but_a_ring_is_that_of_torch() -> None:
    given = drawn(12, 4, 4)
    q, k, v, _ = given
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    check(on_ranks(3, given, Scoring(FEATURES**-0.5, is_causal=True))[0][0], expected)
