"""Which groups of parameters are gathered ahead, and what is alive meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel import DataParallel, ParallelPlan, parallelize, with_constraints
from vescale_parallel._data_parallel.planned import resharding_by_block
from vescale_parallel._data_parallel.prefetch import Prefetch

from .test_zero_orders import PROGRAMS, ROWS, WIDTH, Grads, Program, net
from .zero_model import ROWS as PLAIN_ROWS, OwnCounter, net as plain_net, rows_of

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]


class Group:
    """Says what it is asked for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said
        self.is_under_way = self.is_gathered = False

    def start_gather(self) -> None:
        assert not self.is_under_way
        assert not self.is_gathered
        self.is_under_way = True
        self._said.append(f"start {self.name}")

    def gather(self) -> None:
        self._said.append(f"{'wait' if self.is_under_way else 'gather'} {self.name}")
        self.is_under_way, self.is_gathered = False, True

    def drop_gather(self) -> None:
        assert self.is_under_way
        self.is_under_way = False
        self._said.append(f"drop {self.name}")

    def free(self) -> None:
        self.is_gathered = False


def _passes(depth: int, passes: Sequence[str]) -> tuple[list[list[str]], int]:
    """Return what is asked for in passes over groups of one letter, and how many are alive."""
    said: list[str] = []
    groups = {name: Group(name, said) for name in "abcdef"}
    gathers = Prefetch(depth)
    found: list[list[str]] = []
    most = 0
    for names in passes:
        gathers.begin("forward")
        for name in names:
            gathers.need(groups[name])
            alive = [g for g in groups.values() if g.is_under_way or g.is_gathered]
            most = max(most, len(alive))
            gathers.let_go(groups[name])
        gathers.end()
        found.append([*said])
        said.clear()
    return found, most


def test_the_next_group_is_started_when_the_one_before_is_there() -> None:
    (first, second), most = _passes(1, ["abc", "abc"])
    assert first == ["gather a", "gather b", "gather c"]
    assert second == ["start a", "wait a", "start b", "wait b", "start c", "wait c"]
    assert most == 2


def test_depth_says_how_many_are_started() -> None:
    (_, second), most = _passes(2, ["abcd", "abcd"])
    assert second == [
        "start a", "start b", "wait a", "start c", "wait b", "start d", "wait c", "wait d",
    ]  # fmt: skip
    assert most == 3
    (_, second), most = _passes(0, ["abc", "abc"])
    assert second == ["gather a", "gather b", "gather c"]
    assert most == 1


def test_a_group_that_was_expected_is_kept_until_it_is_needed_or_the_pass_ends() -> None:
    assert _passes(1, ["abcd", "acbd"])[0][1] == [
        "start a", "wait a", "start b", "gather c", "wait b", "start d", "wait d",
    ]  # fmt: skip
    skipped = _passes(1, ["abcd", "acd", "acd"])[0]
    assert skipped[1] == ["start a", "wait a", "start b", "gather c", "gather d", "drop b"]
    assert skipped[2] == ["start a", "wait a", "start c", "wait c", "start d", "wait d"]


def test_a_group_that_is_needed_twice_in_a_row_is_not_started_while_it_is_gathered() -> None:
    assert _passes(1, ["aab", "aab"])[0][1] == [
        "start a",
        "wait a",
        "start b",
        "gather a",
        "wait b",
    ]


def test_what_forward_ended_with_is_gathered_again_if_it_was_let_go_since() -> None:
    said: list[str] = []
    block, gathers = Group("a", said), Prefetch(0)
    gathers.begin("forward")
    gathers.need(block)
    gathers.leave(block, keeps=False)
    # The backward pass before this forward, of another micro-batch, is through with it now.
    gathers.let_go(block)
    gathers.need(block)
    assert block.is_gathered
    assert said == ["gather a", "gather a"]


def test_never_more_are_alive_than_depth_and_one() -> None:
    draw = random.Random(0)
    for _ in range(300):
        depth = draw.randrange(4)
        passes = ["".join(draw.choices("abcdef", k=draw.randrange(8))) for _ in range(4)]
        found, most = _passes(depth, passes)
        assert most <= depth + 1
        for said, names in zip(found, passes, strict=True):  # each was there when it was needed
            needed = [each.split()[1] for each in said if each.split()[0] in ("wait", "gather")]
            assert "".join(needed) == names
            starts = [each.split()[1] for each in said if each.startswith("start")]
            ends = [each.split()[1] for each in said if each.split()[0] in ("wait", "drop")]
            assert sorted(starts) == sorted(ends)


