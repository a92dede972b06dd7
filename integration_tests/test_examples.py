"""The programs of ``examples/`` run as they are, and learn what they are for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from integration_tests.pages import run_on_rank
from vescale_testing import World

EXAMPLES = Path(__file__).parents[1] / "examples"


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("model*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.slow
def test_minimal_resumes_on_another_number_of_ranks_as_if_nothing_had_happened(
    world2: World, tmp_path: Path
) -> None:
    path, checkpoints = str(EXAMPLES / "minimal.py"), tmp_path / "checkpoints"
    world2.run(run_on_rank, path, str(tmp_path))
    assert sorted(child.name for child in checkpoints.iterdir()) == ["epoch-2", "epoch-3"]
    expected = weights_of(checkpoints / "epoch-3")
    shutil.rmtree(checkpoints / "epoch-3")

    alone = launched(["minimal.py"], tmp_path)  # without torchrun, one device
    assert "epoch 3" in alone
    assert "epoch 2" not in alone
    resumed = weights_of(checkpoints / "epoch-3")
    assert expected.keys() == resumed.keys()
    assert len(expected) > 10
    for key, value in expected.items():
        # AdamW divides by small numbers, and one epoch is 8 steps of float32.
        torch.testing.assert_close(resumed[key], value, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.slow
def test_a_model_of_your_own_runs_on_two_ranks(world2: World, tmp_path: Path) -> None:
    world2.run(run_on_rank, str(EXAMPLES / "own_model.py"), str(tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["minimal", "own_model", "vit", "encoder_decoder"])
def test_an_example_learns_under_torchrun(name: str, tmp_path: Path) -> None:
    check_that_losses_fall(launched([f"{name}.py"], tmp_path, num_ranks=2))


@pytest.mark.nightly
def test_finetuning_reads_safetensors_into_shards(tmp_path: Path) -> None:
    launched(["finetune.py", "--make"], tmp_path)
    check_that_losses_fall(launched(["finetune.py", "pretrained"], tmp_path, num_ranks=2))


@pytest.mark.nightly
def test_adapters_are_trained_and_saved_alone(tmp_path: Path) -> None:
    check_that_losses_fall(launched(["lora.py"], tmp_path, num_ranks=2))
    saved = weights_of(tmp_path / "adapters")
    assert saved
    assert all("lora" in key for key in saved)


@pytest.mark.slow
def test_cells_of_the_notebook_run_in_order(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "tutorial.ipynb").read_text(encoding="utf-8"))
    code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert len(code) >= 5
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join(code), encoding="utf-8")
    subprocess.run([sys.executable, str(program)], cwd=tmp_path, check=True, timeout=120)


def launched(arguments: list[str], directory: Path, *, num_ranks: int = 1) -> str:
    """Return what a program of the examples printed, started as its reader does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    script, *others = arguments
    command = [sys.executable, *(launcher if num_ranks > 1 else []), str(EXAMPLES / script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *others], cwd=directory, env=environment, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_that_losses_fall(printed: str) -> None:
    losses = [float(line.rsplit(" ")[-1]) for line in printed.splitlines() if "loss" in line]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
