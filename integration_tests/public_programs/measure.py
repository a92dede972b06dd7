"""Run a program in copies of its clone, and compare what it computes under plans."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .program import Constraints, Program, apply, named

NUM_RANKS = 2
_LIMIT_SECONDS = 600
_RUN = Path(__file__).with_name("run.py")
_ROOT = Path(__file__).parents[2]
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*Error: .*)$", re.MULTILINE)

Records = list[dict[str, Any]]


class FailedError(Exception):
    """A script did not come to the last loss; the text is the end of what it printed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one plan gave.

    Attributes:
        loss: Largest difference of a loss from one device's, relative to the largest of these.
        gradient: The same of the norms of gradients; None if there are none to compare.
        warnings: What veScale warned of.
        error: The text of the error that ended it.
    """

    loss: float | None = None
    gradient: float | None = None
    warnings: tuple[str, ...] = ()
    error: str = ""


@contextmanager
def _prepared(program: Program, clone: Path, *, edited: bool, drawn: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        checkout = Path(place, "checkout")
        shutil.copytree(clone, checkout, ignore=shutil.ignore_patterns(".git"))
        program.prepare((checkout / program.script).parent)
        changes = [*program.smaller, *(program.edits if edited else ())]
        changes += () if drawn else program.undrawn
        apply(changes, checkout, program.script)
        yield checkout


def records(
    program: Program,
    clone: Path,
    constraints: Constraints | None,
    *,
    programs: str,
    drawn: bool = True,
) -> Records:
    """Return what every rank of one run wrote down.

    Args:
        program: What is run.
        clone: Its repository, which is copied.
        constraints: Of the plan; None for the script as it is, on one device.
        programs: The module whose ``PROGRAMS`` it is one of.
        drawn: Whether its dropout is left as it is.

    Raises:
        FailedError: If it fails.
    """
    count = 1 if constraints is None else NUM_RANKS
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    with _prepared(program, clone, edited=constraints is not None, drawn=drawn) as checkout:
        command = [sys.executable, *(launcher if constraints is not None else [])]
        command += [str(_RUN), f"{programs}:{program.name}", str(checkout)]
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        ended = subprocess.run(
            [*command, json.dumps(constraints)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            | dict(program.environment or {}),
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        files = [checkout / f"record.{rank}.json" for rank in range(count)]
        if ended.returncode or not all(file.exists() for file in files):
            raise FailedError(f"{ended.stdout[-3000:]}\n{ended.stderr[-9000:]}")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _difference(expected: Sequence[float], found: Sequence[Sequence[float]]) -> float | None:
    """Return the largest difference over the largest expected value, None if there is none."""
    if not expected or any(len(rank) != len(expected) for rank in found):
        return None
    scale = max(map(abs, expected)) or 1.0
    pairs = [pair for rank in found for pair in zip(rank, expected, strict=True)]
    return max(abs(mine - theirs) for mine, theirs in pairs) / scale


def compared(program: Program, expected: Records, found: Records) -> Outcome:
    """Return how far a run is from one device's."""
    [one] = expected
    losses = [rank["losses"] for rank in found]
    if program.local_losses:
        losses = [[sum(each) / len(losses) for each in zip(*losses, strict=True)]]
    return Outcome(
        loss=_difference(one["losses"], losses),
        gradient=_difference(one["norms"], [rank["norms"] for rank in found]),
        warnings=tuple(sorted({text for rank in found for text in rank["warnings"]})),
    )


def reason_in(printed: str) -> str:
    """Return the error that ended a rank: the first line of the first one that is printed."""
    reasons = _ERROR.findall(printed)
    return reasons[0] if reasons else "no error was printed"


def measure(program: Program, clone: Path, *, programs: str) -> dict[str, Outcome]:
    """Return the outcome of each plan of a program, by the plan's name.

    Raises:
        FailedError: If it fails on one device, as it is.
    """
    one_device = {True: records(program, clone, None, programs=programs)}
    if program.undrawn:
        one_device[False] = records(program, clone, None, programs=programs, drawn=False)
    outcomes: dict[str, Outcome] = {}
    for constraints in program.plans:
        drawn = not (program.undrawn and "pipeline_parallel.size" in constraints)
        try:
            found = records(program, clone, constraints, programs=programs, drawn=drawn)
            outcomes[named(constraints)] = compared(program, one_device[drawn], found)
        except FailedError as error:
            print(error, file=sys.stderr)
            outcomes[named(constraints)] = Outcome(error=reason_in(str(error)))
    return outcomes
