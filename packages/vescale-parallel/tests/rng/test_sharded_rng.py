"""Each of several ranks draws its part of what one device draws."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel._cross_replica.call_guard import RowGuard
from vescale_parallel._cross_replica.row_counts import num_rows_of
from vescale_parallel._rng.call_forms import DrawForms
from vescale_parallel._rng.known_draws import WHOLE, KnownDraws, Place, Scope, ShardedDraw
from vescale_parallel._rng.predict import (
    cuts_of_example,
    draw_marks,
    scopes_of_unknown,
)
from vescale_parallel._rng.sharded_rng import Draws
from vescale_parallel._runtime.recompute import recompute
from vescale_parallel._tensor_parallel.sharding_spec import resolve
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._trace.memory_order import NotedOrder


class Runs(nn.Module):
    """A module whose forward is a function of its one argument."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def place(num_parts: int, tp_size: int, index: int) -> Place:
    return Place(
        num_parts_of_batch=num_parts,
        part_of_batch=index // tp_size,
        tp_size=tp_size,
        tp_rank=index % tp_size,
    )


def draws_of(where: Place, scopes: Mapping[str, Scope], **lengths: int) -> Draws:
    return Draws(where, lengths, lambda *_: KnownDraws(scopes=scopes, otherwise=lambda: scopes))


def drawn_on(
    where: Place, function: Callable[[Tensor], Any], x: Tensor, scope: Scope, **lengths: int
) -> tuple[Any, Tensor]:
    """Return what one rank gets, and the state of its generator afterwards."""
    module = Runs(function)
    draws = draws_of(where, {"": scope}, **lengths)
    draws.install(module)
    torch.manual_seed(3)
    with draws.of_call(module, (x,), {}, len(x)):
        result = module(x)
    return result, torch.get_rng_state()


