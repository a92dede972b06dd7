"""Redistribution against plain tensors that are cut and reduced by hand."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard, RaggedShard, emulate, local_boxes, local_shape
from vescale_dtensor._comm.emulation import RankTensor, coordinates_of_ranks, per_rank
from vescale_dtensor._comm.events import Communication, listening
from vescale_dtensor._redistribute.execute import redistribute_local
from vescale_dtensor._redistribute.plan import plan_redistribution
from vescale_dtensor._torch_private import StridedShard
from vescale_testing import World

Placements = tuple[Placement, ...]

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
PARTIALS = [Partial(op) for op in COMBINE]


def placements_for(shape: tuple[int, ...], num_ranks: int) -> list[Placement]:
    """Every kind of placement that fits a mesh axis, uneven ones among them."""
    found: list[Placement] = [Replicate(), *PARTIALS]
    found += [Shard(dim) for dim in range(len(shape))]
    found += [StridedShard(dim, split_factor=2) for dim in range(len(shape))]
    found += [InterleavedShard(dim, 2) for dim, n in enumerate(shape) if n % 2 == 0]
    found += [InterleavedShard(dim, (n - 2, 2)) for dim, n in enumerate(shape) if n > 2]
    first = tuple(3 * (rank == num_ranks - 1) + (rank == 0) for rank in range(num_ranks))
    found.append(RaggedShard((0,), max(1, -(-math.prod(shape[:1]) // 4)), first))
    if len(shape) > 1:
        numel = math.prod(shape[:2])
        units = tuple((rank * 2 + 1) % 4 for rank in range(num_ranks))
        found.append(RaggedShard((0, 1), max(1, -(-numel // sum(units))), units))
    return found


def value(
    seed: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype, *, exact: bool
) -> Tensor:
    """Values of differing magnitude, so that the order of a sum shows, or it does not matter."""
    generator = torch.Generator().manual_seed(hash(tuple(seed)) % 2**31)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if exact or not dtype.is_floating_point:
        # Powers of two, or nothing: their products are exact in half precision too.
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    scale = 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def seed_of(coordinate: tuple[int, ...], placements: Placements) -> list[int]:
    """Ranks have values of their own where a reduction is pending."""
    return [
        index if isinstance(placement, Partial) else 0
        for index, placement in zip(coordinate, placements, strict=True)
    ]


def cut(
    whole: Tensor,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> Tensor:
    shape = tuple(whole.shape)
    local = whole.new_empty(local_shape(shape, mesh_shape, coordinate, placements))
    for held in local_boxes(shape, mesh_shape, coordinate, placements):
        held.of(local).copy_(whole[held.box.slices])
    return local


def reduced(
    wholes: dict[tuple[int, ...], Tensor], placements: Placements, axes: Sequence[int]
) -> dict[tuple[int, ...], Tensor]:
    """Reduce over ``axes`` from the innermost outward, neighbours of one operation as one."""
    segments: list[tuple[str, list[int]]] = []
    for axis in reversed(axes):
        placement = placements[axis]
        assert isinstance(placement, Partial)
        op = str(placement.reduce_op)
        if segments and segments[-1][0] == op:
            segments[-1][1].append(axis)
        else:
            segments.append((op, [axis]))
    for op, group in segments:
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for coordinate in sorted(wholes):
            key = tuple(0 if a in group else i for a, i in enumerate(coordinate))
            groups.setdefault(key, []).append(wholes[coordinate])
        done: dict[tuple[int, ...], Tensor] = {}
        for key, values in groups.items():
            total = wide(values[0]).clone() if op in ("sum", "avg", "product") else values[0]
            for each in values[1:]:
                total = COMBINE[op](total, each.to(total.dtype))
            done[key] = (total / len(values) if op == "avg" else total).to(values[0].dtype)
        wholes = {c: done[tuple(0 if a in group else i for a, i in enumerate(c))] for c in wholes}
    return wholes


def partial_axes(placements: Placements) -> list[int]:
    return [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]


def check(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    source: Placements,
    target: Placements,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Redistribute on every rank, then reduce what is pending: the values must be the same."""
    mesh_shape = tuple(mesh.shape)
    everyone = list(product(*map(range, mesh_shape)))
    pending = partial_axes(target)
    # Some reductions are then done by this test, in an order of its own.
    exact = bool(pending)
    wholes = {c: value(seed_of(c, source), shape, dtype, exact=exact) for c in everyone}
    start = per_rank(lambda c: cut(wholes[c], mesh_shape, c, source), mesh)
    end = redistribute_local(start, mesh, shape, source, target)
    expected = reduced(wholes, source, partial_axes(source))
    assert isinstance(end, RankTensor)
    found = {c: end.of_rank(rank) for rank, c in enumerate(coordinates_of_ranks(mesh))}
    for c in everyone:
        assert found[c].shape == local_shape(shape, mesh_shape, c, target)
        assert found[c].dtype == dtype
        assert found[c].is_contiguous()
    found = reduced(found, target, pending)
    has_thirds = 3 in mesh_shape and Partial("avg") in (*source, *target)
    for c in everyone:
        want = cut(expected[c], mesh_shape, c, target)
        if pending and has_thirds:
            torch.testing.assert_close(found[c], want)
        else:
            assert torch.equal(found[c], want)


