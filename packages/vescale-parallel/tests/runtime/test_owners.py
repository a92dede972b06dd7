"""Owners of whole parameters: balanced, the same everywhere; what travels is bit-exact."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import (
    CommCounter,
    InterleavedShard,
    RaggedShard,
    distribute_tensor,
    local_shape,
)
from vescale_parallel._runtime.optimizer.owners import (
    StageRanks,
    assign_owners,
    owned_by,
    pieces_of,
)
from vescale_parallel._runtime.optimizer.whole_parameters import WholeParameters

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]

SIZES: list[list[int]] = [
    [7],
    [5, 5, 5],
    [100, 1, 1, 1, 50, 50],
    list(range(40)),
    [0, 0, 3],
]


@pytest.mark.parametrize("numels", SIZES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_no_rank_owns_more_than_the_average_and_one_parameter(
    numels: list[int], num_ranks: int
) -> None:
    owners, loads = assign_owners(numels, [0] * num_ranks)
    assert loads == [
        sum(n for n, owner in zip(numels, owners, strict=True) if owner == rank)
        for rank in range(num_ranks)
    ]
    assert max(loads) <= sum(numels) / num_ranks + max(numels)


def test_what_comes_later_goes_to_whoever_owns_least() -> None:
    owners, loads = assign_owners([5, 5], [9, 0, 4])
    assert owners == [1, 2]
    assert loads == [9, 5, 9]


def test_a_tensor_of_one_owner_is_nowhere_else() -> None:
    for place in product(range(2), range(3)):
        placements = owned_by((4, 5), place, (2, 3))
        for coordinate in product(range(2), range(3)):
            part = local_shape((4, 5), (2, 3), coordinate, placements)
            assert math.prod(part) == (20 if coordinate == place else 0)


def test_only_copies_beside_the_owner_are_sent() -> None:
    ranks = StageRanks(mesh_shape=(2, 2), pp_axis=None, stage=0)
    pieces = pieces_of((4, 4), (Replicate(), Shard(0)), ranks)
    assert [pieces.sends(rank, 3) for rank in range(4)] == [False, False, True, False]
    assert not pieces.has_all(3)
    assert pieces_of((4, 4), (Replicate(), Replicate()), ranks).has_all(1)


def test_a_stage_exchanges_among_its_own_ranks() -> None:
    ranks = StageRanks(mesh_shape=(2, 3), pp_axis=0, stage=1)
    assert ranks.coordinates == ((1, 0), (1, 1), (1, 2))
    assert ranks.axes == (1,)
    assert ranks.stage_of((RaggedShard((0,), 4, (0, 1)), Shard(0))) == 1


MESHES: dict[tuple[int, ...], list[tuple[Placement, ...]]] = {
    (2,): [(Shard(0),), (Shard(1),), (Replicate(),)],
    (3,): [(Shard(0),), (RaggedShard((0,), 1, (1, 0, 5)),), (Replicate(),)],
    (4,): [(Shard(0),), (RaggedShard((0, 1), 4, (1, 0, 5, 1)),), (Shard(1),)],
    (2, 2): [
        (Replicate(), Shard(1)),
        (Shard(0), Replicate()),
        (Shard(0), Shard(0)),
        (Shard(1), InterleavedShard(0, 2)),
        (Replicate(), Replicate()),
    ],
}


class OwnCounter(CommCounter):
    """Counts what its own thread, which is a rank, sends."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def _hear(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            super()._hear(event)


def _muon(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.1, weight_decay=0.1)


def _grads(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(6, 4, generator=generator) for _ in range(6)]


def _values() -> list[Tensor]:
    return _grads(100)


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_muon_on_owners_is_muon_on_one_device_bit_for_bit(
    in_threads: InThreads, mesh_shape: tuple[int, ...]
) -> None:
    """The fourth parameter has no gradient in the second step."""
    expected = [nn.Parameter(value) for value in _values()]
    reference = _muon(expected)
    for step in range(3):
        for index, (parameter, grad) in enumerate(zip(expected, _grads(step), strict=True)):
            parameter.grad = None if (index, step) == (3, 1) else grad
        reference.step()
    placements = [
        MESHES[mesh_shape][index % len(MESHES[mesh_shape])] for index in range(len(expected))
    ]

    def on_rank(rank: int) -> tuple[list[Tensor], int, int]:
        mesh = init_device_mesh("cpu", mesh_shape)
        publics: list[Any] = [
            nn.Parameter(distribute_tensor(value, mesh, placed))
            for value, placed in zip(_values(), placements, strict=True)
        ]
        whole = WholeParameters(mesh)
        mine: dict[Any, torch.optim.Optimizer] = {}
        before = 0
        with OwnCounter() as counter:
            for step in range(3):
                for index, (public, grad) in enumerate(zip(publics, _grads(step), strict=True)):
                    cut = distribute_tensor(grad, mesh, public.placements)
                    public.grad = None if (index, step) == (3, 1) else cut
                before = counter.num_collectives
                (plain,) = whole.begin([publics])
                for parameter in plain:
                    mine.setdefault(parameter, _muon([parameter])).step()
                whole.end(is_complete=True)
        per_step = counter.num_collectives - before
        return [public.detach().full_tensor() for public in publics], per_step, len(mine)

    found = in_threads(math.prod(mesh_shape), on_rank)
    assert sum(owned for _, _, owned in found) == len(expected), "each has one owner"
    for values, per_step, _ in found:
        assert per_step == 2  # to the owners, and back
        for got, parameter in zip(values, expected, strict=True):
            assert torch.equal(got, parameter)


def test_wholes_take_no_memory_between_steps(in_threads: InThreads) -> None:
    def on_rank(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2,))
        public: Any = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        public.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
        whole = WholeParameters(mesh)
        (plain,) = whole.begin([[public]])
        sizes = [p.untyped_storage().size() for p in plain]
        whole.end(is_complete=True)
        return sizes + [p.untyped_storage().size() for p in plain]

    assert sorted(in_threads(2, on_rank)) == [[], [6 * 4 * 4, 0]]
