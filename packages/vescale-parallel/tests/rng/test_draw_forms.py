"""What a model draws is found before its calls: where rows are, and what ranks have parts of."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from vescale_parallel._cross_replica.call_guard import RowGuard
from vescale_parallel._cross_replica.dims.row_counts import num_rows_of
from vescale_parallel._rng.call_forms import DrawForms
from vescale_parallel._rng.known_draws import Scope, ShardedDraw
from vescale_parallel._rng.predict import cuts_of_example, draw_marks, scopes_of_unknown
from vescale_parallel._rng.sharded_rng import ShardedRng
from vescale_parallel._tensor_parallel.sharding_spec import resolve
from vescale_parallel._tensor_parallel.tensor_sharding import shard

from .test_sharded_rng import place


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        x = x + self.dropout(self.attention(x))
        return x + self.down(F.dropout(self.up(x).relu(), 0.1, self.training))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_run_without_memory_shows_what_is_cut_even_if_layers_are_left_out_at_random() -> None:
    model, batch = Model().eval(), (torch.zeros(2, 6, 16),)
    plan = {f"blocks.*.attention.{name}.weight": "Shard(0)" for name in ("query", "key", "value")}
    plan |= {"blocks.*.attention.out.weight": "Shard(1)"}
    plan |= {"blocks.*.up.weight": "Shard(0)", "blocks.*.down.weight": "Shard(1)"}
    assert draw_marks(model, batch, plan, 2) == {
        "blocks.*.attention.<random:0>": "Shard(1)",
        "blocks.*.<random:1>": "Shard(2)",
    }
    sharding = shard(plan, model, 2)
    found = cuts_of_example(model, batch, sharding)
    assert found is not None
    for index in range(4):
        assert found[f"blocks.{index}", 0] == ShardedDraw()
        assert found[f"blocks.{index}", 1] == ShardedDraw(rows=0, part=2)
        assert found[f"blocks.{index}.attention", 0] == ShardedDraw(rows=0, part=1)
        assert found[f"blocks.{index}.dropout", 0] == ShardedDraw(rows=0)
    assert not model.training


def test_a_model_without_dropout_has_no_marks_and_no_watched_draws() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    sharding = shard({}, model, 2)
    assert cuts_of_example(model, (torch.zeros(2, 4),), sharding) == {}
    assert draw_marks(model, (torch.zeros(2, 4),), {}, 2) == {}


def test_a_plan_says_what_no_example_shows() -> None:
    model = Model()
    plan = {"blocks.*.up.weight": "Shard(0)", "blocks.*.down.weight": "Shard(1)"}
    unknown = scopes_of_unknown(resolve(plan, model), model)
    assert unknown["blocks.2.dropout"].is_region
    plan["blocks.*.<random:1>"] = "Shard(2)"
    known = scopes_of_unknown(resolve(plan, model), model)
    assert known["blocks.2"].parts == {1: Shard(2)}
    assert not known["blocks.2"].is_region


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("<random:first>", "Shard(1)"), ("<random:0>", "Replicate()"), ("<random>", "Shard(1)")],
)
def test_a_mark_of_a_draw_that_cannot_be_read_is_refused(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match="expected '<random:k>': 'Shard"):
        resolve({f"blocks.*.{pattern}": text}, Model())


class Folded(nn.Module):
    """Folds rows and time into one dim, either outermost, and drops out there."""

    def __init__(self, *, time_outer: bool) -> None:
        super().__init__()
        self.time_outer, self.up = time_outer, nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_outer else x
        x = F.dropout(self.up(x.reshape(-1, 6)), 0.3).unflatten(0, x.shape[:2])
        return x.transpose(0, 1) if self.time_outer else x


class FoldedAndNormalized(nn.Module):
    """Draws once more where the statistics of all rows are in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.norm(x.transpose(0, 1).reshape(-1, 6)))
        return x + torch.rand_like(x)


class TimeFirst(nn.Module):
    """Layers that take time first, in a model that takes rows first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.transpose(0, 1))
        return (y[0] if isinstance(y, tuple) else y).transpose(0, 1)


class Weights(nn.Module):
    """Drops out attention's weights, of heads within rows of one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, 0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Branches(nn.Module):
    """Decides by a value, so that it cannot be run without memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        y = F.dropout(y, 0.3) if x.sum() < 1e9 else y
        return y.transpose(0, 1)


class First(nn.Module):
    """Returns the first thing that a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "folded_rows_outer": lambda: Folded(time_outer=False),
    "folded_time_outer": lambda: Folded(time_outer=True),
    "encoder_layer": lambda: TimeFirst(nn.TransformerEncoderLayer(6, 3, 8, 0.3)),
    "lstm": lambda: TimeFirst(nn.LSTM(6, 5, 3, dropout=0.3)),
    "lstm_rows_first": lambda: First(nn.LSTM(6, 5, 3, dropout=0.3, batch_first=True)),
    "weights": Weights,
    "decides_by_values": Branches,
}


def forms_of(model: nn.Module, example: Any = None) -> DrawForms:
    alone = shard({}, model, 1)
    guard = RowGuard(model, lambda value: [value])
    return DrawForms(model, guard, example, alone, lambda value: [value])


