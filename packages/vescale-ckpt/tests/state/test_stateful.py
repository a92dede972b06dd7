"""Modules, optimizers and other objects with a state, sharded and not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vescale_ckpt
from vescale_ckpt import CheckpointError, SavedTensor
from vescale_dtensor import distribute_tensor
from vescale_testing import World


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def sharded_net(kind: str, made: nn.Sequential | None = None) -> nn.Sequential:
    """Return a net under FSDP2, under tensor parallelism, or under both."""
    model = made or net()
    world_size = dist.get_world_size()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        return model
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind == "fsdp x tp":
        fully_shard(model, mesh=mesh["dp"])
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a step with gradients that do not depend on how the model is run."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach() * (number + 1)
    optimizer.step()


def reference() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def save_sharded(path: str, kind: str) -> None:
    model = sharded_net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    vescale_ckpt.save(path, {"model": model, "optimizer": optimizer})


def wrong_after_load(path: str, kind: str) -> list[str]:
    """Load into a fresh model and optimizer, go on, and compare with one device."""
    model = sharded_net(kind)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    vescale_ckpt.load(path, {"model": model, "optimizer": optimizer})
    step(model, optimizer)
    expected, expected_optimizer = reference()
    step(expected, expected_optimizer)
    return [
        name
        for (name, parameter), other in zip(
            model.named_parameters(), expected.parameters(), strict=True
        )
        if not torch.equal(parameter.full_tensor(), other)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]: a DTensor
    ]


def test_fsdp_and_tensor_parallel_checkpoints_load_under_each_other(
    world2: World, world4: World, tmp_path: Path
) -> None:
    saves = [(world2, "fsdp"), (world4, "tp"), (world4, "fsdp x tp")]
    for number, (world, kind) in enumerate(saves):
        path = str(tmp_path / str(number))
        world.run(save_sharded, path, kind)
        for other, other_kind in saves:
            wrong = other.run(wrong_after_load, path, other_kind)
            assert wrong == [[]] * other.world_size, (kind, other_kind)
        model, optimizer = reference()
        fresh = net()
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        vescale_ckpt.load(path, {"model": fresh, "optimizer": fresh_optimizer})
        for name, tensor in model.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], tensor)
        step(model, optimizer)
        step(fresh, fresh_optimizer)
        assert torch.equal(fresh[0].weight, model[0].weight)  # pyright: ignore[reportArgumentType]


def uneven_net() -> nn.Sequential:
    """Return a net of which two ranks, and two more, have no equal parts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 5))


def save_uneven(path: str) -> None:
    model: Any = sharded_net("fsdp x tp", uneven_net())
    assert len(model[0].weight.to_local()) == 3 - dist.get_rank() // 2
    vescale_ckpt.save(path, {"model": model})


def uneven_shards(path: str) -> list[bool]:
    """Load, and compare this rank's parts: those of FSDP2 are cut from those of its neighbour."""
    model = sharded_net("fsdp x tp", uneven_net())
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    vescale_ckpt.load(path, {"model": model})
    dp, tp = divmod(dist.get_rank(), 2)
    weight, bias = uneven_net()[0].parameters()
    own: Any = model[0]
    return [
        torch.equal(got.to_local(), whole.chunk(2)[tp].chunk(2)[dp])
        for got, whole in ((own.weight, weight), (own.bias, bias))
    ]


def test_uneven_shards_of_shards_are_stored_and_filled(world4: World, tmp_path: Path) -> None:
    world4.run(save_uneven, str(tmp_path / "ckpt"))
    assert world4.run(uneven_shards, str(tmp_path / "ckpt")) == [[True, True]] * 4
    model = uneven_net()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    vescale_ckpt.load(tmp_path / "ckpt", {"model": model})
    for name, tensor in uneven_net().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


class Momentum:
    """An optimizer that allocates its state, sharded, only when it is needed."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict

    def state_template(self, saved: Mapping[str, SavedTensor]) -> Mapping[str, Any]:
        assert saved == {"per.weight": SavedTensor((6, 2), torch.float64)}
        return {
            "per": {"weight": torch.empty_like(self.parameter, dtype=torch.float64)},
            "count": None,
        }


def save_and_load_momentum(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    parameter = distribute_tensor(full.float(), mesh, (Shard(0),))
    momentum = Momentum(parameter)
    momentum.state = {"per": {"weight": distribute_tensor(full, mesh, (Shard(1),))}, "count": 3}
    vescale_ckpt.save(path, {"momentum": momentum})
    fresh = Momentum(parameter)
    vescale_ckpt.load(path, {"momentum": fresh})
    assert fresh.state["count"] == 3
    assert fresh.state["per"]["weight"].placements == (Shard(0),)
    expected = distribute_tensor(full, mesh, (Shard(0),))
    assert torch.equal(fresh.state["per"]["weight"].to_local(), expected.to_local())


def test_an_object_without_state_is_asked_where_to_put_it(world2: World, tmp_path: Path) -> None:
    world2.run(save_and_load_momentum, str(tmp_path / "ckpt"))


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_the_extra_state_of_a_module_comes_back(tmp_path: Path) -> None:
    inner, other = WithExtra(), WithExtra()
    inner.extra = {"scale": 2.5, "history": [1, (2,)]}
    vescale_ckpt.save(tmp_path / "ckpt", {"model": nn.Sequential(inner, nn.BatchNorm1d(2))})
    vescale_ckpt.load(tmp_path / "ckpt", {"model": nn.Sequential(other, nn.BatchNorm1d(2))})
    assert other.extra == {"scale": 2.5, "history": [1, (2,)]}


def save_large(path: str) -> None:
    """Save and load runs longer, and stretches of short runs longer, than any buffer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = torch.arange(3 * 3_000_000.0).reshape(3, 3_000_000)
    tall = torch.arange(1_500_000 * 6.0).reshape(1_500_000, 6)
    state = {
        "wide": distribute_tensor(wide, mesh, (Shard(1),)),
        "tall": distribute_tensor(tall, mesh, (Shard(0),)),
    }
    vescale_ckpt.save(path, state)
    target = {
        "wide": distribute_tensor(wide * 0, mesh, (Shard(0),)),
        "tall": distribute_tensor(tall * 0, mesh, (Shard(1),)),
    }
    vescale_ckpt.load(path, target)
    expected = {
        "wide": distribute_tensor(wide, mesh, (Shard(0),)),
        "tall": distribute_tensor(tall, mesh, (Shard(1),)),
    }
    assert all(torch.equal(target[key].to_local(), expected[key].to_local()) for key in expected)


def test_tensors_larger_than_all_buffers_survive(world2: World, tmp_path: Path) -> None:
    world2.run(save_large, str(tmp_path / "ckpt"))
    target = {"wide": torch.zeros(3, 3_000_000), "tall": torch.zeros(1_500_000, 6).t().t()}
    vescale_ckpt.load(tmp_path / "ckpt", target)
    assert torch.equal(target["wide"].view(-1), torch.arange(9_000_000.0))
    assert torch.equal(target["tall"].view(-1), torch.arange(9_000_000.0))


class Failing:
    """An object that cannot say its state at the times it is told to."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("not yet")
        return {"a": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_the_object_that_does_not_give_its_state_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    message = r"at\.0: a Failing did not give its state: RuntimeError: not yet"
    with pytest.raises(CheckpointError, match=message):
        vescale_ckpt.save(path, {"at": [Failing(True)]})
    vescale_ckpt.save(path, {"at": [Failing(False)]})
    with pytest.raises(CheckpointError, match=message):
        vescale_ckpt.load(path, {"at": [Failing(True)]})