def allowed(
    placements: Placements, shape: tuple[int, ...], mesh_shape: tuple[int, ...], dtype: torch.dtype
) -> bool:
    """Whether placements fit a shape; an inner one may not go with what an outer one left."""
    ops = [p.reduce_op for p in placements if isinstance(p, Partial)]
    if "avg" in ops and not dtype.is_floating_point:
        return False
    try:
        for coordinate in product(*map(range, mesh_shape)):
            local_shape(shape, mesh_shape, coordinate, placements)
    except ValueError:
        return False
    return True


def layouts(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], dtype: torch.dtype
) -> list[Placements]:
    """Up to a few hundred combinations of placements that fit."""
    combinations = list(product(*(placements_for(shape, ranks) for ranks in mesh_shape)))
    if len(combinations) > 300:
        combinations = random.Random(2).sample(combinations, 300)
    return [each for each in combinations if allowed(each, shape, mesh_shape, dtype)]


def check_pairs(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, sample: int | None
) -> None:
    found = layouts(shape, mesh_shape, dtype)
    pairs = list(product(found, found))
    if sample is not None and sample < len(pairs):
        pairs = random.Random(0).sample(pairs, sample)
    with emulate(math.prod(mesh_shape)):
        mesh = init_device_mesh("cpu", mesh_shape)
        for source, target in pairs:
            check(mesh, shape, source, target, dtype)


SHAPES = [(8, 4), (7, 5), (3, 2, 3), (5,), (), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_placements_on_one_axis(shape: tuple[int, ...]) -> None:
    check_pairs((4,), shape, torch.float32, 250)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_of_placements_on_two_axes(shape: tuple[int, ...]) -> None:
    check_pairs((2, 2), shape, torch.float32, 150)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 1, 3)], ids=str)
def test_pairs_of_placements_in_other_dtypes(
    mesh_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_pairs(mesh_shape, (7, 4), dtype, 60)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (6, 4, 5)], ids=str)
