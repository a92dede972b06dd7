"""What a rank reads goes straight to where it belongs, from the page cache or past it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CorruptCheckpointError
from vescale_ckpt._io import file_handles
from vescale_ckpt._store.reader import CheckpointReader

IN_CACHE = pytest.mark.parametrize("in_cache", [True, False], ids=["page cache", "past it"])
BLOCK_NBYTES = 1 << 20


def tensors() -> dict[str, torch.Tensor]:
    """Return large ones, many small ones, and odd lengths between them."""
    generator = torch.Generator().manual_seed(2)
    large = {f"large.{i}": torch.randn(700 + i, 999, generator=generator) for i in range(4)}
    small = {f"small.{i}": torch.randn(i + 1, generator=generator) for i in range(60)}
    halves = {f"half.{i}": torch.randn(3, 333, generator=generator).half() for i in range(5)}
    return {**large, **small, **halves, "bytes": torch.arange(255, dtype=torch.uint8)}


def pretend(patch: pytest.MonkeyPatch, *, in_cache: bool) -> None:
    patch.setattr(CheckpointReader, "is_cached", lambda self, file, start, stop: in_cache)


@IN_CACHE
def test_both_ways_fill_the_same_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_cache: bool
) -> None:
    state = tensors()
    vescale_ckpt.save(tmp_path / "ckpt", {"model": state})
    target: dict[str, Any] = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    # Through a scratch: not contiguous, another dtype, only a part.
    target["large.1"] = torch.zeros(999, 701).t()
    target["large.2"] = torch.zeros(702, 999, dtype=torch.float64)
    del target["large.3"], target["small.7"]
    pretend(monkeypatch, in_cache=in_cache)
    with pytest.warns(UserWarning, match=r"only in the checkpoint, not loaded: model.large.3"):
        vescale_ckpt.load(tmp_path / "ckpt", {"model": target}, strict=False, cast=True)
    for key, tensor in target.items():
        assert torch.equal(tensor, state[key].to(tensor.dtype)), key


def test_bytes_in_the_page_cache_are_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tensors()
    vescale_ckpt.save(tmp_path / "ckpt", {"model": state})
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    memory = {tensor.data_ptr(): tensor.nbytes for tensor in target.values()}
    straight = [0]
    original = CheckpointReader.read_into

    def read_into(self: CheckpointReader, file: str, start: int, views: Sequence[Any]) -> None:
        for view in views:
            at = view.ctypes.data
            if any(base <= at < base + nbytes for base, nbytes in memory.items()):
                straight[0] += len(view)
        original(self, file, start, views)

    pretend(monkeypatch, in_cache=True)
    monkeypatch.setattr(CheckpointReader, "read_into", read_into)
    vescale_ckpt.load(tmp_path / "ckpt", {"model": target})
    # All but the block with the many small ones.
    assert straight[0] >= sum(memory.values()) - 2 * BLOCK_NBYTES


@IN_CACHE
def test_a_flipped_bit_in_any_block_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_cache: bool
) -> None:
    state = tensors()
    vescale_ckpt.save(tmp_path / "ckpt", {"model": state})
    pretend(monkeypatch, in_cache=in_cache)
    path = tmp_path / "ckpt" / "model.safetensors"
    content = np.fromfile(path, np.uint8)
    # Gaps included: before the first tensor and between tensors.
    for block in range(0, len(content), BLOCK_NBYTES):
        place = min(block + 4097, len(content) - 1)
        content[place] ^= 4
        content.tofile(path)
        with pytest.raises(CorruptCheckpointError, match=f"bytes {block} to"):
            vescale_ckpt.load(tmp_path / "ckpt", {"model": tensors()})
        content[place] ^= 4
    content.tofile(path)
    vescale_ckpt.load(tmp_path / "ckpt", {"model": tensors()})


def places_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Load and return where it was asked whether the page cache holds something."""
    places: list[int] = []
    original = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            places.append(offset)
        return original(descriptor, buffers, offset, flags)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        patch.setattr(
            file_handles,
            "open_direct",
            lambda name, flags, folder: os.open(name, flags, dir_fd=folder),
        )
        vescale_ckpt.load(path, {"model": tensors()})
    return places


def test_a_later_load_asks_the_page_cache_at_other_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"model": tensors()})
    first = places_asked_for(tmp_path / "ckpt", monkeypatch)
    second = places_asked_for(tmp_path / "ckpt", monkeypatch)
    assert len(first) == len(second) > 1
    assert first != second
