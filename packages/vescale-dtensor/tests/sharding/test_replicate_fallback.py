"""What operators without a rule do, and which ones are refused."""

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import DTensor, RankTensor, Unsupported, distribute_tensor, emulate

PLACEMENTS: list[tuple[Placement, ...]] = [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with emulate(4):
        yield init_device_mesh("cpu", (4,))


def of_all_ranks(tensor: Tensor) -> Tensor:
    full = cast(DTensor, tensor).full_tensor()
    assert isinstance(full, RankTensor)
    assert all(torch.equal(part, full.parts[0]) for part in full.parts)
    return full.parts[0]


IN_INFERENCE_MODE: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.linear(x, torch.eye(6, dtype=x.dtype)[:3]),
    lambda x: x.diagonal() * 2,
    lambda x: x.chunk(3)[1] + 1,
    lambda x: F.layer_norm(x, (6,)),
    lambda x: x.clone().add_(1).t_().mul_(2),
]


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_inference_mode_changes_no_value(
    mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    x = torch.randn(6, 6, dtype=torch.float64)
    part = distribute_tensor(x, mesh, placements)
    for function in IN_INFERENCE_MODE:
        with torch.inference_mode():
            result = function(part)
        # Products of pending sums round differently than products of the whole.
        torch.testing.assert_close(of_all_ranks(result), function(x), rtol=1e-12, atol=1e-12)


def test_views_that_could_become_stale_are_refused_in_inference_mode(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(6, 6, dtype=torch.complex64), mesh, (Shard(0),))
    with torch.inference_mode(), pytest.raises(Unsupported, match="would become stale"):
        (x * 1).conj()


REFUSED: list[Callable[[Tensor], object]] = [
    lambda x: x.to_sparse(),
    lambda x: x.to_mkldnn(),
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_results_that_no_placement_describes_are_refused(
    mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    x = distribute_tensor(torch.randn(6, 6), mesh, placements)
    for function in REFUSED:
        with pytest.raises(Unsupported, match=r"aten\..* is refused on distributed tensors"):
            function(x)


def test_tensors_on_two_meshes_meet(mesh: DeviceMesh) -> None:
    x = torch.randn(6, 6)
    square = init_device_mesh("cpu", (2, 2))
    one = distribute_tensor(x, mesh, (Shard(0),))
    other = distribute_tensor(x, square, (Shard(1), Shard(0)))
    with pytest.warns(UserWarning, match="were gathered"):
        assert torch.equal(of_all_ranks(one + other), x + x)
    with pytest.warns(UserWarning, match="were gathered"):
        assert torch.equal(of_all_ranks(one.add_(other)), x + x)


@pytest.mark.filterwarnings("ignore:.*were gathered")
def test_sharing_elements_is_told_from_equal_elements(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(6, 6), mesh, (Shard(0),))
    assert x.is_set_to(x)
    assert not x.is_set_to(x.clone())
