"""What a subcommand is, and what it raises for people to read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


class CommandError(Exception):
    """What went wrong in words for the person at the terminal, the remedy included."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand of ``vescale``.

    Attributes:
        name: What is typed.
        help: One line for ``vescale --help``.
        add_arguments: Adds its arguments, or subcommands with a ``run`` of their own.
        run: Returns the exit status. None if subcommands set ``run`` on the parsed arguments.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None = None
