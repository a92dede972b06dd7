"""Inside ``forbid_gathers`` nothing that is cut is sent to other ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import (
    CommCounter,
    DTensor,
    GatherForbiddenError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    emulate,
    forbid_gathers,
)


def cut(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(24.0).view(4, 6), mesh, (Shard(1),))


@pytest.mark.parametrize(
    "gather",
    [
        pytest.param(lambda x: x.full_tensor(), id="full_tensor"),
        pytest.param(lambda x: x.redistribute(placements=(Shard(0),)), id="redistribute"),
        pytest.param(lambda x: x.sort(dim=1), id="sort"),
        pytest.param(lambda x: torch.linalg.qr(x), id="without a rule"),
    ],
)  # fmt: skip
def test_a_gather_is_refused_before_anything_is_sent(gather: object) -> None:
    assert callable(gather)
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = cut(mesh)
        counter = CommCounter()
        refused = pytest.raises(GatherForbiddenError, match=r"would gather.*; name it")
        with counter, forbid_gathers(mesh, hint="name it"), refused:
            gather(x)
        assert counter.nbytes == 0


def test_a_loss_on_cut_logits_is_none() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        logits = cut(mesh).requires_grad_()
        targets = torch.tensor([0, 1, 4, 5])
        with forbid_gathers(mesh):
            F.cross_entropy(logits, distribute_tensor(targets, mesh, (Replicate(),))).backward()
        assert logits.grad is not None


def test_pending_sums_other_meshes_and_programs_outside_are_left_alone() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = distribute_tensor(torch.arange(8.0), mesh["a"], (Shard(0),))
        with forbid_gathers(mesh["b"]):
            x.full_tensor()
        with forbid_gathers(mesh["a"]):
            distribute_tensor(torch.ones(3), mesh["a"], (Partial(),)).full_tensor()
        x.full_tensor()
