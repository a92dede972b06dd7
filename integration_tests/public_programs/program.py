"""What there is to know about one public training script."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Constraints = Mapping[str, Any]

DP: Constraints = {"data_parallel.size": 2}
ZERO3: Constraints = {"data_parallel.size": 2, "data_parallel.zero_stage": 3}
TP: Constraints = {"tensor_parallel.size": 2}
PP: Constraints = {"pipeline_parallel.size": 2}


@dataclass(frozen=True)
class Edit:
    """Lines that a person writes at a line of a script.

    Attributes:
        anchor: The line, or lines in a row, without their indentation. They occur once.
        lines: What is written, indented relative to the anchor.
        where: Before or after the anchor, or instead of it.
        file: The path in the repository, if it is not the script's.
    """

    anchor: str
    lines: str
    where: Literal["before", "after", "instead"]
    file: str = ""

    @property
    def count(self) -> int:
        """Number of lines that are written; a line that only goes counts, too."""
        return len(self.lines.splitlines()) or 1

    def made_in(self, source: str) -> str:
        """Return ``source`` with the edit.

        Raises:
            ValueError: If the anchor does not occur exactly once.
        """
        given = source.splitlines()
        anchor = [line.strip() for line in self.anchor.splitlines()]
        stripped = [line.strip() for line in given]
        starts = [
            index for index in range(len(given)) if stripped[index : index + len(anchor)] == anchor
        ]
        if len(starts) != 1:
            raise ValueError(f"expected {self.anchor!r} once, found it {len(starts)} times")
        [start] = starts
        end = start + len(anchor)
        indent = given[start][: len(given[start]) - len(given[start].lstrip())]
        written = textwrap.indent(self.lines, indent).splitlines()
        kept = given[start:end]
        match self.where:
            case "before":
                written = [*written, *kept]
            case "after":
                written = [*kept, *written]
            case "instead":
                pass
        return "\n".join([*given[:start], *written, *given[end:], ""])

    def shown(self) -> str:
        """Return the edit as the lines of a diff."""
        sign = "-" if self.where == "instead" else " "
        anchor = textwrap.indent(self.anchor, f"{sign} ")
        written = textwrap.indent(self.lines, "+ ")
        both = (written, anchor) if self.where == "before" else (anchor, written)
        return "\n".join(part for part in both if part)


def before(anchor: str, *lines: str, file: str = "") -> Edit:
    """Write lines before a line."""
    return Edit(anchor, "\n".join(lines), "before", file)


def after(anchor: str, *lines: str, file: str = "") -> Edit:
    """Write lines after a line."""
    return Edit(anchor, "\n".join(lines), "after", file)


def instead(anchor: str, *lines: str, file: str = "") -> Edit:
    """Write lines instead of a line."""
    return Edit(anchor, "\n".join(lines), "instead", file)


@dataclass(frozen=True)
class Swap:
    """Text of a script that is replaced wherever it occurs, on one device too.

    Attributes:
        found: The text.
        becomes: What stands there then.
        file: The path in the repository, if it is not the script's.
    """

    found: str
    becomes: str
    file: str = ""

    def made_in(self, source: str) -> str:
        """Return ``source`` with the text replaced.

        Raises:
            ValueError: If it does not occur.
        """
        if self.found not in source:
            raise ValueError(f"expected {self.found!r}, which does not occur")
        return source.replace(self.found, self.becomes)


def apply(changes: Sequence[Edit | Swap], checkout: Path, script: str) -> None:
    """Change a script, and what it imports, in place.

    Raises:
        ValueError: If the text that a change goes by is not there.
    """
    for change in changes:
        path = checkout / (change.file or script)
        try:
            changed = change.made_in(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        path.write_text(changed, encoding="utf-8")


def nothing(directory: Path) -> None:
    """Prepare nothing."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training script of a public repository.

    Attributes:
        repository: ``owner/name`` on GitHub.
        commit: What was read and edited.
        script: The path of the script in it.
        edits: The lines that it needs to run under a plan, which is made with ``CONSTRAINTS``.
        argv: Its arguments, which make it small.
        smaller: What makes it small or lets it run offline where arguments do not.
        undrawn: What turns its dropout off where a plan has micro-batches: what these draw, one
            after the other, a device that takes the batch at once does not.
        paths: Folders of the repository that Python imports from, besides the script's.
        stubs: Modules that are replaced by nothing: loggers, plots.
        requires: Distributions to install, besides torch and numpy.
        prepare: Writes the data into the folder of the script, in which it is run.
        environment: Variables of the processes.
        plans: Constraints of the plans it is run under.
        float32: Whether it computes in float32 whatever the default dtype is.
        local_losses: Whether it computes its loss outside of the model, from outputs, so that
            each data-parallel rank has that of its own rows; the mean over ranks is compared.
        note: What a reader has to know beside the table.
    """

    repository: str
    commit: str
    script: str
    edits: tuple[Edit, ...]
    argv: tuple[str, ...] = ()
    smaller: tuple[Swap, ...] = ()
    undrawn: tuple[Swap, ...] = ()
    paths: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = nothing
    environment: Mapping[str, str] | None = None
    plans: tuple[Constraints, ...]
    float32: bool = False
    local_losses: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.repository}/{self.script}"

    @property
    def folder(self) -> str:
        """The folder of its clone."""
        return self.repository.replace("/", "+")

    @property
    def lines(self) -> int:
        """Number of lines that a person writes."""
        return sum(edit.count for edit in self.edits)


def named(constraints: Constraints) -> str:
    """Return the plan that constraints ask for as the table names it."""
    return ", ".join(f"{key} {value}" for key, value in constraints.items())
