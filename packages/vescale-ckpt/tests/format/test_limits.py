"""What is saved can be read: nothing becomes longer than what a reader takes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._format import file_layout, manifest


def test_a_manifest_that_no_load_would_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"ids": [1], "w": torch.ones(2)})
    monkeypatch.setattr(manifest, "MAX_MANIFEST_NBYTES", 2000)
    with pytest.raises(CheckpointError, match="store long lists of numbers as tensors"):
        vescale_ckpt.save(tmp_path / "ckpt", {"ids": list(range(1000)), "w": torch.ones(2)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]
    loaded = vescale_ckpt.load(tmp_path / "ckpt", {"ids": [], "w": torch.zeros(2)})
    assert loaded["ids"] == [1]


def test_tensors_that_one_header_cannot_describe_get_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_layout, "MAX_HEADER_NBYTES", 3000)
    net = {f"block.{index}.weight": torch.full((3,), float(index)) for index in range(40)}
    vescale_ckpt.save(tmp_path / "ckpt", {"net": net})
    files = sorted((tmp_path / "ckpt").glob("net-*.safetensors"))
    assert len(files) > 2
    for file in files:
        content = file.read_bytes()
        (nbytes,) = struct.unpack("<Q", content[:8])
        assert len(content[8 : 8 + nbytes].rstrip()) <= 3000
    target = {name: torch.zeros(3) for name in net}
    vescale_ckpt.load(tmp_path / "ckpt", {"net": target})
    assert all(torch.equal(target[name], tensor) for name, tensor in net.items())