@pytest.mark.parametrize(("rows", "length"), [(4, 5), (6, 3), (6, 6), (2, 2)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_found_wherever_they_are(name: str, rows: int, length: int) -> None:
    torch.manual_seed(0)
    model, x = LAYOUTS[name]().double(), torch.randn(rows, length, 6, dtype=torch.float64)
    torch.manual_seed(3)
    whole, state = model(x), torch.get_rng_state()
    forms = forms_of(model)
    for rank in range(2):
        copied = copy.deepcopy(model)
        draws = ShardedRng(place(2, 1, rank), {}, forms.known)
        draws.install(copied)
        mine = x.chunk(2)[rank]
        torch.manual_seed(3)
        with draws.of_call(copied, (mine,), {}, num_rows_of((mine,), {})):
            found = copied(mine)
        torch.testing.assert_close(found, whole.chunk(2)[rank], rtol=1e-12, atol=1e-12)
        assert torch.equal(torch.get_rng_state(), state)


def test_rows_are_found_after_statistics_of_the_batch() -> None:
    model, x = FoldedAndNormalized(), torch.randn(4, 5, 6)
    known = forms_of(model).known(model, (x,), {}, 4)
    assert known.scopes == {"": Scope(cuts=[ShardedDraw(rows=0, inner=True)], parts={})}


def test_a_call_that_cannot_be_run_to_see_goes_by_an_example() -> None:
    class Stubborn(nn.Module):
        def forward(self, x: Tensor, check: object = None) -> Tensor:
            if isinstance(check, list) and len(check) < 9:
                raise ValueError("too few")
            return F.dropout(x.T, 0.3).T

    x, model = torch.randn(4, 4), Stubborn()
    check = [torch.zeros(1)] * 9
    assert forms_of(model).known(model, (x, check[:8]), {}, 4).scopes is None
    known = forms_of(model, (torch.zeros(2, 3),)).known(model, (x, check[:8]), {}, 4)
    assert known.otherwise() == {"": Scope(cuts=[ShardedDraw(rows=1)], parts={})}


class Cache:
    """What a program gives to a call, and finds something in afterwards."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []


class Caching(nn.Module):
    """Needs values to run, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.rows.append(self.linear(x))
        kept = self.dropout(torch.cat(cache.rows)[-len(x) :])
        return kept * int(x.abs().sum().item() > 0)


def test_what_is_given_is_left_as_it_was() -> None:
    model, cache = Caching().double(), Cache()
    x = torch.randn(4, 6, dtype=torch.float64)
    draws = ShardedRng(place(2, 1, 0), {}, forms_of(model).known)
    draws.install(model)
    for seen in range(2):
        with draws.of_call(model, (x,), {"cache": cache}, num_rows_of((x,), {})):
            assert len(cache.rows) == seen
            model(x, cache=cache)


def test_rows_between_two_other_things_are_not_guessed() -> None:
    def folded(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, 3)).permute(1, 0, 2, 3)  # (time, rows, 2, 3)
        return F.dropout(x.reshape(-1, 3), 0.3).view_as(x)

    class Between(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.unflatten(1, (5, 1)).permute(1, 0, 2, 3)
            return folded(x.squeeze(2).transpose(0, 1))

    model, x = Between(), torch.randn(4, 5, 6)
    assert forms_of(model).known(model, (x,), {}, 4).scopes == {
        "": Scope(cuts=[None], parts={}, is_region=True)
    }


def test_a_model_that_draws_nothing_is_not_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    assert forms_of(model).known(model, (torch.zeros(2, 4),), {}, 2).scopes == {}


class Negatives(nn.Module):
    """Picks items of a table for every row, or a few for all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.items, self.kind = nn.Embedding(9, 6), kind

    def forward(self, x: Tensor) -> Tensor:
        many = 3 if self.kind == "for all rows" else len(x)
        if self.kind == "permuted":
            return x[torch.randperm(many)]
        picked = self.items(torch.multinomial(torch.ones(9), many, replacement=True))
        return x + picked.mean(0) if self.kind == "for all rows" else x + picked


@pytest.mark.parametrize("kind", ["for each row", "for all rows", "permuted"])
def test_picks_from_a_table_without_rows_are_of_rows_if_there_are_as_many(kind: str) -> None:
    model, x = Negatives(kind), torch.randn(4, 6)
    known = forms_of(model).known(model, (x,), {}, 4)
    assert known.scopes is not None
    (cut,) = known.scopes[""].cuts
    assert cut is not None
    assert cut.rows == (None if kind == "for all rows" else 0)
    draws = ShardedRng(place(2, 1, 1), {}, lambda *_: known)
    draws.install(model)
    said = pytest.warns(UserWarning, match="draws random numbers that this rank cannot")
    quiet = contextlib.nullcontext()
    with draws.of_call(model, (x,), {}, 4), quiet if kind == "for all rows" else said:
        model(x)


def test_a_length_of_one_does_not_tell_how_rows_lie_beside_another() -> None:
    model = Folded(time_outer=True)
    forms = forms_of(model)
    draws = ShardedRng(place(2, 1, 0), {}, forms.known)
    draws.install(model)
    with draws.of_call(model, (torch.randn(4, 1, 6),), {}, 4):
        model(torch.randn(4, 1, 6))
    x = torch.randn(4, 5, 6)
    with pytest.warns(UserWarning, match="own"), draws.of_call(model, (x,), {}, 4):
        model(x)


def test_the_rows_that_were_found_are_those_that_are_drawn_for() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 5, 2, dropout=0.3)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(self.rnn(x)[0].mean(-1).T, targets)  # (time, rows, ..), (rows, time)

    model = Given()
    given = (torch.randn(5, 4, 6), torch.randn(4, 5))
    guard = RowGuard(model, lambda value: [value])
    coupling, _ = guard.coupling(model, given, {})
    assert not coupling.regions
    assert coupling.num_rows(given, {}) == 4
    alone = shard({}, model, 1)
    forms = DrawForms(model, guard, None, alone, lambda value: [value])
    found = forms.known(model, given, {}, 4).scopes
    assert found == {"rnn": Scope(cuts=[ShardedDraw(rows=1, alone=True)], parts={})}
