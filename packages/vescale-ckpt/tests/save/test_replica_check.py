"""Copies that every rank holds are checksummed by two ranks, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import vescale_ckpt
from vescale_ckpt import MismatchError
from vescale_ckpt._format import crc32
from vescale_ckpt._save import consistency
from vescale_dtensor import distribute_tensor
from vescale_testing import World

SHAPES = {"large": (3000, 700), "larger": (5000, 500), "odd": (700_001,), "small": (100,)}


def state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {
        key: torch.arange(float(torch.Size(shape).numel())).view(shape)
        for key, shape in SHAPES.items()
    }
    return {
        "plain": full,
        "copies": {key: distribute_tensor(t, mesh, (Replicate(),)) for key, t in full.items()},
    }


def nbytes_checksummed(path: str) -> int:
    total = [0]

    def counted(function: Any) -> Any:
        def count(piece: Any, *args: int) -> int:
            total[0] += len(piece)
            return function(piece, *args)

        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crc32, "_crc32", counted(crc32._crc32))  # pyright: ignore[reportPrivateUsage]
        patch.setattr(consistency, "crc32", counted(consistency.crc32))  # pyright: ignore[reportPrivateImportUsage]
        vescale_ckpt.save(path, state())
    return total[0]


@pytest.mark.parametrize("size", [2, 4])
def test_each_byte_of_a_copy_is_checksummed_by_two_ranks(
    world2: World, world4: World, tmp_path: Path, size: int
) -> None:
    path = tmp_path / "ckpt"
    counts = {2: world2, 4: world4}[size].run(nbytes_checksummed, str(path))
    stored = sum(torch.Size(shape).numel() * 4 for shape in SHAPES.values()) * 2
    # Blocks of zeros, for the inversions, and the manifest come on top.
    assert stored <= sum(counts) <= 2 * stored + size * (4 << 20)
    given = {
        top: {key: torch.zeros(shape) for key, shape in SHAPES.items()}
        for top in ("plain", "copies")
    }
    vescale_ckpt.load(path, given)
    for key, shape in SHAPES.items():
        expected = torch.arange(float(torch.Size(shape).numel())).view(shape)
        assert torch.equal(given["plain"][key], expected)
        assert torch.equal(given["copies"][key], expected)


def message_with_a_difference(path: str, which: str, key: str, place: int, layout: Any) -> str:
    differing = state()
    if dist.get_rank() == 1:
        tensor = differing[which][key]
        local = tensor if which == "plain" else tensor.to_local()
        local.view(-1)[place] += 1
    with pytest.raises(MismatchError) as caught:
        vescale_ckpt.save(path, differing, layout=layout)
    return str(caught.value)


CASES = [
    ("plain", "large", 600_000, None),
    ("plain", "large", 1_200_000, None),
    ("copies", "larger", 1_249_000, None),
    ("copies", "odd", 200_000, None),
    ("plain", "small", 50, None),
    ("copies", "larger", 5, "per_rank"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_copy_that_differs_in_what_is_written_is_named_and_nothing_saved(
    world4: World, tmp_path: Path, case: tuple[str, str, int, Any]
) -> None:
    messages = world4.run(message_with_a_difference, str(tmp_path / "ckpt"), *case)
    assert len(set(messages)) == 1
    assert f"tensor '{case[0]}.{case[1]}'" in messages[0]
    assert "rank 1" in messages[0]
    assert list(tmp_path.iterdir()) == []
