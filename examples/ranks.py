"""Start the ranks of one phase of training, and say which of them failed and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Curve
from rich.console import Console

from vescale import PeerError


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What ranks are started for.

    Attributes:
        title: What people call it.
        directory: Where rank 0 leaves the plan and its curve, and every rank its failure.
        world_size: Number of ranks.
        config: Of the HuggingFace model.
        length: Tokens in a sample.
        seed: Of the model's weights.
        constraints: What the plan has to obey.
        plan: JSON of a plan to use instead of generating one.
        steps: Of the whole training: the learning rate depends on them.
        first_step: Steps done before; if there are any, the checkpoint is loaded.
        last_step: Where to save the checkpoint and stop.
        checkpoint: Its directory.
    """

    title: str
    directory: str
    world_size: int
    config: dict[str, Any]
    length: int
    seed: int
    constraints: dict[str, Any]
    plan: str | None
    steps: int
    first_step: int
    last_step: int
    checkpoint: str


def run_phase(phase: Phase, script: str) -> Curve:
    """Run ``script`` with ``--ranks-of`` as every rank of a phase, and wait for them.

    Raises:
        SystemExit: If a rank failed, after its traceback has been printed.
    """
    directory = Path(phase.directory)
    directory.mkdir(exist_ok=True)
    for stale in [*directory.glob("*.txt"), *directory.glob("*.json")]:
        stale.unlink()
    (directory / "phase.json").write_text(json.dumps(asdict(phase)), encoding="utf-8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={phase.world_size}", script, "--ranks-of", phase.directory,
    ]  # fmt: skip
    # One thread a rank: they share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (directory / "stderr.txt").open("w", encoding="utf-8") as stderr:
        finished = subprocess.run(command, env=environment, stderr=stderr, check=False)
    if finished.returncode != 0:
        _explain_failure(phase)
    return Curve.read(directory / "curve.json")


def run_rank(directory: Path, train: Callable[[Phase], Curve]) -> None:
    """Be one rank: train, and leave what rank 0 measured, or why this rank failed.

    Raises:
        SystemExit: If it failed.
    """
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if rank else sys.stdout):
            phase = Phase(**json.loads((directory / "phase.json").read_text(encoding="utf-8")))
            curve = train(phase)
    except Exception as error:
        # Who waited for the rank that failed fails too, but is not what went wrong.
        kind = "waited" if isinstance(error, PeerError) else "failed"
        (directory / f"{kind}-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(1)
    if rank == 0:
        curve.write(directory / "curve.json")
    dist.destroy_process_group()


def _explain_failure(phase: Phase) -> None:
    """Print what is known, the first failure if there are several, and exit."""
    Console().show_cursor()  # the live display may have been killed
    directory = Path(phase.directory)
    log = directory / "stderr.txt"
    failed = sorted(directory.glob("failed-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if failed:
        report = failed[0].read_text(encoding="utf-8").strip()
        who, why = failed[0].stem.replace("failed-", "rank "), report.splitlines()[-1]
    else:
        report = "\n".join(log.read_text(encoding="utf-8").splitlines()[-40:])
        who, why = "a rank", f"it left no traceback (killed?), see {log}"
    print(report, file=sys.stderr)
    sys.exit(f"\n{phase.title} stopped because {who} failed: {why}")
