"""Process groups: those made for several mesh axes at once, and those of an earlier job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import distribute_tensor, emulate
from vescale_dtensor._comm.groups import peers_along, timeout_of
from vescale_dtensor._layout.layout import _intern, layout, replicated
from vescale_testing import World


def _timeouts() -> list[float | None]:
    mesh = init_device_mesh("cpu", (2, 2, 1))
    world = dist.group.WORLD
    assert world is not None
    group = peers_along(mesh, (1, 2)).group
    assert group is not None
    groups = [world, group]
    found = [timeout_of(group, "cpu") for group in groups]
    return [None if timeout is None else timeout.total_seconds() for timeout in found]


def test_a_group_over_several_axes_waits_no_longer_than_the_job(world4: World) -> None:
    # The timeout of the fixture's world.
    assert world4.run(_timeouts) == [[60.0, 60.0]] * 4


_JOBS = """
import gc, sys, weakref
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from vescale_dtensor import distribute_tensor

rank, directory = int(sys.argv[1]), sys.argv[2]
before = []
for number, shape in enumerate([(2, 1, 1), (1, 1, 1), (1, 2, 1), (2, 1, 1)]):
    size = max(shape)
    own = rank if size > 1 else 0
    store = f"file://{directory}/{number}-{rank - own}"
    dist.init_process_group("gloo", init_method=store, rank=own, world_size=size)
    mesh = init_device_mesh("cpu", shape)
    full = torch.arange(8.0).reshape(4, 2)
    x = distribute_tensor(full, mesh, (Shard(0), Shard(0), Shard(0)))
    assert x.full_tensor().equal(full)  # over several axes at once
    assert x.sum().item() == 28
    assert (x @ x.t()).full_tensor().equal(full @ full.t())
    gc.collect()
    assert not any(each() for each in before), "the job before is still held"
    before = [weakref.ref(each) for each in (dist.group.WORLD, mesh, *mesh.get_all_groups())]
    del x, mesh
    dist.destroy_process_group()
print("done")
"""


@pytest.mark.slow
def test_jobs_one_after_another_in_one_process_have_groups_of_their_own(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _JOBS, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=240)
        assert output.endswith("done\n"), output


def _columns(mesh: DeviceMesh) -> torch.Tensor:
    spread = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, (Shard(0), Shard(1)))
    return spread.redistribute(placements=(Replicate(), Replicate())).to_local()


def test_an_emulated_mesh_is_not_taken_for_an_equal_one_of_a_smaller_world() -> None:
    with emulate(4):
        _columns(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    with emulate(8):
        # On the first rank its ranks are those of the mesh above.
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
        found = _columns(mesh)
        for rank in range(8):
            part = found.of_rank(rank)  # pyright: ignore[reportAttributeAccessIssue]: emulated
            assert torch.equal(part, torch.arange(8.0).reshape(2, 4))


def test_a_layout_in_use_is_the_only_one_of_its_kind_however_many_came_after_it() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        made = layout(mesh, replicated(mesh), (3,), None, torch.float32)
        _intern.cache_clear()  # which forgets by itself after 65,536 others
        assert layout(mesh, replicated(mesh), (3,), None, torch.float32) is made
