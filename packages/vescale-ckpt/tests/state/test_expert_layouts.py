"""Mixtures of experts: save under one layout, load under another, to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt._torch_private import StridedShard
from vescale_testing import World

NUM_LAYERS = 2
WIDTH, HIDDEN, VOCABULARY = 8, 10, 11
# An even and an uneven number of experts, layer by layer.
NUM_EXPERTS = (4, 3)


class Layout(NamedTuple):
    """Where experts, stacked as ``[experts, out, in]``, and all else lie."""

    mesh_shape: tuple[int, ...]
    experts: tuple[Placement, ...]
    dense: tuple[Placement, ...]
    norms: tuple[Placement, ...]


COPIES, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
# Rows again, of what the other mesh dim has left: as FSDP2 cuts what is cut already.
ROWS_OF_ROWS = StridedShard(0, split_factor=2)
LAYOUTS = {
    "one": Layout((1,), (COPIES,), (COPIES,), (COPIES,)),
    "dp4": Layout((4,), (COPIES,), (COPIES,), (COPIES,)),
    "ep2 dp2": Layout((2, 2), (COPIES, ROWS), (COPIES, COPIES), (COPIES, COPIES)),
    "tp2 dp2": Layout((2, 2), (COPIES, COLUMNS), (COPIES, ROWS), (COPIES, COPIES)),
    "ep2 fsdp2": Layout((2, 2), (COLUMNS, ROWS), (ROWS, ROWS), (ROWS, ROWS)),
    "world of 3": Layout((3,), (ROWS,), (ROWS,), (ROWS,)),
    "ep2 fsdp2 of experts": Layout(
        (2, 2), (ROWS_OF_ROWS, ROWS), (ROWS_OF_ROWS, ROWS), (ROWS, COPIES)
    ),
    "ep4": Layout((4,), (ROWS,), (COPIES,), (COPIES,)),
    "zero3 of 4": Layout((4,), (ROWS,), (ROWS,), (ROWS,)),
    "fsdp2 ep2": Layout((2, 2), (ROWS, COLUMNS), (ROWS, ROWS), (ROWS, ROWS)),
}


def weights() -> dict[str, torch.Tensor]:
    """Return the weights of a small model on one device; each element differs."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    model = {"embed.weight": drawn(VOCABULARY, WIDTH), "norm.weight": drawn(WIDTH)}
    for layer, experts in enumerate(NUM_EXPERTS):
        block = f"layers.{layer}.block_sparse_moe"
        model |= {
            f"layers.{layer}.self_attn.q_proj.weight": drawn(WIDTH, WIDTH),
            f"layers.{layer}.input_layernorm.weight": drawn(WIDTH),
            f"{block}.gate.weight": drawn(experts, WIDTH),
            f"{block}.experts.w1": drawn(experts, HIDDEN, WIDTH),
            f"{block}.experts.w2": drawn(experts, WIDTH, HIDDEN).bfloat16(),
        }
    return model


def state_on_one_device() -> dict[str, Any]:
    """Return weights and what Adam has of them."""
    model = weights()
    moments = {
        key: {
            "step": torch.tensor(7.0),
            "exp_avg": tensor.float() / 3,
            "exp_avg_sq": tensor.float().square(),
        }
        for key, tensor in model.items()
    }
    return {"model": model, "optimizer": {"state": moments, "lr": 0.1}, "step": 7}


def placements_of(layout: Layout, key: str, shape: torch.Size) -> tuple[Placement, ...]:
    if ".experts." in key:
        placements = layout.experts
    else:
        placements = layout.norms if len(shape) == 1 else layout.dense
    # Rows of rows are for numbers of rows that divide.
    return (COLUMNS, ROWS) if ROWS_OF_ROWS in placements and shape[0] % 4 else placements


