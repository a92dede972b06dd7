"""The pages that people read: their code blocks, links, and the names they mention.

A comment before a code block, which no reader sees, says how the block is run:

- ``<!-- ranks: 2 -->``: on two ranks. Blocks of a page with the same number of ranks run in order,
  as one module; without a mark on one rank, and with 0 in a process that is no rank.
- ``<!-- not run: reason -->``: not here.
- ``<!-- nightly -->``: at night only, when every program is started by torchrun.
- ``<!-- file: examples/minimal.py -->``: it is this file, which has a test of its own.
- ``<!-- before`` on a line, then code, then ``-->``: what a reader has already. It is run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    sorted(
        path
        for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "packages/*/README.md")
        for path in ROOT.glob(pattern)
    )
)
_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,})\s*(?P<language>[\w+-]*)(?P<rest>.*)$")
_MARK = re.compile(r"^\s*<!-- (?P<key>[a-z ]+?)(?:: (?P<value>.*?))? -->\s*$")
_INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One code block of a page.

    Attributes:
        page: Its file.
        line: Number of its first line of code, from 1.
        language: After the backticks.
        rest: What follows the language there, a title for example.
        code: Without the indentation of the block.
        marks: What comments before it say.
    """

    page: Path
    line: int
    language: str
    rest: str
    code: str
    marks: Mapping[str, str]

    @property
    def where(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def num_ranks(self) -> int:
        return int(self.marks.get("ranks", "1"))

    @property
    def file(self) -> str | None:
        """The file of the repository that the block shows, which has a test of its own."""
        return self.marks.get("file")

    @property
    def is_run(self) -> bool:
        return self.language == "python" and "not run" not in self.marks and self.file is None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        fence, mark = _FENCE.match(line), _MARK.match(line)
        if mark:
            marks[mark["key"]] = mark["value"] or ""
        elif line.strip() == "<!-- before":
            end = _index(lines, number, re.compile(r"^\s*-->\s*$"))
            yield _block(page, lines, number, end, "python", "", marks)
            number = end + 1
        elif fence:
            end = _index(lines, number, re.compile(rf"^\s*{fence['ticks']}\s*$"))
            yield _block(page, lines, number, end, fence["language"], fence["rest"], marks)
            number, marks = end + 1, {}
        elif line.strip():
            marks = {}


def _block(
    page: Path,
    lines: list[str],
    begin: int,
    end: int,
    language: str,
    rest: str,
    marks: Mapping[str, str],
) -> Block:
    code = textwrap.dedent("\n".join(lines[begin:end])) + "\n"
    return Block(
        page=page, line=begin + 1, language=language, rest=rest, code=code, marks=dict(marks)
    )


def _index(lines: list[str], begin: int, pattern: re.Pattern[str]) -> int:
    return next(number for number in range(begin, len(lines)) if pattern.match(lines[number]))


@dataclass(frozen=True, kw_only=True)
class Program:
    """The blocks of one page for one number of ranks, as one module."""

    page: Path
    num_ranks: int
    source: str

    @property
    def name(self) -> str:
        return f"{name_of(self.page)} on {self.num_ranks}"


def programs(*, nightly: bool = False) -> list[Program]:
    """Return everything that the pages let a reader run; blocks for the night if asked for."""
    found: list[Program] = []
    for page in PAGES:
        blocks = [b for b in blocks_of(page) if b.is_run and (nightly or "nightly" not in b.marks)]
        for num_ranks in sorted({block.num_ranks for block in blocks}):
            source = _as_module([b for b in blocks if b.num_ranks == num_ranks])
            found.append(Program(page=page, num_ranks=num_ranks, source=source))
    return found


def _as_module(blocks: list[Block]) -> str:
    """Return the blocks as one text in which every line has the number that it has on the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def run_on_rank(path: str, directory: str) -> None:
    """Import a module afresh from ``path``, in ``directory``, and call its main if it has one."""
    before = os.getcwd()
    os.chdir(directory)
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        with warnings.catch_warnings():
            spec.loader.exec_module(module)
            if hasattr(module, "main"):
                module.main()
    finally:
        os.chdir(before)
        sys.modules.pop(Path(path).stem, None)


def files_shown_by(page: Path) -> list[str]:
    """Return the files of the repository that the site puts into a page."""
    return _INCLUDE.findall(page.read_text(encoding="utf-8"))


def prose_of(page: Path) -> Iterator[tuple[int, str]]:
    """Return the lines outside of code blocks, with their numbers from 1."""
    lines = page.read_text(encoding="utf-8").splitlines()
    inside = ""
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if inside:
            inside = "" if line.strip() == inside else inside
        elif fence:
            inside = fence["ticks"]
        else:
            yield number, line


def anchors_of(page: Path) -> set[str]:
    """Return what a link into a page may point to."""
    titles = [line.lstrip("#").strip() for _, line in prose_of(page) if line.startswith("#")]
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    words = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in plain]
    return {re.sub(r"[-\s]+", "-", title) for title in words}
