"""Which dim of a call's tensors is the batch, where some tensors have one row for all."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass  # noqa: PLC2701 (no public name)
from torch.utils.data import DataLoader, TensorDataset

import vescale
from vescale_parallel import parallelize
from vescale_testing import World

from .plans import DP, PARTS, PP, Constraints, make_plan
from .programs import Plain, Run, both, right, rows as batches_of_rows
from .test_bad_input import check
from .training import whole


class Positioned(nn.Module):
    """A causal language model that is told the positions of its tokens, (1, S) for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        x_BSD = self.tokens(ids) + self.positions(position_ids)
        q, k, v = self.mix(x_BSD).chunk(3, -1)
        y_BSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(y_BSD)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def trained(model: Any, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a batch, and gradients."""
    loss = model(ids=ids, position_ids=torch.arange(ids.shape[1])[None])
    loss.backward()
    return loss.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def of_one_device_and_rank(rows: int, length: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, ids = Positioned().double(), torch.randint(16, (2 * rows, length))
    expected = trained(model, ids)
    model.zero_grad()
    model = vescale.parallelize(make_plan({DP: 2}), model)
    return expected, trained(model, ids.chunk(2)[dist.get_rank()])


# Batches shorter than, as long as, and longer than the sequence.
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "length"), [(2, 6), (4, 4), (6, 3)])
def test_positions_that_all_rows_share_are_no_rows(world2: World, rows: int, length: int) -> None:
    for expected, found in world2.run(of_one_device_and_rank, rows, length):
        assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=0)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-14)


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Opened:
    x: Tensor
    y: Tensor


register_dataclass(Opened)


@dataclass
class Own:
    x: Tensor
    y: Tensor


class Closed:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Summed(Plain):
    """Its loss is a sum over rows, which data-parallel ranks have to add up."""

    def forward(self, batch: Any) -> Tensor:
        return F.mse_loss(self.logits({"x": batch.x}), batch.y, reduction="sum")


def summed(run: Run, kind: Callable[..., Any]) -> None:
    model, _ = run.start(Summed())
    for batch in batches_of_rows(2):
        loss = model(kind(**run.part(batch)))
        loss.backward()
        run.keep(loss)
    for parameter in model.parameters():
        run.keep(parameter.grad)


def named(run: Run) -> None:
    summed(run, Named)


class Attributes(UserDict[str, Tensor]):
    """Its values are attributes, too, as those of a tokenizer's batch are."""

    def __getattr__(self, name: str) -> Tensor:
        return vars(self)["data"][name]


def by_attribute(run: Run) -> None:
    summed(run, Attributes)


def opened(run: Run) -> None:
    summed(run, Opened)


def of_a_class(run: Run) -> None:
    summed(run, Closed)


def of_a_dataclass(run: Run) -> None:
    summed(run, Own)


@pytest.mark.by_day("opened", "of_a_dataclass")
@pytest.mark.slow
@pytest.mark.parametrize("program", [named, opened, by_attribute, of_a_dataclass])
def test_rows_are_found_in_what_torch_opens(world2: World, program: Callable[[Run], None]) -> None:
    right(world2, program, {DP: 2})


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{DP: 2}, {PP: 2, PARTS: 2}])
def test_a_batch_that_torch_does_not_open_is_refused(world2: World, plan: Constraints) -> None:
    message = r"got a Closed, in which torch does not look"
    check(world2, TypeError, message, both, of_a_class, plan)


class Tagger(nn.Module):
    """Returns a loss of words of sentences, (sentences x words), or of those of one, (words)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lstm = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        return self.head(states).logsumexp(-1).mean()


class Users(nn.Module):
    """Rows depend on each other whatever their order: a norm, and a contrast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(20, 6), nn.BatchNorm1d(6)
        self.double()

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        found = self.norm(self.embedding(users))
        return F.cross_entropy(found @ self.embedding(items).T, torch.arange(len(users)))


def tagged(one_dim: bool) -> Tensor:
    model: Any = parallelize(make_plan({DP: 2}), Tagger())
    words = torch.arange(10).view(2, 5)[vescale.data_parallel_rank(model)]
    model(words if one_dim else words[None]).backward()
    return whole(model.embedding.weight.grad)


def test_positions_of_one_sequence_are_no_rows() -> None:
    """Ranks' sentences would be one, of all their words; with a dim of rows they are not."""
    with pytest.raises(ValueError, match="rows of a batch or the positions of one sequence"):
        vescale.emulate(tagged, 2, args=(True,))
    alone = Tagger()
    alone(torch.arange(10).view(2, 5)).backward()
    for found in vescale.emulate(tagged, 2, args=(False,)):
        torch.testing.assert_close(found, alone.embedding.weight.grad)


class Rolled(Users):
    """The next row's item is what a user did not take: their order matters."""

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        liked = self.embedding(items)
        apart = self.embedding(users) * (liked - liked.roll(1, 0))
        return -F.logsigmoid(apart.sum(-1)).mean()


def rolled(plan: Constraints | None) -> Tensor:
    model: Any = Rolled()
    loader: Any = DataLoader(TensorDataset(torch.arange(8), torch.arange(8, 16)), batch_size=8)
    if plan is not None:
        model, loader = parallelize(make_plan(plan), model, dataset=loader)
    for users, items in loader:
        model(users, items).backward()
    return whole(model.embedding.weight.grad)


def test_rows_of_a_loader_are_rows_in_any_order() -> None:
    for found in vescale.emulate(rolled, 2, args=({DP: 2},)):
        torch.testing.assert_close(found, rolled(None))


def contrasted() -> Tensor:
    model: Any = parallelize(make_plan({DP: 2}), Users())
    part = slice(*(4 * vescale.data_parallel_rank(model) + end for end in (0, 4)))
    model(torch.arange(8)[part], torch.arange(8, 16)[part]).backward()
    return whole(model.embedding.weight.grad)


def test_one_number_a_row_is_rows_where_their_order_does_not_matter() -> None:
    alone = Users()
    alone(torch.arange(8), torch.arange(8, 16)).backward()
    for found in vescale.emulate(contrasted, 2):
        torch.testing.assert_close(found, alone.embedding.weight.grad)
