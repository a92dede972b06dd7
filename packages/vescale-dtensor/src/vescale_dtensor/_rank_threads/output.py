"""What ranks print, and where they stop for a debugger."""

from __future__ import annotations

import io
import pdb
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .baton import Baton


@contextmanager
def output_of(baton: Baton, shown: int | None) -> Iterator[None]:
    """Show what ranks print with their number before each line, or one rank's as it is.

    Breakpoints of the ranks that are not shown are passed over.
    """
    out, err, hook, set_trace = sys.stdout, sys.stderr, sys.breakpointhook, pdb.set_trace

    def is_shown() -> bool:
        return shown is None or baton.current is None or baton.current == shown

    def of_shown(stop: Callable[..., Any]) -> Callable[..., Any]:
        def stop_if_shown(*args: Any, **kwargs: Any) -> Any:
            return stop(*args, **kwargs) if is_shown() else None

        return stop_if_shown

    sys.stdout = _OutputOfRanks(out, baton, shown)
    sys.stderr = _OutputOfRanks(err, baton, shown)
    if shown is not None:
        sys.breakpointhook, pdb.set_trace = of_shown(hook), of_shown(set_trace)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        sys.breakpointhook, pdb.set_trace = hook, set_trace


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