def check(function: Callable[[Tensor], Tensor], x: Tensor, cut: ShardedDraw) -> None:
    """Compare the parts of 2 x 2 ranks with one device's whole."""
    torch.manual_seed(3)
    whole, state = function(x), torch.get_rng_state()
    for index in range(4):
        mine, expected = x, whole
        if cut.rows is not None:
            mine, expected = (t.chunk(2, cut.rows)[index // 2] for t in (mine, expected))
        if cut.part is not None:
            mine, expected = (t.chunk(2, cut.part)[index % 2] for t in (mine, expected))
        found, after = drawn_on(place(2, 2, index), function, mine, Scope(cuts=[cut], parts={}))
        assert torch.equal(found, expected)
        assert torch.equal(after, state)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_dropout": lambda x: F.dropout2d(x, 0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "rand_like": torch.rand_like,
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "in_place": lambda x: x.clone().uniform_(-1, 1),
}


@pytest.mark.parametrize(
    "cut", [ShardedDraw(rows=0), ShardedDraw(part=1), ShardedDraw(rows=0, part=1), WHOLE], ids=repr
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parts_are_those_of_what_one_device_draws(name: str, cut: ShardedDraw) -> None:
    check(FUNCTIONS[name], torch.randn(4, 6, 5, 7), cut)


def test_a_large_tensor_is_drawn_in_parts() -> None:
    check(lambda x: F.dropout(x, 0.3), torch.randn(8, 6, 40, 40), ShardedDraw(rows=0, part=1))


def test_transposed_tensors_are_drawn_in_the_order_of_the_whole_memory() -> None:
    heads_first = torch.randn(4, 5, 6, 7).transpose(1, 2)
    torch.manual_seed(3)
    whole = F.dropout(heads_first, 0.3)
    for index in range(4):
        mine = heads_first.chunk(2, 0)[index // 2].chunk(2, 1)[index % 2]
        mine = mine.transpose(1, 2).contiguous().transpose(1, 2)
        scope = Scope(cuts=[ShardedDraw(rows=0, part=1)], parts={})
        found, _ = drawn_on(place(2, 2, index), lambda x: F.dropout(x, 0.3), mine, scope)
        assert torch.equal(found, whole.chunk(2, 0)[index // 2].chunk(2, 1)[index % 2])


@pytest.mark.parametrize("noted", [NotedOrder((1, 0, 2), (1, 0, 2)), None], ids=repr)
def test_a_row_alone_is_drawn_where_it_was_seen_to_lie_or_apart(noted: NotedOrder | None) -> None:
    time_first = torch.randn(5, 2, 7).transpose(0, 1)
    torch.manual_seed(3)
    whole = F.dropout(time_first, 0.3)
    scope = Scope(cuts=[ShardedDraw(rows=0, order=noted)], parts={})
    for rank in range(2):
        mine = time_first[rank : rank + 1].contiguous()
        told = (
            contextlib.nullcontext()
            if noted
            else pytest.warns(UserWarning, match="stream of its own")
        )
        with told:
            found, _ = drawn_on(place(2, 1, rank), lambda x: F.dropout(x, 0.3), mine, scope)
        assert torch.equal(found, whole[rank : rank + 1]) is (noted is not None)


def test_what_ranks_sent_each_other_is_drawn_in_the_order_of_one_device() -> None:
    time_first = torch.randn(5, 2, 7).transpose(0, 1)
    torch.manual_seed(3)
    expected = F.dropout(time_first, 0.3)
    scope = Scope(cuts=[ShardedDraw(order=NotedOrder((1, 0, 2), (0, 1, 2)))], parts={})
    mine = time_first.contiguous()
    found, _ = drawn_on(place(1, 2, 1), lambda x: F.dropout(x, 0.3), mine, scope)
    assert torch.equal(found, expected)


def test_an_order_that_does_not_hold_here_is_not_gone_by() -> None:
    x = torch.randn(4, 6, 5)
    torch.manual_seed(3)
    whole = F.dropout(x, 0.3)
    order = NotedOrder((2, 1, 0), (2, 1, 0))
    scope = Scope(cuts=[ShardedDraw(rows=0, order=order)], parts={})
    found, _ = drawn_on(place(2, 1, 1), lambda x: F.dropout(x, 0.3), x[2:], scope)
    assert torch.equal(found, whole[2:])


def test_heads_within_rows_of_one_dim_are_drawn_as_they_lie() -> None:
    x = torch.randn(4, 6, 5)  # batch, heads, features; drawn as (batch * heads, features)
    torch.manual_seed(3)
    whole = F.dropout(x.flatten(0, 1), 0.3).view_as(x)
    for index in range(4):
        mine = x.chunk(2, 0)[index // 2].chunk(2, 1)[index % 2]
        scope = Scope(cuts=[ShardedDraw(rows=0, part=0)], parts={})
        found, _ = drawn_on(
            place(2, 2, index), lambda x: F.dropout(x.flatten(0, 1), 0.3), mine, scope
        )
        assert torch.equal(
            found.view_as(mine), whole.chunk(2, 0)[index // 2].chunk(2, 1)[index % 2]
        )


def test_a_sequence_that_does_not_divide_is_drawn_as_it_is_cut() -> None:
    x = torch.randn(2, 7, 5)
    torch.manual_seed(3)
    whole = F.dropout(x, 0.3)
    for rank in range(2):
        scope = Scope(cuts=[ShardedDraw(part=1)], parts={})
        found, _ = drawn_on(
            place(1, 2, rank), lambda x: F.dropout(x, 0.3), x.chunk(2, 1)[rank], scope, **{"": 7}
        )
        assert torch.equal(found, whole.chunk(2, 1)[rank])


def test_attention_draws_the_weights_of_its_own_heads() -> None:
    q = torch.randn(4, 6, 5, 8, dtype=torch.float64)
    check(
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.4),
        q,
        ShardedDraw(rows=0, part=1),
    )


def test_gradients_are_those_of_one_device() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    torch.manual_seed(3)
    F.dropout(x, 0.3).square().sum().backward()
    assert x.grad is not None
    for rank in range(2):
        mine = x.detach().chunk(2)[rank].requires_grad_()
        scope = Scope(cuts=[ShardedDraw(rows=0)], parts={})
        found, _ = drawn_on(place(2, 1, rank), lambda x: F.dropout(x, 0.3), mine, scope)
        found.square().sum().backward()
        assert mine.grad is not None
        assert torch.equal(mine.grad, x.grad.chunk(2)[rank])


def test_a_module_that_runs_again_in_backward_draws_the_same_again() -> None:
    linear = nn.Linear(6, 6)
    inner = nn.Sequential(linear, nn.Dropout(0.4), nn.Tanh())
    x = torch.randn(2, 6)
    draws = draws_of(place(2, 1, 1), {"1": Scope(cuts=[ShardedDraw(rows=0)], parts={})})
    draws.install(inner)
    grads: list[Tensor] = []
    for run in (inner, lambda x: checkpoint(inner, x, use_reentrant=False)):
        torch.manual_seed(3)
        inner.zero_grad()
        with draws.of_call(inner, (x,), {}, 2):
            result = run(x)
        torch.rand(5)  # moves on what a second draw would continue from
        result.square().sum().backward()
        assert linear.weight.grad is not None
        grads.append(linear.weight.grad)
    assert torch.equal(grads[0], grads[1])


def test_a_block_that_runs_again_draws_as_in_its_own_call() -> None:
    block, linear = nn.Sequential(nn.Dropout(0.4)), nn.Linear(6, 6)
    scopes = iter(
        [{"0": Scope(cuts=[ShardedDraw(rows=0)], parts={})}, {"0": Scope(cuts=[None], parts={})}]
    )
    draws = Draws(
        place(2, 1, 1),
        {},
        lambda *_: KnownDraws(scopes=next(scopes), otherwise=dict),
    )
    draws.install(block)
    recompute(block, draws.as_now)
    x = torch.randn(2, 6)
    torch.manual_seed(3)
    with draws.of_call(block, (x,), {}, 2):
        result = block(linear(x))
    with warnings.catch_warnings(), draws.of_call(block, (x,), {}, 3):
        warnings.simplefilter("ignore")
        block(linear(x))
    result.sum().backward()
    torch.manual_seed(3)
    mask = F.dropout(torch.ones(4, 6), 0.4)[2:]
    assert linear.bias.grad is not None
    torch.testing.assert_close(linear.bias.grad, mask.sum(0))


def test_a_module_within_another_draws_by_its_own_scope() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.inner(F.dropout(x, 0.5)), 0.5)

    outer, x = Outer(), torch.ones(4, 64)
    torch.manual_seed(3)
    whole = outer(x)
    for rank in range(2):
        outer = Outer()
        rows = ShardedDraw(rows=0)
        scopes = {"": Scope(cuts=[rows, rows], parts={}), "inner": Scope(cuts=[rows], parts={})}
        draws = draws_of(place(2, 1, rank), scopes)
        draws.install(outer)
        torch.manual_seed(3)
        with draws.of_call(outer, (x,), {}, 2):
            assert torch.equal(outer(x.chunk(2)[rank]), whole.chunk(2)[rank])


def test_a_draw_of_unknown_cut_is_named_and_its_ranks_draw_apart() -> None:
    states: list[Tensor] = []
    results: list[Tensor] = []
    for rank in range(2):
        scope = Scope(cuts=[None], parts={})
        with pytest.warns(UserWarning, match=r"bernoulli_.* at '<random:0>' draws"):
            result, state = drawn_on(
                place(2, 1, rank), lambda x: F.dropout(x, 0.5), torch.ones(2, 64), scope
            )
        results.append(result)
        states.append(state)
    assert not torch.equal(results[0], results[1])
    assert torch.equal(states[0], states[1])


def test_an_operator_that_does_not_draw_by_elements_is_named() -> None:
    scope = Scope(cuts=[ShardedDraw(rows=0)], parts={})
    with pytest.warns(UserWarning, match="multinomial"):
        drawn_on(place(2, 1, 0), lambda x: torch.multinomial(x, 2), torch.ones(2, 8), scope)


def test_what_has_no_part_on_any_rank_is_drawn_by_any_operator() -> None:
    torch.manual_seed(3)
    expected = torch.randperm(8)
    scope = Scope(cuts=[WHOLE], parts={})
    found, _ = drawn_on(place(2, 2, 3), lambda _: torch.randperm(8), torch.ones(2), scope)
    assert torch.equal(found, expected)


def test_without_a_forecast_the_rows_of_the_batch_are_recognised() -> None:
    x = torch.ones(4, 3, 64)
    torch.manual_seed(3)
    whole = F.dropout(x, 0.5)
    for rank in range(2):
        with pytest.warns(UserWarning, match="taken to be the first"):
            found, _ = drawn_on(
                place(2, 1, rank), lambda x: F.dropout(x, 0.5), x.chunk(2)[rank], Scope(parts={})
            )
        assert torch.equal(found, whole.chunk(2)[rank])


def test_without_a_forecast_a_region_has_a_stream_of_its_own() -> None:
    scope = Scope(parts={}, is_region=True)
    with pytest.warns(UserWarning, match="stream of its own"):
        drawn_on(place(1, 2, 0), lambda x: F.dropout(x, 0.5), torch.ones(2, 64), scope)


def test_draws_that_begin_later_are_noticed() -> None:
    module = nn.Dropout(0.0)
    known = KnownDraws(scopes=None, otherwise=lambda: {"": Scope(parts={})})
    draws = Draws(place(2, 1, 0), {}, lambda *_: known)
    draws.install(module)
    x = torch.ones(2, 64)
    with draws.of_call(module, (x,), {}, 2):
        module(x)
    module.p = 0.5
    noticed = pytest.warns(UserWarning, match="drew random numbers")
    with noticed, draws.of_call(module, (x,), {}, 2):
        module(x)
    torch.manual_seed(3)
    whole = F.dropout(torch.ones(4, 64), 0.5)
    torch.manual_seed(3)
    guessed = pytest.warns(UserWarning, match="taken to be the first")
    with guessed, draws.of_call(module, (x,), {}, 2):
        assert torch.equal(module(x), whole[:2])


def test_the_whole_mask_of_a_kernel_gives_what_the_kernel_gives() -> None:
    x = torch.randn(4, 6)
    torch.manual_seed(3)
    whole, mask = torch.native_dropout(x, 0.3, True)
    draws = Draws(place(2, 2, 3), {})
    torch.manual_seed(3)
    mine = x.chunk(2)[1].chunk(2, 1)[1]
    found = draws._dropout_of_whole((mine, 0.3, True), ShardedDraw(rows=0, part=1), "")
    assert torch.equal(found[0], whole.chunk(2)[1].chunk(2, 1)[1])
    assert torch.equal(found[1], mask.chunk(2)[1].chunk(2, 1)[1])


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
        assert found[f"blocks.{index}", 0] == WHOLE
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
    assert known["blocks.2"].parts == {1: 2}
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
        draws = Draws(place(2, 1, rank), {}, forms.known)
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


def test_a_length_of_one_does_not_tell_how_rows_lie_beside_another() -> None:
    model = Folded(time_outer=True)
    forms = forms_of(model)
    draws = Draws(place(2, 1, 0), {}, forms.known)
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
    meetings, _ = guard.meetings(model, given, {})
    assert not meetings.regions
    assert meetings.num_rows(given, {}) == 4
    alone = shard({}, model, 1)
    forms = DrawForms(model, guard, None, alone, lambda value: [value])
    found = forms.known(model, given, {}, 4).scopes
    assert found == {"rnn": Scope(cuts=[ShardedDraw(rows=1, alone=True)], parts={})}
