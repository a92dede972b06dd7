"""Token means of parts, put together, against one mean over everything."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._cross_replica.context.sliced.tensor import SumOverSlices
from vescale_parallel._loss.token_mean import _RETURNED, TokenCounts, TokenMeans
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import Returned

Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])
LOSSES: dict[str, Loss] = {
    "plain": F.cross_entropy,
    "ignore_index": lambda x, y: F.cross_entropy(x, y.clamp(min=0), ignore_index=0),
    "weight": lambda x, y: F.cross_entropy(x, y, WEIGHT.to(x.dtype)),
    "smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "both": lambda x, y: F.cross_entropy(x, y, WEIGHT.to(x.dtype), label_smoothing=0.1),
    "module": lambda x, y: nn.CrossEntropyLoss()(x, y),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(-1), y),
    "two": lambda x, y: F.cross_entropy(x, y) + 0.5 * F.cross_entropy(x[:3], y[:3]),
}


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits, targets = torch.randn(12, 5, dtype=torch.float64), torch.randint(0, 5, (12,))
    targets[[0, 1, 2, 5, 7]] = -100
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "two"])
def test_parts_average_to_the_mean_over_all_tokens(name: str) -> None:
    logits, targets = data()
    expected = LOSSES[name](logits, targets)
    (gradient,) = torch.autograd.grad(expected, logits)
    with TokenCounts() as counter:
        LOSSES[name](logits, targets)
    (total,) = counter.counts
    parts: list[Tensor] = []
    for x, y in zip(logits.chunk(3), targets.chunk(3), strict=True):
        with TokenMeans(3, lambda index, count: total):
            parts.append(LOSSES[name](x, y))
    loss = torch.stack(parts).mean()
    # A dozen float64 terms, added in another order.
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, gradient, rtol=1e-13, atol=1e-16)


def test_several_means_are_counted_each() -> None:
    logits, targets = data()
    with TokenCounts() as counter:
        LOSSES["two"](logits, targets)
    assert [float(count) for count in counter.counts] == [7.0, 0.0]


def test_counting_computes_nothing() -> None:
    logits, targets = data()
    with TokenCounts():
        assert F.cross_entropy(logits, targets).item() == 0.0


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_other_reductions_are_left_alone(reduction: str) -> None:
    logits, targets = data()
    with TokenMeans(2, lambda index, count: count):
        found = F.cross_entropy(logits, targets, reduction=reduction)
    assert torch.equal(found, F.cross_entropy(logits, targets, reduction=reduction))


def test_probabilities_as_targets_are_left_alone() -> None:
    logits, _ = data()
    targets = torch.randn(12, 5, dtype=torch.float64).softmax(-1)
    with TokenMeans(2, lambda index, count: count * 100):
        found = F.cross_entropy(logits, targets)
    assert torch.equal(found, F.cross_entropy(logits, targets))


SUMS: dict[str, Loss] = {
    "sum": lambda x, y: x.pow(2).sum(),
    "masked mean": lambda x, y: (x.pow(2).sum(-1) * (y >= 0)).sum() / (y >= 0).sum(),
    "summed loss": lambda x, y: F.cross_entropy(x, y, reduction="sum") / 7,
    "mean plus sum": lambda x, y: F.cross_entropy(x, y) + 0.1 * x.sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_in_the_loss_gets_a_warning(name: str) -> None:
    with TokenMeans(2, lambda index, count: count) as means:
        loss = SUMS[name](*data())
    with pytest.warns(UserWarning, match="the loss contains a sum over the batch"):
        means.warn_of_sums(loss)


MEANS: dict[str, Loss] = {
    **LOSSES,
    "mse": lambda x, y: F.mse_loss(x, x.detach() + 1),
    "mean": lambda x, y: x.pow(2).mean() + 0.5 * F.cross_entropy(x, y),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_get_no_warning(name: str) -> None:
    with TokenMeans(2, lambda index, count: count) as means:
        loss = MEANS[name](*data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        means.warn_of_sums(loss)


def test_distributed_scalars_are_known_by_their_name() -> None:
    assert (Returned.__name__, SumOverSlices.__name__) == _RETURNED


@pytest.mark.parametrize(
    "said",
    [{"size_average": False}, {"size_average": True}, {"reduce": False}, {"reduce": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*size_average and reduce args will be deprecated")
def test_a_reduction_said_in_the_way_of_long_ago(said: dict[str, Any]) -> None:
    logits, target = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 5
    expected = F.cross_entropy(logits, target, **said)
    with TokenMeans(1, lambda _, count: count):
        assert torch.equal(F.cross_entropy(logits, target, **said), expected)
