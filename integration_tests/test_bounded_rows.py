"""Rows that lie behind each other, with bounds beside them, train as on one device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import vescale
from vescale_parallel import parallelize

from .bounded_rows import MODELS, Row, batch_of, build, rows_of
from .plans import DP, PARTS, PP, ZERO, Constraints, make_plan
from .training import whole

ACCUMULATION = "batch.gradient_accumulation"
PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "accumulated": {ACCUMULATION: 2},
    "dp, accumulated": {DP: 2, ACCUMULATION: 2},
    "pp": {PP: 2, PARTS: 4},
    "dp, pp": {DP: 2, PP: 2, PARTS: 2},
}
COUPLED = ("normalized", "contrasted", "scored")
WITHOUT_BLOCKS = ("recommender", "stacked")
ROWS = 8
# How many elements rows of three steps have, at least and at most: one each at first, as of
# tables of one word each, of which nothing but their values tells that they begin with 0; none.
ONE_EACH = ((1, 1), (1, 5), (1, 2))
ALIKE = ((3, 3), (3, 3), (2, 5))
NONE = ((0, 4), (0, 1), (1, 5))
USUAL = ((1, 5), (2, 4), (1, 5))
NUMBERS = {"usual": USUAL, "one each": ONE_EACH, "alike": ALIKE, "none": NONE}
TAKES_NONE = ("words", "both ends", "weighted", "recommender", "stacked")

TRAINED = [
    (name, plan, numbers)
    for name in MODELS
    for plan in PLANS
    for numbers in NUMBERS
    if name not in COUPLED
    and not (name in WITHOUT_BLOCKS and PP in PLANS[plan])
    and (numbers != "none" or name in TAKES_NONE)
    # Of one owner each, or as many sums as rows, nothing tells that there may be others.
    and (numbers != "one each" or name in TAKES_NONE)
    # A pipeline draws from streams of its own where micro-batches have other shapes.
    and not (name == "dropped" and PP in PLANS[plan])
]

Found = tuple[list[float], dict[str, Tensor]]


def trained(model: Any, batches: Sequence[Sequence[Row]], name: str) -> Found:
    """Return the losses of three steps and the parameters then."""
    optimizer, losses = SGD(model.parameters(), lr=0.1), list[float]()
    torch.manual_seed(0)
    for rows in batches:
        optimizer.zero_grad()
        loss = model(*batch_of(name, rows))
        loss.backward()
        optimizer.step()
        losses.append(float(whole(loss)))
    return losses, {fqn: whole(p).detach().clone() for fqn, p in model.named_parameters()}


def batches_of(numbers: str, part: int = 0, num_parts: int = 1) -> list[list[Row]]:
    """Return the rows of every step that one of several ranks has."""
    steps = enumerate(NUMBERS[numbers])
    every = [rows_of(step, ROWS, least=low, most=high) for step, (low, high) in steps]
    size = ROWS // num_parts
    return [rows[part * size : (part + 1) * size] for rows in every]


def ranked(name: str, plan: str, numbers: str) -> Found:
    model: Any = parallelize(make_plan(PLANS[plan]), build(name))
    num_parts = PLANS[plan].get(DP, 1)
    part = vescale.data_parallel_rank(model)
    return trained(model, batches_of(numbers, part, num_parts), name)


def size_of(plan: str) -> int:
    return PLANS[plan].get(DP, 1) * PLANS[plan].get(PP, 1)


def same(ranks: Sequence[Found], expected: Found) -> None:
    # Sums over micro-batches and ranks are in another order: a few roundings of float64.
    for losses, _ in ranks:
        torch.testing.assert_close(losses, expected[0], rtol=1e-13, atol=0)
    held = {fqn: value for _, parameters in ranks for fqn, value in parameters.items()}
    torch.testing.assert_close(held, expected[1], rtol=1e-12, atol=1e-14)


@pytest.mark.by_day(
    *("words-dp-*", "weighted-accumulated-usual", "segments-dp, accumulated-usual"),
    *("recommender-dp-one each", "stacked-dp, accumulated-alike", "texts-pp-usual"),
    *("texts-zero3-alike", "points-dp, pp-usual", "owned-accumulated-usual"),
    *("both ends-pp-none", "dropped-dp, accumulated-usual", "speech-accumulated-usual"),
)
@pytest.mark.parametrize(
    ("name", "plan", "numbers"), TRAINED, ids=["-".join(each) for each in TRAINED]
)
def test_rows_with_bounds_train_as_on_one_device(name: str, plan: str, numbers: str) -> None:
    ranks = vescale.emulate(ranked, size_of(plan), args=(name, plan, numbers))
    same(ranks, trained(build(name), batches_of(numbers), name))


@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_rows_that_depend_on_each_other_behind_bags_are_those_of_all_ranks(plan: str) -> None:
    """Ranks have other numbers of words, which the norm does not see."""
    ranks = vescale.emulate(ranked, 2, args=("normalized", plan, "usual"))
    same(ranks, trained(build("normalized"), batches_of("usual"), "normalized"))


@pytest.mark.parametrize("numbers", ["usual", "alike"])
@pytest.mark.parametrize("name", ["contrasted", "scored"])
def test_code_over_all_rows_is_not_given_bounds_of_other_ranks(name: str, numbers: str) -> None:
    """Those of all ranks, one behind the other, would begin with 0 again in the middle."""
    with pytest.raises(ValueError, match="given packed rows, or where they begin or end"):
        vescale.emulate(ranked, 2, args=(name, "dp", numbers))


def test_a_mean_over_elements_is_none_over_rows() -> None:
    with pytest.raises(ValueError, match="not a mean over rows where some have more elements"):
        vescale.emulate(ranked, 1, args=("scored", "accumulated", "usual"))


def test_labels_in_order_are_no_bounds() -> None:
    """They begin with 0 and rise, as offsets do."""
    given = enumerate(rows_of(0, ROWS))
    rows = [dataclasses.replace(row, label=index // 2) for index, row in given]
    found = vescale.emulate(_accumulated, 1, args=(rows,))
    same(found, trained(build("words"), [rows], "words"))


def _accumulated(rows: list[Row]) -> Found:
    return trained(parallelize(make_plan(PLANS["accumulated"]), build("words")), [rows], "words")


class Ragged(nn.Module):
    """Attention over rows of a nested tensor, and sums over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        heads = (each(x).unflatten(-1, [2, 8]).transpose(1, 2) for each in self.projections)
        x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
        return F.cross_entropy(self.head(torch.nested.to_padded_tensor(x, 0.0).sum(1)), labels)


