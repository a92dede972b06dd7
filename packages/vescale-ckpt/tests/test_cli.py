from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import cli


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weight = torch.arange(600_000.0).reshape(600, 1000)
    state = {"model": {"a": weight, "b": weight}, "step": 5, "text": {"x": "y" * 200, "z": (1,)}}
    vescale_ckpt.save(tmp_path / "ckpt", state)
    return tmp_path / "ckpt"


def test_inspect_shows_files_tensors_and_values(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(checkpoint)]) == 0
    output = capsys.readouterr().out
    assert "2.404 MB  model.safetensors" in output
    assert "  a: F32 600x1000, 2.4 MB" in output
    assert "b: F32 600x1000, 2.4 MB, the same as model.a" in output
    assert "step = 5" in output


def test_inspect_says_that_there_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "vescale.json" in capsys.readouterr().err


def test_verify_finds_every_damaged_block(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(checkpoint)]) == 0
    with open(checkpoint / "model.safetensors", "r+b") as stream:
        for position in (5000, 2_000_000):
            stream.seek(position)
            stream.write(b"\xff")
    assert cli.main(["verify", str(checkpoint), "--threads", "2"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "bytes 0 to 1048576" in lines[0]
    assert "'model.a'" in lines[1]


def test_verify_says_that_there_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
