"""What collectives send, and which arguments they refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import all_gather, all_reduce, all_to_all, emulate, reduce_scatter
from vescale_dtensor._comm.events import Communication, listening
from vescale_testing import World

from .collective_programs import RANKS, Program, _local, all_bits, different_shapes, ones


def _heard(program: Program, mesh_shape: tuple[int, ...] = (RANKS,)) -> list[Communication]:
    events: list[Communication] = []
    with emulate(math.prod(mesh_shape)), listening(events.append):
        program(init_device_mesh("cpu", mesh_shape))
    return events


def _kinds_and_bytes(events: Sequence[Communication]) -> list[tuple[str, int]]:
    return [(event.kind, event.nbytes) for event in events]


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4), (2, 2, 2)])
def test_a_reduction_sends_what_a_ring_sends_in_one_group(mesh_shape: tuple[int, ...]) -> None:
    numel, itemsize, ranks = 64, 4, 8
    share = (ranks - 1) * numel * itemsize // ranks
    events = _heard(lambda mesh: all_reduce(ones(numel), mesh), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_to_all", share), ("all_gather", share)]
    assert {(event.axes, event.num_ranks) for event in events} == {
        (tuple(range(len(mesh_shape))), ranks)
    }
    events = _heard(lambda mesh: reduce_scatter(ones(8, 8), mesh), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_to_all", share)]
    events = _heard(lambda mesh: all_gather(ones(8), mesh), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_gather", share)]
    events = _heard(lambda mesh: all_to_all(ones(8, 8), mesh), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_to_all", share)]
    events = _heard(lambda mesh: all_reduce(ones(numel), mesh, order="library"), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_reduce", 2 * share)]
    events = _heard(lambda mesh: reduce_scatter(ones(8, 8), mesh, order="library"), mesh_shape)
    assert _kinds_and_bytes(events) == [("reduce_scatter", share)]


def test_a_small_all_reduce_is_one_collective() -> None:
    # A scalar is sent whole to the other 3; the two steps would send 3 elements each.
    events = _heard(lambda mesh: all_reduce(ones(), mesh))
    assert _kinds_and_bytes(events) == [("all_gather", 12)]
    # Between two ranks all is small.
    events = _heard(lambda mesh: all_reduce(ones(100), mesh), (2,))
    assert _kinds_and_bytes(events) == [("all_gather", 400)]


def test_uneven_parts_are_padded_only_if_they_are_nearly_even() -> None:
    def sent(*sizes: int) -> list[tuple[str, int]]:
        def program(mesh: DeviceMesh) -> Tensor:
            own = _local(lambda rank: torch.ones(sizes[rank], 2))
            return all_gather(own, mesh, sizes=sizes)

        return _kinds_and_bytes(_heard(program))

    assert sent(2, 2, 2, 1) == [("all_gather", 3 * 2 * 8)]
    assert sent(10, 0, 0, 0) == [("all_to_all", 3 * 10 * 8)]
    assert sent(0, 0, 0, 10) == [("all_to_all", 0)]


def _bytes_of_all() -> list[tuple[str, int]]:
    events: list[Communication] = []
    mesh = init_device_mesh("cpu", (RANKS,))
    with listening(events.append):
        all_bits(mesh)
    return _kinds_and_bytes(events)


@pytest.mark.slow
def test_processes_send_what_emulated_ranks_send(world4: World) -> None:
    found = world4.run(_bytes_of_all)
    for rank in (0, 2):
        with emulate(RANKS, rank=rank):
            assert found[rank] == _bytes_of_all()


WRONG: list[tuple[Program, str]] = [
    (
        lambda mesh: all_reduce(ones(2), mesh, op=cast(Any, "mean")),
        "expected op to be one of",
    ),
    (
        lambda mesh: all_reduce(ones(2), mesh, order=cast(Any, "ring")),
        "'rank' or 'library'",
    ),
    (
        lambda mesh: all_reduce(ones(2).long(), mesh, op="avg"),
        "needs a floating-point or complex dtype",
    ),
    (lambda mesh: all_reduce(ones(2) * 1j, mesh, op="max"), "needs a real dtype"),
    (
        lambda mesh: all_reduce(ones(2), mesh, accumulate=torch.bfloat16),
        r"holds every value of torch.float32, got torch.bfloat16",
    ),
    (
        lambda mesh: all_reduce(ones(2), mesh, order="library", accumulate=torch.float64),
        "no accumulate with order 'library'",
    ),
    (lambda mesh: all_reduce(ones(2), mesh, axes=1), r"expected axes of .*, got \[1\]"),
    (lambda mesh: all_reduce(ones(2), mesh, axes="tp"), r"got \['tp'\]"),
    (lambda mesh: all_reduce(ones(2), mesh, axes=(0, 0)), "each once"),
    (lambda mesh: all_reduce(different_shapes(), mesh), "one shape on all ranks"),
    (lambda mesh: all_gather(different_shapes(), mesh), "one shape on all ranks"),
    (lambda mesh: all_gather(ones(2), mesh, sizes=(2, 3)), "of 4 ranks, got"),
    (lambda mesh: all_gather(ones(2), mesh, sizes=(2, 2, 2, -1)), "at least 0"),
    (
        lambda mesh: all_gather(ones(2), mesh, sizes=(2, 2, 2, 1)),
        r"to be 1 .*got shape \(2,\)",
    ),
    (lambda mesh: reduce_scatter(ones(3), mesh), r"dim 0 to be 4 \(one row per rank"),
    (lambda mesh: reduce_scatter(ones(), mesh), r"got shape \(\)"),
    (lambda mesh: reduce_scatter(ones(4), mesh, sizes=(1, 1, 1, 2)), "dim 0 to be 5"),
    (lambda mesh: all_to_all(ones(6), mesh), "multiple of 4"),
    (lambda mesh: all_to_all(ones(), mesh), "multiple of 4"),
    (lambda mesh: all_to_all(ones(4), mesh, input_splits=(1, 1, 1, 1)), "or neither"),
    (
        lambda mesh: all_to_all(ones(4), mesh, input_splits=(1,) * 4, output_splits=(1, 1, 2, 0)),
        r"output_splits \(1, 1, 1, 1\) on rank 0",
    ),
    (
        lambda mesh: all_to_all(ones(5), mesh, input_splits=(1,) * 4, output_splits=(1,) * 4),
        "dim 0 to be 4",
    ),
]


@pytest.mark.parametrize(("program", "message"), WRONG)
def test_arguments_that_do_not_fit_are_refused_before_any_communication(
    program: Program, message: str
) -> None:
    heard: list[Communication] = []
    with emulate(RANKS), listening(heard.append), pytest.raises(ValueError, match=message):
        program(init_device_mesh("cpu", (RANKS,)))
    assert not heard


def test_a_group_takes_no_axes_and_must_be_one() -> None:
    with emulate(2):
        assert dist.group.WORLD is not None
        with pytest.raises(ValueError, match="axes are those of a mesh"):
            all_reduce(ones(2), dist.group.WORLD, axes=0)
        with pytest.raises(TypeError, match="a group that this rank is in"):
            all_reduce(ones(2), cast(Any, None))