class Recomputing(nn.Module):
    """Blocks that run again in backward, hooks of theirs included."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return x.pow(2).mean()


def _constraints(depth: int, stage: int = 3, size: int = 2) -> dict[str, Any]:
    return {
        "data_parallel.size": size,
        "data_parallel.zero_stage": stage,
        "data_parallel.prefetch": depth,
    }


def _grads(
    in_threads: InThreads, program: Program, models: Sequence[nn.Module], depth: int
) -> list[list[Grads]]:
    """Return the gradients of every rank after a program, again and again."""
    plan = with_constraints(ParallelPlan(), _constraints(depth))

    def run(rank: int) -> list[Grads]:
        model, found = parallelize(plan, models[rank]), list[Grads]()
        for _ in range(3):
            model.zero_grad()
            program(model, lambda rows: rows.chunk(2)[rank])
            found.append(
                {n: None if p.grad is None else p.grad.full_tensor() for n, p in _named(model)}
            )
        return found

    return in_threads(2, run)


def _named(model: Any) -> list[tuple[str, Any]]:
    return list(model.named_parameters())


def _assert_same(got: list[list[Grads]], expected: list[list[Grads]]) -> None:
    for steps, others in zip(got, expected, strict=True):
        for one, other in zip(steps, others, strict=True):
            for name, grad in one.items():
                same = other[name]
                assert (grad is None) == (same is None), name
                assert grad is None or (same is not None and torch.equal(grad, same)), name


@pytest.mark.by_day("an_early_output_alone", "a_block_called_without_gradients")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_the_bits_of_gradients_are_those_without_prefetch(
    in_threads: InThreads, program: Program
) -> None:
    without = _grads(in_threads, program, [net() for _ in range(2)], 0)
    for depth in (1, 3):
        got = _grads(in_threads, program, [net() for _ in range(2)], depth)
        _assert_same(got, without)


def _orders_that_change(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    for order in ((0, 1), (1, 0), (0,), (1, 1, 0), (0, 1)):
        model.order = order
        model(rows(ROWS))["loss"].backward()


def _parameters_that_forward_changes(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
    weight = model.blocks[1].weight

    def change(_module: nn.Module, _args: Any, _output: Any) -> None:
        with torch.no_grad():
            weight.mul_(1.5)

    with model.first.register_forward_hook(change):
        model(rows(ROWS))["loss"].backward()


@pytest.mark.by_day("_parameters_that_forward_changes")
@pytest.mark.parametrize("program", [_orders_that_change, _parameters_that_forward_changes])
def test_passes_that_deviate_have_the_bits_that_they_have_without_prefetch(
    in_threads: InThreads, program: Program
) -> None:
    without = _grads(in_threads, program, [net() for _ in range(2)], 0)
    for depth in (1, 2):
        _assert_same(_grads(in_threads, program, [net() for _ in range(2)], depth), without)


class Deep(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).mean()


def _deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def _num_alive(model: Any) -> int:
    """Return of how many blocks there is memory of gathered parameters."""
    groups = model._vescale_engine.parameters._param_groups
    return sum(
        any(shards.whole.untyped_storage().size() > 0 for shards in group._flat)
        for group in groups
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_is_under_way_and_alive_as_each_block_runs(in_threads: InThreads, depth: int) -> None:
    models = [_deep() for _ in range(2)]
    plan = with_constraints(ParallelPlan(), _constraints(depth))

    def steps(rank: int) -> tuple[list[int], list[int], int]:
        model: Any = parallelize(plan, models[rank])
        rows = torch.full((2, WIDTH), float(rank + 1), requires_grad=True)
        for _ in range(2):
            model(rows).backward()
        counter, alive, started = OwnCounter(), list[int](), list[int]()

        def look(*_: Any) -> None:
            alive.append(_num_alive(model))
            started.append(counter.kinds()["all_gather"])

        for block in model.blocks:
            block.register_forward_hook(look, prepend=True)
            block.register_full_backward_hook(look)
        with counter:
            loss = model(rows)
            forward, before = started[:], counter.kinds()["all_gather"]
            loss.backward()
            backward = [each - before for each in started[len(forward) :]]
        return forward, backward, max(alive)

    ahead = [min(1 + index + depth, 5) for index in range(5)]
    for forward, backward, most in in_threads(2, steps):
        assert forward == [1 + each for each in ahead]  # and what is outside of blocks
        # What forward ended with is there still.
        assert backward == [each - 1 for each in ahead]
        assert most == depth + 1


@pytest.mark.by_day("False")
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_recomputed_with_their_hooks(
    in_threads: InThreads, reentrant: bool
) -> None:
    def models() -> list[nn.Module]:
        torch.manual_seed(0)
        made = Recomputing(reentrant=reentrant)
        other = Recomputing(reentrant=reentrant)
        other.load_state_dict(made.state_dict())
        return [made, other]

    def program(model: Any, rows: Callable[[Tensor], Tensor]) -> None:
        model(rows(ROWS).clone().requires_grad_()).backward()

    without = _grads(in_threads, program, models(), 0)
    for depth in (1, 2):
        _assert_same(_grads(in_threads, program, models(), depth), without)


def _trained(keeps: str, passes: Sequence[str]) -> tuple[list[str], int]:
    """Return what passes of training ask for, and how many groups are alive at most.

    Small letters are groups in forward, large ones in backward.
    """
    said, most = list[str](), 0
    groups = {name: Group(name, said) for name in "abcd"}
    gathers = Prefetch(1)
    for names in passes:
        gathers.begin("forward" if names.islower() else "backward")
        for name in names:
            group = groups[name.lower()]
            gathers.need(group)
            most = max(most, sum(g.is_under_way or g.is_gathered for g in groups.values()))
            if name.islower():
                gathers.leave(group, keeps=group.name in keeps)
            else:
                gathers.let_go(group)
        gathers.end()
        if not names.islower():
            gathers.let_go_of_kept()
        elif passes[-1] is names:
            said.append("end of forward")
    return said, most


def test_backward_begins_with_what_forward_ended_with() -> None:
    said, most = _trained("", ["abc", "CBA", "abc", "CBA"])
    again = ["wait a", "start b", "wait b", "start c", "wait c", "start b", "wait b", "start a"]
    assert said[-len(again) - 1 :] == [*again, "wait a"]
    assert most == 2


def test_what_forward_ended_with_is_let_go_of_where_backward_begins_elsewhere() -> None:
    said, most = _trained("", ["abc", "BCA"])
    assert most == 1
    assert said == [*(f"gather {name}" for name in "abcbca")]


def test_groups_that_the_plan_keeps_are_gathered_once() -> None:
    said, most = _trained("abc", ["abc", "CBA", "abc", "CBA"])
    assert most == 3
    assert [
        sum(each.endswith(name) and "start" not in each for each in said) for name in "abc"
    ] == [
        2,
        2,
        2,
    ]


@pytest.mark.parametrize("resharded", [False, {"blocks.*": False}, {"blocks.1": False}])
def test_gradients_are_those_of_blocks_that_stay_gathered(
    in_threads: InThreads, resharded: bool | dict[str, bool]
) -> None:
    constraints = {"data_parallel.reshard_after_forward": resharded}
    expected, models = plain_net(), [plain_net() for _ in range(2)]
    expected(PLAIN_ROWS).backward()
    wanted = {name: p.grad for name, p in expected.named_parameters()}

    def steps(rank: int) -> Grads:
        plan = with_constraints(
            ParallelPlan(),
            {"data_parallel.size": 2, "data_parallel.zero_stage": 3, **constraints},
        )
        model: Any = parallelize(plan, models[rank])
        for _ in range(3):
            model.zero_grad()
            model(rows_of(rank)).backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    for found in in_threads(2, steps):
        for name, grad in wanted.items():
            assert grad is not None
            # The mean of two ranks' rows, in float64, beside that of all rows.
            assert torch.allclose(found[name], grad, rtol=0, atol=1e-12), name


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"layers.*": False}, "'layers.\\*' is no block of the model; blocks are 'blocks.0'"),
        ({"blocks.*": False, "blocks.1": True}, "both False and True of 'blocks.1'"),
    ],
)
def test_patterns_that_cannot_be_obeyed_are_refused(said: dict[str, bool], text: str) -> None:
    data = DataParallel(size=2, zero_stage=3, reshard_after_forward=said)
    with pytest.raises(ValueError, match=text):
        resharding_by_block(data, ["blocks.0", "blocks.1"])


def test_blocks_of_no_pattern_are_freed() -> None:
    data = DataParallel(size=2, zero_stage=3, reshard_after_forward={"blocks.1": False})
    assert resharding_by_block(data, ["blocks.0", "blocks.1"]) == {
        "blocks.0": True,
        "blocks.1": False,
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"reshard_after_forward": 2, "zero_stage": 3}, "True, False, or patterns of blocks"),
        ({"reshard_after_forward": {"a": 1}, "zero_stage": 3}, "True or False of each pattern"),
        ({"reshard_after_forward": False, "zero_stage": 2}, "zero_stage 3, got 2"),
    ],
)
def test_what_is_no_resharding_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DataParallel(size=2, **values)


def test_a_plan_with_patterns_is_stored_as_it_is() -> None:
    said = {"data_parallel.zero_stage": 3, "data_parallel.reshard_after_forward": {"b.*": False}}
    plan = with_constraints(ParallelPlan(), said)
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert plan.dotted() == said
    assert hash(plan) == hash(ParallelPlan.from_json(plan.to_json()))
