"""Means written out as ratios of sums, of parts, put together, against one of the whole."""

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._loss.sum_ratios import SumRatios
from vescale_parallel._loss.token_mean import TokenCounts, TokenMeans

Loss = Callable[[Tensor, Tensor], Tensor]


def summed_in_place(x: Tensor, mask: Tensor) -> Tensor:
    total, count = torch.zeros((), dtype=x.dtype), 0
    for column in range(x.shape[1]):
        total = total + (x[:, column] * mask[:, column]).sum()
        count += mask[:, column].sum()
    total -= 0.5 * (x * mask).square().sum()
    return total / count


def divided_in_place(x: Tensor, mask: Tensor) -> Tensor:
    loss = (x * mask).sum()
    loss /= mask.sum()
    return loss


LOSSES: dict[str, Loss] = {
    "masked": lambda x, m: (x * m).sum() / m.sum(),
    "functions": lambda x, m: torch.div(torch.sum(x * m), torch.sum(m)),
    "negated": lambda x, m: -(x * m).sum().mul(2) / m.sum().double(),
    "at least one": lambda x, m: (x * m).sum() / m.sum().clamp(min=1),
    "an epsilon": lambda x, m: (x * m).sum() / (m.sum() + 1e-3),
    "a larger one": lambda x, m: (x * m).sum() / torch.maximum(m.sum(), torch.tensor(1.0)),
    "two sums": lambda x, m: (x * m).sum() / (m.sum() + (m > 0).sum()).sqrt(),
    "a product": lambda x, m: torch.dot(x.flatten(), m.flatten()) / m.count_nonzero(),
    "einsum": lambda x, m: torch.einsum("bt,bt->", x, m) / m.sum(),
    "of a loss": lambda x, m: F.mse_loss(x, m, reduction="sum") / m.sum(),
    "means": lambda x, m: (x * m).mean() / m.mean(),
    "weights": lambda x, m: (x * (m / m.sum())).sum(),
    "weights before": lambda x, m: (x * m / m.sum().clamp(min=1)).exp().sum(),
    "picked": lambda x, m: x[m > 0].mean(),
    "picked by a function": lambda x, m: torch.masked_select(x, m > 0).square().mean(),
    "loss of picked": lambda x, m: F.l1_loss(x[m > 0], m[m > 0]),
    "picked rows": lambda x, m: F.mse_loss(x[m[:, 0] > 0], m[m[:, 0] > 0], reduction="mean"),
    "sums in place": summed_in_place,
    "divided in place": divided_in_place,
    "weights in place": lambda x, m: (x * m.clone().div_(m.sum())).sum(),
}
# Two of the three parts have none that counts.
MASK = torch.tensor([[2.0, 0, 1], [1, 3, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 3, dtype=torch.float64).requires_grad_(), MASK.double()


def learned(loss: Loss, x: Tensor, mask: Tensor) -> Sequence[bool]:
    ratios = SumRatios()
    ratios.begin((x, mask))
    with TokenMeans(1, lambda index, count: count, ratios):
        loss(x, mask)
    return ratios.are_counted


@pytest.mark.parametrize("name", LOSSES)
def test_parts_average_to_the_ratio_over_all_rows(name: str) -> None:
    loss, (x, mask) = LOSSES[name], rows()
    expected = loss(x, mask)
    (gradient,) = torch.autograd.grad(expected, x)
    are_counted = learned(loss, x, mask)
    pairs = [*zip(x.chunk(3), mask.chunk(3), strict=True)]
    counters = [TokenCounts(SumRatios(are_counted)) for _ in pairs]
    for counter, (some, of_some) in zip(counters, pairs, strict=True):
        with torch.no_grad(), counter:
            loss(some, of_some)
    counts = zip(*(each.counts for each in counters), strict=True)
    totals = [torch.stack(each).sum() for each in counts]
    parts: list[Tensor] = []
    for some, of_some in pairs:
        with TokenMeans(
            3, lambda index, _: torch.as_tensor(totals[index]), SumRatios(are_counted)
        ):
            parts.append(loss(some, of_some))
    found = torch.stack(parts).mean()
    # A dozen float64 terms, added in another order.
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, x)[0], gradient, rtol=1e-13, atol=1e-16)


def picked_before_a_write(x: Tensor, mask: Tensor) -> Tensor:
    picked = x[mask]
    mask &= False
    return picked.mean()


OTHERS: dict[str, Loss] = {
    "squares": lambda x, m: (x * m).sum().square() / m.sum(),
    "the largest": lambda x, m: (x * m).sum() / m.max(),
    "a number": lambda x, m: (x * m).sum() / m.sum().item(),
    "what is differentiated": lambda x, m: (x * m).sum() / x.sum(),
    "a sum that was written to": lambda x, m: (x * m).sum() / m.sum().add_(1),
    "a mask that was written to": lambda x, m: picked_before_a_write(x, m > 0),
    "picked by numbers": lambda x, m: x[torch.tensor([0, 2])].mean(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_quotients_are_left_alone(name: str) -> None:
    loss, (x, mask) = OTHERS[name], rows()
    assert not learned(loss, x, mask)
    with TokenMeans(2, lambda index, count: count * 100, SumRatios()):
        found = loss(x, mask.clone())
    assert torch.equal(found, loss(x, mask.clone()))


def accuracy(x: Tensor, mask: Tensor) -> Tensor:
    of_batch = ((x > 0) * mask).sum() / mask.sum()
    of_results = ((x > 0) * mask).sum() / (x > 0).sum()
    assert not (of_batch.requires_grad)
    assert not (of_results.requires_grad)
    return (x * mask).sum() / mask.sum()


def test_metrics_are_counted_if_the_batch_tells_what_divides_them() -> None:
    assert learned(accuracy, *rows()) == [True, False, True]


def test_other_numbers_of_ratios_are_refused() -> None:
    x, mask = rows()
    means = TokenMeans(1, lambda index, count: count, SumRatios([True]))
    with pytest.raises(ValueError, match="than when it was looked at, 1 times"), means:
        torch.stack([LOSSES["masked"](x, mask), LOSSES["masked"](x, mask)])
    means = TokenMeans(1, lambda index, count: count, SumRatios([True]))
    with means:
        x.sum()
    with pytest.raises(ValueError, match="divided by sums 0 times outside of blocks, and 1 times"):
        means.check_complete()


def test_nothing_of_a_call_is_held_when_it_is_over() -> None:
    rows_of_batch, mask = rows()[0].detach(), rows()[1]
    means = TokenMeans(1, lambda index, count: count, SumRatios())
    with means:
        picked, shares = rows_of_batch[mask > 0], mask / mask.sum()
        loss = picked.mean() + (rows_of_batch * shares).sum()
    held = [weakref.ref(each) for each in (picked, shares)]
    del picked, shares
    assert [each() for each in held] == [None, None]
    assert loss.isfinite()
