"""Save under one layout, load under another: every pair, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from vescale_dtensor import InterleavedShard, RaggedShard, distribute_tensor
from vescale_testing import World


class Layout(NamedTuple):
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]


def ragged(granularity: int, *units: int) -> RaggedShard:
    return RaggedShard((0,), granularity, units)


LAYOUTS = {
    1: {
        "replicate": Layout((1,), (Replicate(),)),
        "rows": Layout((1,), (Shard(0),)),
    },
    2: {
        "replicate": Layout((2,), (Replicate(),)),
        "rows": Layout((2,), (Shard(0),)),
        "columns": Layout((2,), (Shard(1),)),
        "fused": Layout((2,), (InterleavedShard(1, 3),)),
        "ragged": Layout((2,), (ragged(5, 3, 1),)),
        "stage": Layout((2,), (ragged(1, 0, 19),)),
    },
    4: {
        "replicate": Layout((4,), (Replicate(),)),
        "rows": Layout((4,), (Shard(0),)),
        "columns": Layout((4,), (Shard(1),)),
        "ragged": Layout((4,), (ragged(2, 1, 0, 7, 2),)),
        "fsdp x tp": Layout((2, 2), (Shard(0), Shard(1))),
        "copies x tp": Layout((2, 2), (Replicate(), Shard(1))),
        "fsdp x copies": Layout((2, 2), (Shard(0), Replicate())),
        "rows x rows": Layout((2, 2), (Shard(0), Shard(0))),
        "ragged x fused": Layout((2, 2), (ragged(4, 4, 1), InterleavedShard(1, 3))),
    },
}
SHAPES = {"even": (16, 12), "uneven": (19, 12, 3), "short": (3, 12)}


def full_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    return {
        f"{name} {dtype}": torch.randn(shape, generator=generator).mul(100).to(dtype)
        for name, shape in SHAPES.items()
        for dtype in dtypes
    }


def _distributed(layout: Layout, *, fill: bool) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", layout.mesh_shape)
    return {
        key: distribute_tensor(full if fill else full.mul(0).sub(1), mesh, layout.placements)
        for key, full in full_tensors().items()
    }


def save_under(path: str, name: str) -> None:
    layout = LAYOUTS[dist.get_world_size()][name]
    vescale_ckpt.save(path, {"model": _distributed(layout, fill=True), "step": 7})


def wrong_after_load(path: str) -> list[tuple[str, str]]:
    """Load under every layout and return where shards are not those of one device."""
    wrong: list[tuple[str, str]] = []
    for name, layout in LAYOUTS[dist.get_world_size()].items():
        target = _distributed(layout, fill=False)
        expected = _distributed(layout, fill=True)
        loaded = vescale_ckpt.load(path, {"model": target, "step": 0})
        assert loaded["step"] == 7
        wrong += [
            (name, key)
            for key, tensor in target.items()
            if not torch.equal(tensor.to_local(), expected[key].to_local())
        ]
    return wrong


@pytest.fixture(scope="module")
def worlds(world1: World, world2: World, world4: World) -> dict[int, World]:
    return {1: world1, 2: world2, 4: world4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in LAYOUTS for name in LAYOUTS[size]]
)
def test_a_checkpoint_of_any_layout_loads_under_every_other(
    worlds: dict[int, World], size: int, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "ckpt")
    worlds[size].run(save_under, path, name)
    stored = load_file(f"{path}/model.safetensors")
    for key, full in full_tensors().items():
        assert torch.equal(stored[key], full), key
    for other, world in worlds.items():
        assert world.run(wrong_after_load, path) == [[]] * other


def save_on_sub_meshes(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    full = torch.arange(20.0).reshape(5, 4)
    tensor = distribute_tensor(full, mesh["shards"], (Shard(0),))
    vescale_ckpt.save(path, {"w": tensor})


def test_copies_on_sibling_sub_meshes_are_written_once(world4: World, tmp_path: Path) -> None:
    world4.run(save_on_sub_meshes, str(tmp_path / "ckpt"))
    target = {"w": torch.zeros(5, 4)}
    vescale_ckpt.load(tmp_path / "ckpt", target)
    assert torch.equal(target["w"], torch.arange(20.0).reshape(5, 4))


def save_tied(path: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    tensor = distribute_tensor(torch.arange(2.0), mesh, (Shard(0),))
    vescale_ckpt.save(path, {"w": {"a": tensor, "b": tensor}})


def test_ties_are_seen_by_ranks_that_hold_nothing_of_the_tensor(
    world4: World, tmp_path: Path
) -> None:
    world4.run(save_tied, str(tmp_path / "ckpt"))
    assert load_file(tmp_path / "ckpt" / "w.safetensors").keys() == {"a"}
    target = {"w": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    vescale_ckpt.load(tmp_path / "ckpt", target)
    assert torch.equal(target["w"]["b"], torch.arange(2.0))
