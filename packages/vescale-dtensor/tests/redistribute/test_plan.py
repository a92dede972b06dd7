"""Plans of redistributions: what they cost, and against what else could be done."""

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import RaggedShard, local_boxes
from vescale_dtensor._redistribute.plan import _plan, plan_redistribution, redistribution_numel
from vescale_dtensor._redistribute.steps import Step, Transfer, _before, send_recv_of

Placements = tuple[Placement, ...]
Coordinate = tuple[int, ...]


class Sequences:
    """All sequences of single collectives, each over one mesh axis, on one small tensor."""

    def __init__(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.mesh_shape = mesh_shape
        self.coordinates = list(product(*map(range, mesh_shape)))
        self.numel = cache(self._numel)
        self.shared = cache(self._shared)

    def cheapest(self, source: Placements, *, length: int) -> dict[Placements, int]:
        """Elements that the busiest rank receives in the best sequence to every layout."""
        best: dict[Placements, int] = {}

        def visit(at: Placements, costs: tuple[int, ...], seen: frozenset[Placements]) -> None:
            best[at] = min(best.get(at, max(costs)), max(costs))
            if len(seen) > length:
                return
            for after, received in self._next(at):
                if after not in seen:
                    total = tuple(map(sum, zip(costs, received, strict=True)))
                    visit(after, total, seen | {after})

        visit(source, (0,) * len(self.coordinates), frozenset({source}))
        return best

    def _next(self, at: Placements) -> Iterator[tuple[Placements, list[int]]]:
        for axis, num_ranks in enumerate(self.mesh_shape):
            for after in (Replicate(), *(Shard(dim) for dim in range(len(self.shape)))):
                target = (*at[:axis], after, *at[axis + 1 :])
                if at[axis] == after or not self._is_innermost(at, target, axis):
                    continue
                if not isinstance(at[axis], Partial):
                    yield target, [self._lacking(at, target, c) for c in self.coordinates]
                elif isinstance(after, Shard):
                    yield (
                        target,
                        [(num_ranks - 1) * self.numel(target, c) for c in self.coordinates],
                    )
                else:
                    yield target, [self._all_reduced(at, axis, c) for c in self.coordinates]

    def _is_innermost(self, before: Placements, after: Placements, axis: int) -> bool:
        dims = {p.dim for p in (before[axis], after[axis]) if isinstance(p, Shard)}
        return not any(isinstance(p, Shard) and p.dim in dims for p in (*before[axis + 1 :],))

    def _all_reduced(self, at: Placements, axis: int, coordinate: Coordinate) -> int:
        num_ranks, numel = self.mesh_shape[axis], self.numel(at, coordinate)
        chunk = -(-numel // num_ranks)
        own = max(0, min(numel, chunk * (coordinate[axis] + 1)) - chunk * coordinate[axis])
        return min((num_ranks - 1) * own + numel - own, (num_ranks - 1) * numel)

    def _lacking(self, source: Placements, target: Placements, coordinate: Coordinate) -> int:
        return self.numel(target, coordinate) - self.shared(source, target, coordinate)

    def _numel(self, placements: Placements, coordinate: Coordinate) -> int:
        return self._shared(placements, placements, coordinate)

    def _shared(self, source: Placements, target: Placements, coordinate: Coordinate) -> int:
        total = 0
        for mine in local_boxes(self.shape, self.mesh_shape, coordinate, source):
            for held in local_boxes(self.shape, self.mesh_shape, coordinate, target):
                box = mine.box.intersect(held.box)
                total += box.numel if box else 0
        return total


def check_against_sequences(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], *, slack: float
) -> None:
    choices: list[Placement] = [Replicate(), Partial()]
    choices += [Shard(dim) for dim in range(len(shape))]
    is_even = all(size % math.prod(mesh_shape) == 0 for size in shape)
    sequences = Sequences(shape, mesh_shape)
    for source in product(*[choices] * len(mesh_shape)):
        for target, numel in sequences.cheapest(source, length=3).items():
            # Sums over one axis after the other are not in rank order. Where nothing divides
            # evenly the order can cost some elements.
            rank_order = 0.25 if source.count(Partial()) > 1 else slack
            # Without a price on latency, which has a plan prefer fewer collectives.
            planned = _plan(shape, mesh_shape, source, target, 0).numel
            assert planned <= numel * (1 if is_even else 1 + rank_order), (source, target)


@pytest.mark.parametrize(
    ("mesh_shape", "shape"),
    [
        ((2,), (8, 4)),
        ((4,), (8, 8)),
        ((4,), (7, 5)),
        ((4,), (5,)),
        ((2, 2), (8, 8)),
        ((2, 2), (7, 5)),
        ((2, 2), (4, 1)),
        ((2, 2), (3, 3)),
        ((2, 4), (16, 8)),
    ],
    ids=str,
)
def test_no_sequence_of_collectives_moves_fewer_elements(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    check_against_sequences(mesh_shape, shape, slack=0)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (2, 3), (3, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(24, 24), (9, 7), (4, 6, 5), (24, 12, 24), (13,)], ids=str)
def test_no_sequence_moves_fewer_elements_at_length(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    # Where shards are uneven, exchanging pending values first is sometimes a little cheaper.
    check_against_sequences(mesh_shape, shape, slack=0.125)


P, R, S0, S1 = Partial(), Replicate(), Shard(0), Shard(1)


@pytest.mark.parametrize(
    ("mesh_shape", "source", "target", "steps"),
    [
        ((4,), (S0,), (R,), ["all-gather over x, 1572864 elements"]),
        ((4,), (S0,), (S1,), ["all-to-all over x, 393216 elements"]),
        ((4,), (R,), (S1,), ["cut locally"]),
        ((4,), (P,), (S1,), ["reduce-scatter (sum) over x, 1572864 elements"]),
        (
            (4,),
            (Partial("max"),),
            (R,),
            [
                "reduce-scatter (max) over x, 1572864 elements",
                "all-gather over x, 1572864 elements",
            ],
        ),
        ((2,), (P,), (R,), ["all-gather and sum over x, 2097152 elements"]),
        ((4,), (R,), (P,), ["keep the value on the first rank along x"]),
        ((4,), (S0,), (P,), ["embed in zeros, locally"]),
        ((4,), (R,), (Partial("max"),), []),
        ((2, 2), (S0, S0), (R, R), ["all-gather over x and y, 1572864 elements"]),
        ((2, 2), (S0, S1), (S1, S1), ["all-to-all over x and y, 262144 elements"]),
        ((2, 2), (S0, S1), (S0, R), ["all-gather over y, 524288 elements"]),
        ((2, 2), (P, S0), (S1, S0), ["reduce-scatter (sum) over x, 524288 elements"]),
        ((2, 2), (P, P), (S0, S1), ["reduce-scatter (sum) over x and y, 1572864 elements"]),
        (
            (2, 2),
            (P, Partial("max")),
            (S0, S1),
            [
                "reduce-scatter (max) over y, 1048576 elements",
                "reduce-scatter (sum) over x, 524288 elements",
            ],
        ),
        ((2, 2), (P, S0), (P, R), ["all-gather over y, 1048576 elements"]),
        ((1, 2), (P, S0), (R, S0), []),
    ],
    ids=str,
)
def test_a_plan_has_these_steps(
    mesh_shape: tuple[int, ...], source: Placements, target: Placements, steps: list[str]
) -> None:
    planned = plan_redistribution((2048, 1024), mesh_shape, source, target)
    assert [step.describe(["x", "y"]) for step in planned] == steps


def test_a_small_sum_is_one_collective() -> None:
    (step,) = plan_redistribution((), (8,), (P,), (R,))
    assert step.describe(["dp"]) == "all-gather and sum over dp, 7 elements"
    assert redistribution_numel((), (8,), (P,), (R,)) == 7


def test_layouts_that_differ_by_name_only_send_nothing() -> None:
    rows = RaggedShard((0,), 1, (2, 2))
    assert [s.describe() for s in plan_redistribution((4, 3), (2,), (rows,), (S0,))] == [
        "cut locally"
    ]
    assert redistribution_numel((4, 3), (2,), (rows,), (S0,)) == 0


def test_a_rank_sends_what_others_receive() -> None:
    shape, mesh_shape = (7, 5, 3), (2, 3)
    choices = [R, P, S0, S1, RaggedShard((0, 1), 4, (0, 9, 1))]
    for source, target in product(product([R, P, S0, Shard(2)], choices), repeat=2):
        for step in plan_redistribution(shape, mesh_shape, source, target):
            everyone = list(product(range(2), range(3)))
            sent = sum(_numel_sent(step, c) for c in everyone)
            assert sent == sum(step.numel_received(c) for c in everyone)


def _numel_sent(step: Step, coordinate: tuple[int, ...]) -> int:
    if not isinstance(step, Transfer):
        return 0
    send_recv = send_recv_of(step, coordinate)
    if step.kind == "all_gather":
        return (step.num_ranks - 1) * math.prod(send_recv.source_shapes[send_recv.own])
    others = [pieces for i, pieces in enumerate(send_recv.sends) if i != send_recv.own]
    return sum(piece.numel for pieces in others for piece in pieces)


def test_the_cost_is_what_the_busiest_rank_receives() -> None:
    shape, mesh_shape = (7, 5, 3), (2, 3)
    choices = [R, P, S0, S1, RaggedShard((0, 1), 4, (0, 9, 1))]
    for source, target in product(product([R, P, S0, Shard(2)], choices), repeat=2):
        steps = plan_redistribution(shape, mesh_shape, source, target)
        received = [
            sum(step.numel_received(c) for step in steps) for c in product(range(2), range(3))
        ]
        assert max(received) == redistribution_numel(shape, mesh_shape, source, target)


def test_a_rank_of_a_large_mesh_looks_at_its_group_alone() -> None:
    shape, mesh_shape = (4096, 1024), (128, 8)
    (step,) = plan_redistribution(shape, mesh_shape, (R, S0), (R, S1))
    looked_at = _before.cache_info().currsize
    assert step.numel_received((5, 3)) == 7 * 512 * 128
    assert _before.cache_info().currsize - looked_at == 8


def test_the_cost_on_many_ranks_sees_the_one_that_gets_everything() -> None:
    units = (*(0,) * 777, 1, *(0,) * 1270)
    target = (RaggedShard((0,), 4096, units),)
    numel = redistribution_numel((4096, 8), (2048,), (S0,), target)
    assert numel == 4096 * 8 - 2 * 8


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ((Partial("band"),), (R,), "expected a Partial whose reduction is one of"),
        ((S0,), (Shard(3),), "names tensor dim 3"),
        ((S0, R), (S0,), "one placement"),
    ],
)
def test_a_redistribution_without_meaning_is_refused(
    source: Placements, target: Placements, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_redistribution((4, 4), (2,), source, target)
