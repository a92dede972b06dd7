"""Losses in regions of torch.utils.checkpoint, which run again when nothing counts any more."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vescale_parallel._loss.sum_ratios import SumRatios
from vescale_parallel._loss.token_mean import TokenMeans

Loss = Callable[[Tensor], Tensor]
TARGETS = torch.tensor([1, -100, 0, -100, 2, 1])
MASK = (TARGETS >= 0).double()


def of_targets(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.tanh(), TARGETS)


def of_ratio(logits: Tensor) -> Tensor:
    _metric = logits.detach().amax(-1).sum() / (logits.detach().amax(-1) > 0).sum()
    return (logits.tanh().square().sum(-1) * MASK).sum() / MASK.sum()


def of_both(logits: Tensor) -> Tensor:
    return of_ratio(logits) + of_targets(logits.sin()) + of_ratio(logits.cos())


LOSSES: list[Loss] = [of_targets, of_ratio, of_both]


def gradient(loss: Loss, repeat: Callable[[Loss, Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    logits = torch.randn(6, 3, dtype=torch.float64).requires_grad_()
    means = TokenMeans(2, lambda index, counted: counted * (3 + index), SumRatios([*KINDS[loss]]))
    with means:
        output = repeat(loss, logits * 2)
    output.backward()
    assert logits.grad is not None
    return logits.grad


# Of their ratios, which are counted: not the metric.
KINDS: dict[Loss, list[bool]] = {
    of_targets: [],
    of_ratio: [False, True],
    of_both: [False, True, False, True],
}


def as_written(loss: Loss, logits: Tensor) -> Tensor:
    return loss(logits)


def again(loss: Loss, logits: Tensor) -> Tensor:
    return checkpoint(loss, logits, use_reentrant=False)


def reentrant(loss: Loss, logits: Tensor) -> Tensor:
    return checkpoint(loss, logits, use_reentrant=True)


@pytest.mark.parametrize("repeat", [again, reentrant])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_runs_again_divides_as_before(loss: Loss, repeat: Callable[..., Tensor]) -> None:
    expected = gradient(loss, as_written)
    assert torch.equal(gradient(loss, repeat), expected)
    assert expected.count_nonzero()


def test_regions_within_regions_divide_as_before() -> None:
    def within(loss: Loss, logits: Tensor) -> Tensor:
        return again(lambda x: again(loss, x), logits)

    for loss in LOSSES:
        assert torch.equal(gradient(loss, within), gradient(loss, as_written))


def test_a_region_may_run_again_twice() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 3, dtype=torch.float64).requires_grad_()
    with TokenMeans(2, lambda index, counted: counted * 3, SumRatios([False, True])):
        output = again(of_both_once, logits)
    output.backward(retain_graph=True)
    first = logits.grad
    assert first is not None
    first, logits.grad = first.clone(), None
    output.backward()
    assert logits.grad is not None
    assert torch.equal(first, logits.grad)


def of_both_once(logits: Tensor) -> Tensor:
    return of_ratio(logits) + of_targets(logits.sin())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_region_is_freed_with_its_graph(loss: Loss) -> None:
    """Nothing that is put around it holds the graph, which holds the region."""
    logits = torch.randn(6, 3, dtype=torch.float64).requires_grad_()
    gc.collect()
    gc.disable()
    try:
        means = TokenMeans(2, lambda index, counted: counted * 3, SumRatios([*KINDS[loss]]))
        with means:
            hidden = logits * 2
            output = again(loss, hidden)
        held = weakref.ref(hidden)
        del means, hidden, output
        assert held() is None
    finally:
        gc.enable()
