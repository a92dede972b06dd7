"""Each of several ranks draws its part of what one device draws."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel._rng.known_draws import KnownDraws, Place, Scope, ShardedDraw
from vescale_parallel._rng.part_of_whole import DrawsOfRank
from vescale_parallel._rng.sharded_rng import ShardedRng
from vescale_parallel._rng.whole_masks import dropout_of_whole
from vescale_parallel._runtime.recomputation.recompute import recompute
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


def draws_of(where: Place, scopes: Mapping[str, Scope], **lengths: int) -> ShardedRng:
    return ShardedRng(
        where, lengths, lambda *_: KnownDraws(scopes=scopes, otherwise=lambda: scopes)
    )


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
    "cut",
    [ShardedDraw(rows=0), ShardedDraw(part=1), ShardedDraw(rows=0, part=1), ShardedDraw()],
    ids=repr,
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
    draws = ShardedRng(
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
    scope = Scope(cuts=[ShardedDraw()], parts={})
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
    draws = ShardedRng(place(2, 1, 0), {}, lambda *_: known)
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
    draws, cut = DrawsOfRank(place(2, 2, 3), 0, 0), ShardedDraw(rows=0, part=1)
    torch.manual_seed(3)
    mine = x.chunk(2)[1].chunk(2, 1)[1]
    found = dropout_of_whole(mine, 0.3, lambda mask: draws.part(mask, cut))
    assert torch.equal(found[0], whole.chunk(2)[1].chunk(2, 1)[1])
    assert torch.equal(found[1], mask.chunk(2)[1].chunk(2, 1)[1])
