"""``vescale emulate``: run a script for torchrun with all of its ranks in one process."""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path
from typing import Any

import vescale

from .command import Command, CommandError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a script as torchrun does, with all ranks in this process and one at a time: the "
        "numbers are the same, and breakpoint(), pdb and prints work"
    )
    parser.add_argument(
        "-n", "--nproc-per-node", type=int, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--rank", type=int, help="show prints and breakpoints of this rank only; default: of all"
    )
    parser.add_argument("script", help="what torchrun would start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")


def _run(options: argparse.Namespace) -> int:
    script = Path(options.script)
    if not script.is_file():
        raise CommandError(f"expected a Python file, found none at {options.script!r}")
    code = compile(script.read_bytes(), str(script), "exec")
    argv, path, directory = sys.argv, list(sys.path), os.path.abspath(script.parent)
    sys.argv, sys.path[:0] = [options.script, *options.arguments], [directory]
    try:
        vescale.emulate(
            _run_as_main, options.nproc_per_node, args=(code, str(script)), rank=options.rank
        )
    except SystemExit as ended:
        return _status(ended.code)
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def _run_as_main(code: Any, file: str) -> None:
    """Run a script as the main module of one rank."""
    module = types.ModuleType("__main__")
    module.__file__ = file
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    except SystemExit as ended:
        if _status(ended.code):
            raise


def _status(code: object) -> int:
    """Return the exit status that Python makes of what ``sys.exit`` was given."""
    if isinstance(code, int):
        return code
    return 0 if code is None else 1


COMMAND = Command(
    name="emulate",
    help="run a script for torchrun with all of its ranks in one process, for a debugger",
    add_arguments=_add_arguments,
    run=_run,
)
