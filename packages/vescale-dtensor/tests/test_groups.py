"""Groups that are made for several mesh axes at once."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor._transport import group_of, timeout_of
from vescale_testing import World


def _timeouts() -> list[float | None]:
    mesh = init_device_mesh("cpu", (2, 2, 1))
    world = dist.group.WORLD
    assert world is not None
    groups = [world, group_of(mesh, (1, 2))[0]]
    found = [timeout_of(group, "cpu") for group in groups]
    return [None if timeout is None else timeout.total_seconds() for timeout in found]


def test_a_group_over_several_axes_waits_no_longer_than_the_job(world4: World) -> None:
    # The timeout of the fixture's world.
    assert world4.run(_timeouts) == [[60.0, 60.0]] * 4
