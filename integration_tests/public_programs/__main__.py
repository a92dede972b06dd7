"""Run public training scripts under plans and write the page about them.

    python -m integration_tests.public_programs --clone CLONES | sh
    python -m integration_tests.public_programs CLONES

The first prints the commands that clone each repository at the commit that was read; the second
runs the scripts, writes what came out to ``outcomes.json`` beside this file, and the page of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from .measure import Outcome, measure
from .page import OUTCOMES, PAGE, clone_commands, outcomes_kept, page
from .program import Program
from .programs import PROGRAMS


def _check_commit(program: Program, clone: Path) -> None:
    if not clone.is_dir():
        raise SystemExit(f"expected a clone at {clone}; --clone prints the command for it")
    git = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    head = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    if head != program.commit:
        raise SystemExit(f"expected {clone} at {program.commit}, it is at {head}")


def _keep(program: Program, measured: Mapping[str, Outcome]) -> None:
    """Write what came out beside what came out of others, in the order of the list."""
    found = {plan: asdict(each) for plan, each in measured.items()}
    print(program.name, json.dumps(found, indent=1), file=sys.stderr)
    outcomes = {**outcomes_kept(), program.name: found}
    kept = {each.name: outcomes[each.name] for each in PROGRAMS if each.name in outcomes}
    OUTCOMES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and write, or print the commands that clone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clones", type=Path, help="folder of the clones")
    parser.add_argument("--clone", action="store_true", help="print the commands that clone")
    parser.add_argument("--only", default="", help="measure programs whose names contain this")
    options = parser.parse_args()
    if options.clone:
        print("\n".join(clone_commands(PROGRAMS, options.clones)))
        return
    for program in PROGRAMS:
        if options.only in program.name:
            clone = options.clones / program.folder
            _check_commit(program, clone)
            _keep(program, measure(program, clone, programs=f"{__package__}.programs"))
    PAGE.write_text(page(PROGRAMS, outcomes_kept()), encoding="utf-8")


if __name__ == "__main__":
    main()
