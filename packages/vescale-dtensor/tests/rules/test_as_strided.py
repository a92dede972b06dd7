"""Strides reach elements of one device's storage, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import (
    DTensor,
    GatherWarning,
    InterleavedShard,
    RaggedShard,
    RankTensor,
    Unsupported,
    distribute_tensor,
    emulate,
)

pytestmark = pytest.mark.filterwarnings(f"ignore::{GatherWarning.__module__}.GatherWarning")

WITHIN: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": lambda x: x.as_strided((2, 3), (6, 1), 7),
    "of a slice": lambda x: x[1:].as_strided((2, 3), (6, 1)),
    "of a slice, its storage's offset": lambda x: x[1:].as_strided((2, 3), (6, 1), 13),
    "in place": lambda x: x[1:].as_strided_((2, 3), (6, 1), 8),
    "of a transposed": lambda x: x.t().as_strided((2, 3), (6, 1), 7),
    "of one": lambda x: x.as_strided((2, 3), (6, 1), 7).as_strided((2, 3), (6, 1), 7),
    "copy": lambda x: torch.as_strided_copy(x[1:], (2, 3), (6, 1), 8),
    "scatter": lambda x: torch.as_strided_scatter(x[1:], x[:2, :3] * 0, (2, 3), (6, 1), 8),
    "none": lambda x: x[1:].as_strided((0, 3), (6, 1), 0),
    "written": lambda x: x[1:].as_strided((2, 3), (6, 1), 8).zero_(),
}
BEYOND: dict[str, Callable[[Tensor], Tensor]] = {
    "before a slice": lambda x: x[1:].as_strided((2, 3), (6, 1), 0),
    "after a slice": lambda x: x[:2].as_strided((2, 3), (6, 1), 12),
    "between columns": lambda x: x[:, 2:].as_strided((2, 3), (6, 1)),
    "in place": lambda x: x[1:].as_strided_((2, 3), (6, 1), 0),
    "copy": lambda x: torch.as_strided_copy(x[1:], (2, 3), (6, 1), 0),
}
PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Partial(), Replicate()]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with emulate(3):
        yield init_device_mesh("cpu", (3,))


def _run(run: Callable[[Tensor], Tensor], mesh: DeviceMesh, placement: Placement) -> None:
    """Compare the result, and what it is a view of, with one device's."""
    full = torch.arange(24.0).reshape(4, 6)
    x = distribute_tensor(full, mesh, (placement,))
    expected, found = run(full), run(x)
    for want, have in ((expected, found), (full, x)):
        assert isinstance(have, DTensor)
        gathered = have.full_tensor()
        assert isinstance(gathered, RankTensor)
        assert all(torch.equal(want, part) for part in gathered.parts)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", WITHIN)
def test_strides_within_a_tensor_reach_its_elements(
    mesh: DeviceMesh, name: str, placement: Placement
) -> None:
    _run(WITHIN[name], mesh, placement)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", BEYOND)
def test_strides_beyond_a_part_are_refused_and_those_beyond_a_whole_are_not(
    mesh: DeviceMesh, name: str, placement: Placement
) -> None:
    if isinstance(placement, Replicate):
        _run(BEYOND[name], mesh, placement)
        return
    with pytest.raises(Unsupported, match="may reach elements of the storage"):
        _run(BEYOND[name], mesh, placement)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:],
    "row": lambda x: x[2],
    "of rows": lambda x: x[1:][1:],
    "diagonal": lambda x: x[1:].diagonal(),
    "one of several": lambda x: x.chunk(2)[1],
    "reshaped": lambda x: x[1:].reshape(-1),
}


@pytest.mark.parametrize(
    "placement", [InterleavedShard(0, 2), RaggedShard((0, 1), 1, (5, 8, 11))], ids=str
)
@pytest.mark.parametrize("name", VIEWS)
def test_gathered_views_begin_in_the_storage_where_they_do_on_one_device(
    mesh: DeviceMesh, name: str, placement: Placement
) -> None:
    view = VIEWS[name]
    full = torch.arange(24.0).reshape(4, 6)
    x = distribute_tensor(full, mesh, (placement,))
    assert view(x).storage_offset() == view(full).storage_offset()
    _run(lambda x: view(x).as_strided((2,), (1,), view(full).storage_offset()), mesh, placement)


def test_strides_before_the_base_of_a_gathered_view_are_refused(mesh: DeviceMesh) -> None:
    full = torch.arange(24.0).reshape(4, 6)
    x = distribute_tensor(full, mesh, (Shard(0),))
    with pytest.raises(Unsupported, match="may reach elements of the storage"):
        x[1:].diagonal().as_strided((2,), (1,), 0)