def test_pairs_of_placements_at_length(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_pairs(mesh_shape, shape, dtype, 1000 if len(mesh_shape) < 3 else 300)


def _ends(mesh_shape: tuple[int, ...]) -> list[Tensor]:
    """What a rank has after some redistributions; all ranks' if they are emulated."""
    mesh = init_device_mesh("cpu", mesh_shape)
    ends: list[Tensor] = []
    for shape, dtype in (
        ((8, 4), torch.float32),
        ((7, 5), torch.bfloat16),
        ((3, 2, 3), torch.bool),
        ((), torch.float64),
        ((0, 3), torch.int64),
    ):
        found = layouts(shape, mesh_shape, dtype)
        for source, target in random.Random(1).choices(list(product(found, found)), k=12):

            def start(c: tuple[int, ...], source: Placements = source) -> Tensor:
                whole = value(seed_of(c, source), shape, dtype, exact=False)  # noqa: B023
                return cut(whole, mesh_shape, c, source)

            local = per_rank(start, mesh)
            ends.append(redistribute_local(local, mesh, shape, source, target))
    return ends


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_processes_and_emulated_ranks_have_the_same_bits(
    world4: World, mesh_shape: tuple[int, ...]
) -> None:
    of_processes = world4.run(_ends, mesh_shape)
    with emulate(4):
        of_parts = _ends(mesh_shape)
        for rank, ends in enumerate(of_processes):
            for end, parts in zip(ends, of_parts, strict=True):
                assert isinstance(parts, RankTensor)
                assert torch.equal(end, parts.of_rank(rank))


def _sums(target: Placement, numel: int) -> Tensor:
    """The sum of one tensor per rank, gathered again from ``target``."""
    mesh = init_device_mesh("cpu", (4,))
    local = per_rank(lambda c: value(c, (numel,), torch.float32, exact=False), mesh)
    part = redistribute_local(local, mesh, (numel,), (Partial(),), (target,))
    whole = redistribute_local(part, mesh, (numel,), (target,), (Replicate(),))
    assert isinstance(whole, RankTensor)
    return whole.of_rank(3)


@pytest.mark.parametrize("numel", [37, 5000])
def test_the_bits_of_a_sum_do_not_depend_on_where_it_goes(numel: int) -> None:
    with emulate(4):
        first = _sums(Replicate(), numel)
        for target in (
            Shard(0),
            StridedShard(0, split_factor=3),
            RaggedShard((0,), numel, (0, 0, 1, 0)),
        ):
            assert torch.equal(_sums(target, numel), first)


def _redistributed(
    locals_: Callable[[tuple[int, ...]], Tensor], *placements: Placement
) -> list[RankTensor]:
    """What ranks of a mesh of four have under each of some placements in turn."""
    mesh = init_device_mesh("cpu", (4,))
    local = per_rank(locals_, mesh)
    shape = tuple(locals_((0,)).shape)
    found = [local]
    for source, target in pairwise(placements):
        found.append(redistribute_local(found[-1], mesh, shape, (source,), (target,)))
    return found


def test_what_is_cut_does_not_alias_what_it_was_cut_from() -> None:
    whole = torch.zeros(8, 4)
    with emulate(4):
        for target in (Shard(0), Shard(1), Partial(), RaggedShard((0,), 8, (1, 0, 0, 0))):
            _, end = _redistributed(lambda _: whole, Replicate(), target)
            end.of_rank(0).fill_(1)
            assert not whole.any()


def test_the_same_tensor_comes_back_if_nothing_changes() -> None:
    with emulate(4):
        start, same, end = _redistributed(
            lambda _: torch.zeros(8), Replicate(), Replicate(), Partial("max")
        )
        assert start is same is end


def test_the_sign_of_zero_survives_a_pending_sum() -> None:
    with emulate(4):
        for source in (Replicate(), Shard(0)):
            found = _redistributed(
                lambda _: torch.full((8,), -0.0), Replicate(), source, Partial(), Replicate()
            )
            assert found[-1].of_rank(1).signbit().all()


def test_a_pending_sum_of_booleans_means_any() -> None:
    with emulate(4):
        found = _redistributed(
            lambda c: torch.arange(4) == c[0], Partial(), RaggedShard((0,), 1, (0, 4, 0, 0))
        )
        assert found[-1].of_rank(1).tolist() == [True] * 4


def test_half_precision_is_rounded_once() -> None:
    with emulate(4):
        # One by one, 256 + 1 is 256 in bfloat16, and so is 256 + 1 + 1 + 1.
        found = _redistributed(
            lambda c: torch.tensor([256.0 if c[0] == 0 else 1.0], dtype=torch.bfloat16),
            Partial(),
            Replicate(),
        )
        assert found[-1].of_rank(2).item() == 260.0


def test_local_tensors_may_lie_in_memory_in_any_order() -> None:
    full = torch.arange(40.0).view(5, 8)
    with emulate(4):
        for target in (Shard(0), Shard(1), RaggedShard((0, 1), 10, (1, 1, 1, 1))):
            found = _redistributed(
                lambda _: full.t().contiguous().t(), Replicate(), target, Shard(1), Replicate()
            )
            assert found[-1].of_rank(3).is_contiguous()
            assert torch.equal(found[-1].of_rank(3), full)


@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        (Shard(0), Replicate(), [("all_gather", 3 * 4096)]),
        (Shard(0), Shard(1), [("all_to_all", 3 * 1024)]),
        (Partial(), Shard(0), [("all_to_all", 3 * 4096)]),
        (Partial(), Replicate(), [("all_to_all", 3 * 4096), ("all_gather", 3 * 4096)]),
        (Replicate(), Shard(0), []),
        (Shard(1), Partial(), []),
    ],
    ids=str,
)
def test_what_is_sent_is_what_was_planned(
    source: Placement, target: Placement, sent: list[tuple[str, int]]
) -> None:
    heard: list[Communication] = []
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        whole = torch.zeros(128, 128)
        local = per_rank(lambda c: cut(whole, (4,), c, (source,)), mesh)
        with listening(heard.append):
            redistribute_local(local, mesh, (128, 128), (source,), (target,))
    assert [(each.kind, each.nbytes // 4) for each in heard] == sent
    steps = plan_redistribution((128, 128), (4,), (source,), (target,))
    assert [n for step in steps if (n := step.numel_received((0,)))] == [n for _, n in sent]


def test_a_pending_reduction_that_the_dtype_lacks_is_refused() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        local = per_rank(lambda _: torch.zeros(4, dtype=torch.int64), mesh)
        with pytest.raises(ValueError, match="'avg' needs a floating-point or complex dtype"):
            redistribute_local(local, mesh, (4,), (Partial("avg"),), (Replicate(),))
