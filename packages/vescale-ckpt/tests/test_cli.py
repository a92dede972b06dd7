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
    assert cli.main(["inspect", str(tmp_path)]) == 2
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


def other(path: Path, **changes: object) -> Path:
    weight = torch.arange(600_000.0).reshape(600, 1000)
    state = {"model": {"a": weight, "b": weight}, "step": 5, "text": {"x": "y" * 200, "z": (1,)}}
    vescale_ckpt.save(path, {**state, **changes})
    return path


def test_diff_says_nothing_of_equal_checkpoints(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diff", str(checkpoint), str(other(tmp_path / "other"))]) == 0
    assert capsys.readouterr().out == ""


def test_diff_names_what_is_not_the_same(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = torch.arange(600_000.0).reshape(600, 1000)
    weight[3, 4] += 0.5
    weight[500] -= 2
    changes = {"model": {"a": weight, "c": torch.ones(2)}, "step": 6, "more": [True]}
    assert cli.main(["diff", str(checkpoint), str(other(tmp_path / "other", **changes))]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "more.0: nothing | true",
        "step: 5 | 6",
        "model.a: F32 600x1000, 1001 elements differ by up to 2",
        "model.b: F32 600x1000 | nothing",
        "model.c: nothing | F32 2",
    ]


def test_diff_tells_bits_apart_that_compare_as_equal(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "a", {"w": torch.tensor([0.0, float("nan")])})
    vescale_ckpt.save(tmp_path / "b", {"w": torch.tensor([-0.0, float("nan")])})
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    vescale_ckpt.save(tmp_path / "c", {"w": torch.tensor([0.0, float("nan")])})
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float8_e5m2, torch.int16])
def test_diff_counts_elements_of_any_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    vescale_ckpt.save(tmp_path / "a", {"w": torch.tensor([0, 1, 0, 1]).to(dtype)})
    vescale_ckpt.save(tmp_path / "b", {"w": torch.tensor([0, 0, 1, 1]).to(dtype)})
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert " 4, 2 elements differ" in capsys.readouterr().out


def test_a_checkpoint_survives_every_conversion(checkpoint: Path, tmp_path: Path) -> None:
    for source, target in [("ckpt", "dcp"), ("dcp", "vescale"), ("vescale", "hf"), ("dcp", "hf")]:
        path = tmp_path / f"{source}-{target}"
        assert cli.main(["convert", str(tmp_path / source), str(path), "--to", target]) == 0
        again = tmp_path / target
        path.rename(again if not again.exists() else path)
    assert cli.main(["diff", str(checkpoint), str(tmp_path / "vescale")]) == 0
    assert cli.main(["diff", str(checkpoint), str(tmp_path / "dcp")]) == 0
    assert cli.main(["diff", str(tmp_path / "hf"), str(tmp_path / "dcp-hf")]) == 0
    for name, to in [("back", "vescale"), ("on", "dcp")]:
        arguments = ["convert", str(tmp_path / "hf"), str(tmp_path / name), "--to", to]
        assert cli.main([*arguments, "--key", "net"]) == 0
    assert cli.main(["diff", str(tmp_path / "back"), str(tmp_path / "on")]) == 0
    given = {"net": {"a": torch.zeros(600, 1000), "b": torch.zeros(600, 1000)}}
    vescale_ckpt.load(tmp_path / "back", given)
    assert torch.equal(given["net"]["b"], torch.arange(600_000.0).reshape(600, 1000))


def test_convert_refuses_what_it_would_have_to_ignore(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "target")
    for to, option, value in [
        ("dcp", "--max-file-nbytes", "5"),
        ("vescale", "--dtype", "float16"),
    ]:
        arguments = ["convert", str(checkpoint), target, "--to", to, option, value]
        assert cli.main(arguments) == 2
    assert cli.main(["convert", str(tmp_path), target, "--to", "hf"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_reshard_writes_files_of_another_length(checkpoint: Path, tmp_path: Path) -> None:
    vescale_ckpt.save(checkpoint, {"model": {str(i): torch.ones(100) for i in range(3)}})
    target = tmp_path / "small"
    assert cli.main(["reshard", str(checkpoint), str(target), "--max-file-nbytes", "500"]) == 0
    assert len(list(target.glob("*.safetensors"))) == 3
    assert cli.main(["verify", str(target)]) == 0
    assert cli.main(["diff", str(checkpoint), str(target)]) == 0


def test_gc_keeps_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 10):
        other(tmp_path / f"step-{number}")
    assert cli.main(["gc", str(tmp_path), "--keep", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would delete {tmp_path / 'step-1'}\n"
    assert cli.main(["gc", str(tmp_path), "--keep", "1", "--thorough"]) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-10"]
    assert cli.main(["gc", str(tmp_path), "--keep", "0"]) == 2
