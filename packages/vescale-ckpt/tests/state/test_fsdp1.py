"""State dicts of FullyShardedDataParallel, sharded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_testing import World


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 5))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # The same batch on every rank: then the mean of the gradients is that of one device.
    model(torch.arange(16.0).view(2, 8) / 16).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(*, has_mesh: bool = True) -> FullyShardedDataParallel:
    warnings.simplefilter("ignore")  # torch advises against this class, and against its own use
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if has_mesh else None
    model = FullyShardedDataParallel(
        net(), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def save_trained(path: str) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    vescale_ckpt.save(path, {"m": model, "o": state})


def resumed(path: str) -> dict[str, torch.Tensor]:
    """Load into a model and an optimizer that have gone elsewhere, and return what comes next."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
    step(model, optimizer)
    own = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    own = vescale_ckpt.load(path, {"m": model, "o": own})["o"]
    optimizer.load_state_dict(
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, own)
    )
    step(model, optimizer)
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_training_goes_on_on_others_and_on_one_device(
    world2: World, world3: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "ckpt")
    world2.run(save_trained, path)
    expected, fresh = net(), net()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1)
    other = torch.optim.AdamW(fresh.parameters())
    step(expected, optimizer)
    vescale_ckpt.load(path, {"m": fresh, "o": other})
    step(expected, optimizer)
    step(fresh, other)
    for parameters in [dict(fresh.named_parameters()), *world3.run(resumed, path)]:
        for name, parameter in expected.named_parameters():
            # Ranks reduce gradients by a sum and two divisions, and Adam takes their roots.
            torch.testing.assert_close(parameters[name], parameter, rtol=1e-5, atol=1e-6)


def refusal_of_sharded_tensors(path: str) -> list[str]:
    messages: list[str] = []
    model = sharded()
    vescale_ckpt.save(path, {"m": model})
    model = sharded(has_mesh=False)
    calls: list[Any] = [vescale_ckpt.save, vescale_ckpt.load]
    for call in calls:
        with pytest.raises(CheckpointError) as raised:
            call(path, {"m": model})
        messages.append(str(raised.value))
    return messages


def test_sharded_tensors_are_refused_with_what_gives_others(world2: World, tmp_path: Path) -> None:
    for messages in world2.run(refusal_of_sharded_tensors, str(tmp_path / "ckpt")):
        for message in messages:
            assert "'m.0.bias' is a ShardedTensor, which has no plain bytes; " in message
            assert "device_mesh=init_device_mesh(..)" in message
