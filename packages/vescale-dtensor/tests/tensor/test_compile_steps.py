"""Steps of training on distributed parameters that are compiled as one function."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import DTensor, distribute_tensor
from vescale_testing import World

ROWS = {"rows": Shard(0), "features": Replicate()}
WEIGHTS: dict[str, dict[str, Placement]] = {
    "rows": {},
    "features": {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)},
}


def _losses(cut: str | None, *, is_compiled: bool) -> list[float]:
    """Return the losses of three steps, of one device where nothing is cut."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5)).double()
    x, y = (torch.randn(6, width, dtype=torch.float64) for width in (8, 5))
    if cut is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, parameter in [*model.named_parameters()]:
            placement = WEIGHTS[cut].get(name, Replicate())
            owner, _, last = name.rpartition(".")
            made = nn.Parameter(distribute_tensor(parameter.detach(), mesh, (placement,)))
            setattr(model.get_submodule(owner), last, made)
        x, y = (distribute_tensor(each, mesh, (ROWS[cut],)) for each in (x, y))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = torch.compile(step, backend="aot_eager") if is_compiled else step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it does not follow
        found = [run() for _ in range(3)]
    return [(x.full_tensor() if isinstance(x, DTensor) else x).item() for x in found]


def _compiled(cut: str) -> list[float]:
    return _losses(cut, is_compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [pytest.param("rows", marks=pytest.mark.nightly), "features"])
def test_a_compiled_step_has_the_losses_of_one_device(world2: World, cut: str) -> None:
    expected = _losses(None, is_compiled=False)
    for found in world2.run(_compiled, cut):
        # float64: sums over two ranks are in another order.
        assert found == pytest.approx(expected, rel=1e-12)
