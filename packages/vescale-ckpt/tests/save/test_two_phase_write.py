"""Column shards are exchanged first: same bytes in the file, errors on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._format.byte_ranges import byte_ranges_of
from vescale_ckpt._save import two_phase_write
from vescale_dtensor import Box, InterleavedShard, RaggedShard, distribute_tensor
from vescale_testing import World

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "columns": ((4,), (Shard(1),)),
    "fused": ((4,), (InterleavedShard(1, 3),)),
    "fused rows": ((4,), (InterleavedShard(0, 2),)),
    "rows x columns": ((2, 2), (Shard(0), Shard(1))),
    "copies x columns": ((2, 2), (Replicate(), Shard(1))),
    "columns x copies": ((2, 2), (Shard(1), Replicate())),
    "stage x columns": ((2, 2), (RaggedShard((0,), 8, (0, 11)), Shard(1))),
    "columns x last": ((2, 2), (Shard(1), Shard(2))),
}


def full_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "float": torch.randn(88, 24, 3, generator=generator),
        "half": torch.randn(16, 48, 2, generator=generator).to(torch.bfloat16),
        "narrow": torch.randn(40, 12, 1, generator=generator),
    }


def save_with_small_rounds(path: str, round_nbytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_phase_write, "_MIN_TENSOR_NBYTES", 0)
        patch.setattr(two_phase_write, "PAGE_NBYTES", 64)
        patch.setattr(two_phase_write, "_ROUND_NBYTES", round_nbytes)
        counted = _count(patch)
        state: dict[str, Any] = {}
        for name, (mesh_shape, placements) in LAYOUTS.items():
            mesh = init_device_mesh("cpu", mesh_shape)
            for key, full in full_tensors().items():
                state[f"{name} {key}"] = distribute_tensor(full, mesh, placements)
        vescale_ckpt.save(path, {"model": state})
        assert counted[0] > (0 if round_nbytes == 1 << 20 else len(LAYOUTS))


def _count(patch: pytest.MonkeyPatch) -> list[int]:
    counted = [0]
    original = dist.all_to_all_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return original(*args, **kwargs)

    patch.setattr(dist, "all_to_all_single", counting)
    return counted


@pytest.mark.parametrize("round_nbytes", [192, 4096, 1 << 20])
def test_exchanged_shards_make_up_the_tensors(
    world4: World, tmp_path: Path, round_nbytes: int
) -> None:
    world4.run(save_with_small_rounds, str(tmp_path / "ckpt"), round_nbytes)
    stored = load_file(tmp_path / "ckpt" / "model.safetensors")
    for name in LAYOUTS:
        for key, full in full_tensors().items():
            assert torch.equal(stored[f"{name} {key}"], full), (name, key)
    target = {key: torch.zeros_like(tensor) for key, tensor in stored.items()}
    vescale_ckpt.load(tmp_path / "ckpt", {"model": target})


def message_when_a_file_domain_cannot_be_written(path: str) -> str:
    mesh = init_device_mesh("cpu", (4,))
    full = torch.ones(1024, 1024)
    state = {str(i): distribute_tensor(full, mesh, (Shard(1),)) for i in range(3)}

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(os, "pwrite", fail)
        with pytest.raises(CheckpointError) as caught:
            vescale_ckpt.save(path, state)
    return str(caught.value)


def test_a_rank_that_cannot_write_its_file_domain_does_not_hang_the_others(
    world4: World, tmp_path: Path
) -> None:
    messages = world4.run(message_when_a_file_domain_cannot_be_written, str(tmp_path / "ckpt"))
    assert len(set(messages)) == 1
    assert "No space left on device (on rank 2)" in messages[0]
    assert list(tmp_path.iterdir()) == []


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 7),
    cut=st.data(),
)
def test_bytes_of_a_box_are_scattered_to_where_they_lie(
    rows: int, columns: int, cut: st.DataObject
) -> None:
    first = cut.draw(st.integers(0, columns - 1))
    width = cut.draw(st.integers(1, columns - first))
    depth = cut.draw(st.integers(1, 3))
    shape = (rows, columns, depth)
    box = Box((0, first, 0), (rows, width, depth))
    whole = np.arange(rows * columns * depth * 2, dtype=np.uint8)
    ranges = byte_ranges_of(shape, box, 2, 10)
    packed = np.concatenate([whole[o - 10 : o - 10 + ranges.nbytes] for o in ranges.offsets()])
    start = cut.draw(st.integers(10, 10 + len(whole)))
    stop = cut.draw(st.integers(start, 10 + len(whole)))
    lower, upper = ranges.bytes_before(start), ranges.bytes_before(stop)
    domain = np.zeros(stop - start, np.uint8)
    ranges.scatter(packed[lower:upper], lower, domain, start)
    expected = np.zeros(len(whole) + 10, np.uint8)
    for offset in ranges.offsets():
        expected[offset : offset + ranges.nbytes] = whole[
            offset - 10 : offset - 10 + ranges.nbytes
        ]
    assert np.array_equal(domain, expected[start:stop])


def save_copies(path: str) -> int:
    """Save tensors that all ranks hold, and return how many bytes this rank wrote of them."""
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(1_000_003.0)
    written = [0]
    original = os.pwrite

    def counting(descriptor: int, data: bytes, offset: int) -> int:
        count = original(descriptor, data, offset)
        written[0] += count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", counting)
        state = {
            "copies": distribute_tensor(full, mesh, (Replicate(),)),
            "plain": full,
            "strided": full[:1_000_000].reshape(1000, 1000).t(),
        }
        vescale_ckpt.save(path, state)
    return written[0]


def test_every_rank_writes_a_share_of_what_all_ranks_hold(world4: World, tmp_path: Path) -> None:
    written = world4.run(save_copies, str(tmp_path / "ckpt"))
    assert max(written) - min(written) < 40_000
    full = torch.arange(1_000_003.0)
    target = {
        "copies": torch.zeros(1_000_003),
        "plain": torch.zeros(1_000_003),
        "strided": torch.zeros(1000, 1000),
    }
    vescale_ckpt.load(tmp_path / "ckpt", target)
    assert torch.equal(target["copies"], full)
    assert torch.equal(target["plain"], full)
    assert torch.equal(target["strided"], full[:1_000_000].reshape(1000, 1000).t())


def message_of_diverged_copies(path: str) -> str:
    mesh = init_device_mesh("cpu", (4,))
    local = torch.zeros(5)
    local[3] = float(dist.get_rank() == 2)
    tensor = DTensor.from_local(local, mesh, (Replicate(),), run_check=False)
    with pytest.raises(CheckpointError) as caught:
        vescale_ckpt.save(path, {"w": tensor})
    return str(caught.value)


def test_copies_that_have_diverged_are_refused(world4: World, tmp_path: Path) -> None:
    for message in world4.run(message_of_diverged_copies, str(tmp_path / "ckpt")):
        assert "'w'" in message
        assert "on rank 2" in message
