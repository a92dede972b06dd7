"""What ranks print, and where they stop for a debugger."""

from __future__ import annotations

import io
import pdb  # noqa: T100 whose breakpoints are passed over
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from .baton import Baton


@contextmanager
def output_of(baton: Baton, shown: int | None) -> Iterator[None]:
    """Show what ranks print with their number before each line, or one rank's as it is.

    Breakpoints of the ranks that are not shown are passed over, see :class:`Breakpoints`.
    """
    out, err, hook, set_trace = sys.stdout, sys.stderr, sys.breakpointhook, pdb.set_trace
    sys.stdout = _OutputOfRanks(out, baton, shown)
    sys.stderr = _OutputOfRanks(err, baton, shown)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        sys.breakpointhook, pdb.set_trace = hook, set_trace


class Breakpoints:
    """Where a debugger stops: set while the rank runs, since a debugger looks at who calls it.

    Args:
        shown: The rank whose breakpoints count; None for all.
    """

    def __init__(self, shown: int | None) -> None:
        self._shown = shown
        self._stops = sys.breakpointhook, pdb.set_trace

    def stop_in(self, rank: int | None) -> None:
        """Have breakpoints of the rank that runs from now on stop, or be passed over."""
        if self._shown is not None:
            is_shown = rank is None or rank == self._shown
            stops = self._stops if is_shown else (_pass_over, _pass_over)
            sys.breakpointhook, pdb.set_trace = stops


def _pass_over(*args: object, **kwargs: object) -> None:
    """Do not stop."""


class _OutputOfRanks(io.TextIOBase):
    """Writes what the rank that runs prints. A line is of one rank."""

    def __init__(self, out: TextIO, baton: Baton, shown: int | None) -> None:
        super().__init__()
        self._out, self._baton, self._shown = out, baton, shown
        self._line_of: int | None = None

    def write(self, text: str) -> int:
        """Write text, of the rank that runs."""
        rank = self._baton.current
        if rank is None or self._shown is not None:
            if rank is None or rank == self._shown:
                self._out.write(text)
            return len(text)
        for line in text.splitlines(keepends=True):
            if self._line_of != rank:
                self._out.write(f"{'' if self._line_of is None else chr(10)}[rank {rank}] ")
            self._out.write(line)
            self._line_of = None if line.endswith("\n") else rank
        return len(text)

    def flush(self) -> None:
        """Have what was written shown."""
        self._out.flush()

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        return self._out.isatty()

    def fileno(self) -> int:
        """Return the number of the file that is written."""
        return self._out.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]: a property in typeshed's TextIO
        """How text becomes bytes."""
        return self._out.encoding

    def writable(self) -> bool:
        """Whether it can be written: always."""
        return True
