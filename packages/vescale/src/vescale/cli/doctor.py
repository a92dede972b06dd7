"""``vescale doctor``: is this machine, and are these ranks, fit for a run?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .command import Command
from .finding import Finding
from .machine_checks import check_machine
from .rank_checks import Ranks, check_shared, joined_ranks


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Look at torch, backends, devices, memory and limits. Under torchrun it also compares the "
        "ranks and times a collective: torchrun --nproc-per-node 2 -m vescale doctor"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--shared",
        type=Path,
        metavar="DIRECTORY",
        help="where checkpoints would go: do all ranks see what each writes there?",
    )


def _run(options: argparse.Namespace) -> int:
    findings = check_machine()
    with joined_ranks() as ranks:
        if options.shared is not None:
            findings.append(check_shared(options.shared, ranks))
        if ranks is not None:
            findings = [*_of_all_ranks(findings, ranks), *ranks.compare()]
        is_first = ranks is None or ranks.rank == 0
    if is_first and options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif is_first:
        print("\n".join(lines(findings)))
    return 1 if any(finding.status == "error" for finding in findings) else 0


def _of_all_ranks(own: Sequence[Finding], ranks: Ranks) -> list[Finding]:
    """Return rank 0's findings, and what other ranks are warned of and rank 0 is not."""
    everyone = ranks.gathered(own)
    found = list(everyone[0])
    fine = {finding.name for finding in found if finding.status == "ok"}
    for rank, theirs in enumerate(everyone[1:], 1):
        worse = [f for f in theirs if f.status != "ok" and f.name in fine]
        fine -= {finding.name for finding in worse}
        found += [f.of_rank(rank) for f in worse]
    return found


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line a finding, and one more with the remedy where there is something to do."""
    width = max((len(finding.name) for finding in findings), default=0)
    said: list[str] = []
    for finding in findings:
        said.append(f"{finding.status:<5}  {finding.name:<{width}}  {finding.text}")
        if finding.remedy:
            said.append(f"{'':<5}  {'':<{width}}  -> {finding.remedy}")
    return said


COMMAND = Command(
    name="doctor",
    help="check this machine, and under torchrun the ranks, before a run",
    add_arguments=_add_arguments,
    run=_run,
)
