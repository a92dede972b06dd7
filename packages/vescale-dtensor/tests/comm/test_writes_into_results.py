"""Programs may write into what collectives return, as into any new tensor."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import all_gather, all_reduce, all_to_all, reduce_scatter
from vescale_testing import World

COLLECTIVES: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "all_reduce": all_reduce,
    "all_reduce of a few": lambda x, group: all_reduce(x[:1], group),
    "all_reduce, padded": lambda x, group: all_reduce(x[:, :3].contiguous(), group),
    "all_reduce by the library": lambda x, group: all_reduce(x, group, order="library"),
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}


def _write() -> None:
    count = dist.get_world_size()
    groups: list[Any] = [dist.new_group([rank]) for rank in range(count)]
    everyone: Any = dist.new_group([*range(count)])
    for name, collective in COLLECTIVES.items():
        for group in (everyone, groups[dist.get_rank()]):
            x = torch.arange(20.0).view(4, 5)[: group.size()].clone().requires_grad_()
            before = x.detach().clone()
            expected = torch.autograd.grad((collective(x, group) * 3).square().sum(), x)
            found = torch.autograd.grad(collective(x, group).mul_(3).square().sum(), x)
            assert torch.equal(found[0], expected[0]), name
            assert torch.equal(x, before), name


def test_results_can_be_written_into(world4: World) -> None:
    world4.run(_write)
