"""The command ``vescale``: which subcommands there are, and how their errors are shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

import vescale_ckpt.cli
from vescale import __version__

from . import completion, doctor, emulate, plan, verify
from .command import Command, CommandError

# A further subcommand is a further entry.
COMMANDS = (
    plan.COMMAND,
    doctor.COMMAND,
    emulate.COMMAND,
    verify.COMMAND,
    Command(
        name="ckpt",
        help="look at checkpoints, check, compare, copy and delete them",
        add_arguments=vescale_ckpt.cli.add_commands,
    ),
    completion.COMMAND,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for what could not be done."""
    options = make_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if options.debug:
            raise
        # An error that was not written for people says more with the name of its class.
        is_worded = isinstance(error, CommandError | ValueError | OSError)
        text = " ".join(str(error).split())
        shown = text if is_worded else f"{type(error).__name__}: {text} (--debug says where)"
        print(f"vescale: error: {shown}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="vescale", description="Plan and look after nD-parallel PyTorch training."
    )
    version = f"vescale {__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    _add_debug(parser, default=False)
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(command.name, help=command.help, description=command.help)
        _add_debug(added, default=argparse.SUPPRESS)
        command.add_arguments(added)
        if command.run is not None:
            added.set_defaults(run=command.run)
    return parser


def _add_debug(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )
