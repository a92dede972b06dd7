"""The main job, with a model and numbers of steps that take seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vescale import ParallelPlan

SCRIPT = Path(__file__).parents[1] / "examples" / "train_llama.py"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 32,
}


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example on the CPU with a tiny model, its results in ``directory``."""
    model = directory / "config.json"
    model.write_text(json.dumps(CONFIG), encoding="utf-8")
    return subprocess.run(
        [sys.executable, SCRIPT, "--model", model, "--output", directory, *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_two_phases_under_different_plans_equal_one_device(tmp_path: Path) -> None:
    finished = run(tmp_path, "--steps", "4")
    assert finished.returncode == 0, finished.stdout + finished.stderr

    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    # Four steps of float32; the example itself allows for many.
    assert result["largest_relative_difference"] <= 1e-5
    first, second = result["phases"]
    assert (first["world_size"], second["world_size"]) == (4, 2)
    assert [len(run["losses"]) for run in (first, second, result["one_device"])] == [2, 2, 4]
    assert second["first_step"] == 2

    for name in ("phase-1", "phase-2"):
        plan = ParallelPlan.from_json((tmp_path / name / "plan.json").read_text(encoding="utf-8"))
        assert str(plan) in finished.stdout
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "within the bound" in finished.stdout
    assert "phase 1: 4 ranks are" in finished.stdout
    for phase in ("phase 1", "phase 2"):
        (line,) = re.findall(rf"^{phase}: a step was predicted.*$", finished.stdout, re.MULTILINE)
        assert "not calibrated" in line or line.endswith("within 25%")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rank_that_fails_is_shown_with_its_traceback(tmp_path: Path) -> None:
    plan = tmp_path / "two_ranks.json"
    plan.write_text('{"pipeline_parallel": {"size": 2, "split_points": ["nowhere"]}}')
    finished = run(tmp_path, "--plan", str(plan))
    assert finished.returncode == 1
    assert "Traceback (most recent call last)" in finished.stderr
    last = finished.stderr.splitlines()[-1]
    assert last.startswith("phase 1 stopped because rank ")
    assert "'nowhere'" in last


@pytest.mark.slow
def test_an_unknown_constraint_is_refused_before_ranks_start(tmp_path: Path) -> None:
    finished = run(tmp_path, "--constraints", "tensor_parallel.sise=2")
    assert finished.returncode == 2
    assert "did you mean 'tensor_parallel.size'" in finished.stderr
    assert finished.stdout == ""
