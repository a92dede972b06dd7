"""Numbers of every dtype are moved between ranks, also those that gloo does not know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import distribute_tensor
from vescale_testing import World

DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.bool, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
)


def moved(dtype: torch.dtype, numel: int) -> bool:
    """Return whether a tensor is the same after it was sharded, sharded otherwise and gathered."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(numel).remainder(3).to(dtype).view(4, -1)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    other = sharded.redistribute(placements=[Shard(1)])
    found = [x.redistribute(placements=[Replicate()]).to_local() for x in (sharded, other)]
    return all(torch.equal(_bits(x), _bits(whole)) for x in found)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [24, 2**17])
def test_numbers_of_every_dtype_are_moved(world2: World, numel: int, dtype: torch.dtype) -> None:
    assert world2.run(moved, dtype, numel) == [True, True]