def nested(plan: str, batch: tuple[list[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    model: Any = Ragged().double()
    part, num_parts = 0, 1
    if plan:
        model = parallelize(make_plan(PLANS[plan]), model)
        part, num_parts = vescale.data_parallel_rank(model), PLANS[plan].get(DP, 1)
    size = ROWS // num_parts
    own = slice(part * size, (part + 1) * size)
    rows = torch.nested.nested_tensor(batch[0][own], layout=torch.jagged)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(rows, batch[1][own]).backward()
    optimizer.step()
    return whole(model.embedding.weight).detach().clone()


@pytest.mark.filterwarnings("ignore:it could not be checked whether rows")
@pytest.mark.filterwarnings("ignore:the targets of the batch could not be counted")
@pytest.mark.parametrize("plan", ["dp", "zero3", "accumulated", "dp, accumulated"])
def test_nested_tensors_are_cut_in_rows(plan: str) -> None:
    torch.manual_seed(1)
    rows = [torch.randint(0, 50, (length,)) for length in (3, 1, 4, 1, 5, 2, 6, 2)]
    batch = rows, torch.arange(ROWS) % 4
    for found in vescale.emulate(nested, size_of(plan), args=(plan, batch)):
        torch.testing.assert_close(found, nested("", batch), rtol=1e-13, atol=1e-15)


def shuffled(plan: str) -> dict[str, Tensor]:
    """Return the parameters after two epochs of a loader whose collate_fn makes bags."""
    model: Any = build("words")
    loader: Any = DataLoader(
        rows_of(0, 40),  # pyright: ignore[reportArgumentType]: a list is a data set
        batch_size=ROWS,
        shuffle=True,
        collate_fn=functools.partial(batch_of, "words"),
        generator=torch.Generator().manual_seed(0),
    )
    optimizer = SGD(model.parameters(), lr=0.1)
    if plan:
        model, optimizer, loader = vescale.parallelize(
            make_plan(PLANS[plan]),
            model,
            lambda model: SGD(model.parameters(), lr=0.1),
            dataset=loader,
        )
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
    return {fqn: whole(p).detach().clone() for fqn, p in model.named_parameters()}


@pytest.mark.parametrize("plan", ["dp", "accumulated", "dp, pp"])
def test_loaders_make_bags_of_the_rows_of_each_rank(plan: str) -> None:
    ranks = vescale.emulate(shuffled, size_of(plan), args=(plan,))
    held = {fqn: value for rank in ranks for fqn, value in rank.items()}
    torch.testing.assert_close(held, shuffled(""), rtol=1e-12, atol=1e-14)