def shard(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Return what torch makes of it."""
    if ROWS_OF_ROWS not in placements:
        return distribute_tensor(full, mesh, placements)
    dp, ep = mesh.get_coordinate() or (0, 0)
    part = full.chunk(2)[ep].chunk(2)[dp]
    return DTensor.from_local(
        part, mesh, placements, shape=full.shape, stride=full.stride(), run_check=False
    )


def distributed(layout: Layout, *, fill: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", layout.mesh_shape)
    one = state_on_one_device()

    def placed(key: str, tensor: torch.Tensor) -> torch.Tensor:
        full = tensor if fill else torch.full_like(tensor, -1)
        if not tensor.dim():
            return full
        return shard(full, mesh, placements_of(layout, key, tensor.shape))

    return {
        "model": {key: placed(key, tensor) for key, tensor in one["model"].items()},
        "optimizer": {
            "state": {
                key: {name: placed(key, tensor) for name, tensor in moments.items()}
                for key, moments in one["optimizer"]["state"].items()
            },
            "lr": 0.1 if fill else 0.0,
        },
        "step": 7 if fill else 0,
    }


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in state.items():
        leaves |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return leaves


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def save_under(path: str, name: str) -> None:
    vescale_ckpt.save(path, distributed(LAYOUTS[name], fill=True))


def wrong_after_load(path: str, name: str) -> list[str]:
    """Load and return the keys whose shards are not those of one device."""
    loaded = flat(vescale_ckpt.load(path, distributed(LAYOUTS[name], fill=False)))
    expected = flat(distributed(LAYOUTS[name], fill=True))
    return [key for key, value in expected.items() if not is_same(loaded[key], value)]


def is_same(loaded: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(local(loaded), local(expected))
    return loaded == expected


@pytest.fixture(scope="module")
def worlds(world1: World, world3: World, world4: World) -> dict[int, World]:
    return {1: world1, 3: world3, 4: world4}


def save_and_load(worlds: dict[int, World], path: str, saved: str, loaded: list[str]) -> None:
    worlds[math.prod(LAYOUTS[saved].mesh_shape)].run(save_under, path, saved)
    stored = load_file(f"{path}/model.safetensors")
    for key, full in weights().items():
        assert torch.equal(stored[key], full), key
    for name in loaded:
        size = math.prod(LAYOUTS[name].mesh_shape)
        assert worlds[size].run(wrong_after_load, path, name) == [[]] * size, name


@pytest.mark.slow
@pytest.mark.parametrize("saved", LAYOUTS)
def test_experts_of_any_layout_load_under_others(
    worlds: dict[int, World], tmp_path: Path, saved: str
) -> None:
    names = [*LAYOUTS]
    # So every layout loads what three others have saved.
    others = [names[(names.index(saved) + step) % len(names)] for step in (1, 3, 6)]
    save_and_load(worlds, str(tmp_path / "ckpt"), saved, others)


@pytest.mark.nightly
@pytest.mark.parametrize("saved", LAYOUTS)
def test_experts_of_any_layout_load_under_every_other(
    worlds: dict[int, World], tmp_path: Path, saved: str
) -> None:
    save_and_load(worlds, str(tmp_path / "ckpt"), saved, [*LAYOUTS])


class Experts(nn.Module):
    """The weights of a layer of stacked experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(num_experts)
        self.w1 = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH, generator=generator))
        self.w2 = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN, generator=generator))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(4)
        self.norm = nn.LayerNorm(WIDTH)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def fully_sharded() -> nn.Module:
    """Return a model with experts over one mesh dim, which FSDP2 cuts along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Mixture()
    for name, weight in list(model.experts.named_parameters()):
        over_ranks = distribute_tensor(weight.detach(), mesh["ep"], (ROWS,))
        model.experts.register_parameter(name, nn.Parameter(over_ranks))
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def save_a_step_of_fsdp2(path: str) -> dict[str, torch.Tensor]:
    """Make a step, save, and return what torch puts together on this rank."""
    model = fully_sharded()
    optimizer = adam(model)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().square()
    optimizer.step()
    vescale_ckpt.save(path, {"model": model, "optimizer": optimizer})
    return {key: whole(value) for key, value in full_state(model, optimizer).items()}


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    moments = {
        f"{name} {kind}": tensor
        for name, parameter in model.named_parameters()
        for kind, tensor in optimizer.state[parameter].items()
    }
    return {**model.state_dict(), **moments}


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def load_into_fsdp2(path: str) -> dict[str, torch.Tensor]:
    model = fully_sharded()
    for parameter in model.parameters():
        parameter.data.mul_(0)
    optimizer = adam(model)
    vescale_ckpt.load(path, {"model": model, "optimizer": optimizer})
    return {key: whole(value) for key, value in full_state(model, optimizer).items()}


def test_experts_that_fsdp2_has_cut_load_on_one_device_and_come_back(
    world4: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "ckpt")
    expected = world4.run(save_a_step_of_fsdp2, path)[0]
    assert any("exp_avg_sq" in key for key in expected)
    model = Mixture()
    optimizer = adam(model)
    vescale_ckpt.load(path, {"model": model, "optimizer": optimizer})
    loaded = full_state(model, optimizer)
    assert loaded.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(loaded[key], tensor), key
    vescale_ckpt.save(path, {"model": model, "optimizer": optimizer})
    for tensors in world4.run(load_into_fsdp2, path):
        assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())
