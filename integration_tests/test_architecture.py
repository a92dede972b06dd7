"""The house rules of the sources, and the picture of them in the documentation."""

from __future__ import annotations

import ast
import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from docs import architecture

PACKAGES = tuple(architecture.package_sources())

MAX_ENTRIES, MAX_FILE_LINES, MAX_FUNCTION_LINES = 18, 400, 60
# One file for each family of operators.
LONG_FOLDERS = {Path("vescale_dtensor/_rules")}

# The word of the field for each of them stands beside it.
PRIVATE_WORDS = {
    "addend": "partial",
    "meetings": "coupled rows",
    "foreseen": "predicted",
    "rehears": "dry run",
    "slab": "two-phase write or read",
    "stand[-_]in": "placeholder",
    "tiny[ _]?twin": "scaled-down model",
}

of_packages = pytest.mark.parametrize("package", PACKAGES)


def _folder(package: str) -> Path:
    return architecture.package_sources()[package]


def _files(package: str) -> list[Path]:
    return sorted(_folder(package).rglob("*.py"))


@of_packages
def test_a_folder_is_short_enough_to_be_read(package: str) -> None:
    folder = _folder(package)
    for each in {file.parent for file in _files(package)}:
        if each.relative_to(folder.parent) in LONG_FOLDERS:
            continue
        # Not with what Python writes, and a file that is empty for type checkers.
        others = ("__pycache__", "py.typed")
        entries = sorted(child.name for child in each.iterdir() if child.name not in others)
        assert len(entries) <= MAX_ENTRIES, (each, entries)


@of_packages
def test_files_are_short(package: str) -> None:
    for file in _files(package):
        num_lines = len(file.read_text(encoding="utf-8").splitlines())
        assert num_lines <= MAX_FILE_LINES, (file, num_lines)


@of_packages
def test_functions_fit_a_screen(package: str) -> None:
    for file in _files(package):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = _num_lines(node)
                assert num_lines <= MAX_FUNCTION_LINES, (file, node.name, num_lines)


def _num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function; a docstring may say as much as there is to say."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or 0) - docstring.lineno + 1)


@of_packages
def test_every_room_says_what_it_is_for(package: str) -> None:
    folder = _folder(package)
    for room in {file.parent for file in _files(package)}:
        init = room / "__init__.py"
        assert init.exists(), init
        assert ast.get_docstring(ast.parse(init.read_text("utf-8"))), init.relative_to(folder)


@of_packages
def test_sources_speak_in_the_words_of_the_field(package: str) -> None:
    words = "|".join(PRIVATE_WORDS)
    for file in _files(package):
        found = re.search(rf"(?<![a-z])({words})", file.read_text("utf-8"), re.IGNORECASE)
        assert found is None, (file, found.group(), PRIVATE_WORDS)


@pytest.mark.slow
def test_the_picture_shows_the_sources_as_they_are() -> None:
    drawn = architecture.PICTURE.read_text("utf-8")
    listed = architecture.PAGE.read_text("utf-8")
    outdated = "run `python docs/architecture.py`: rooms or their imports have changed"
    assert drawn == architecture.picture(), outdated
    assert listed == architecture.page(), outdated


@pytest.mark.slow
def test_boxes_of_the_picture_lie_apart_and_hold_their_names() -> None:
    for frame in architecture.frames():
        at = frame.boxes(frame.width)
        for row in frame.rows:
            for one, other in pairwise(sorted(row, key=lambda cell: at[cell][0])):
                space = at[other][0] - at[one][0] - (one.width + other.width) / 2
                assert space >= 8, (frame.title, one.label, other.label)
            for cell in row:
                assert cell.width >= 8.2 * len(cell.label)
                middle, top = at[cell]
                assert cell.width / 2 <= middle <= frame.width - cell.width / 2
                assert 0 < top < frame.height - 28
        assert len({at[row[0]][1] for row in frame.rows}) == len(frame.rows)


def test_arrows_of_the_picture_lead_down_to_everything_that_is_imported() -> None:
    graph = architecture.rooms(_folder("vescale_deferred"))
    few = architecture.reduced(graph)
    assert graph["_recording/"] == {"_evaluation/", "_tape/"}
    assert few["_recording/"] == {"_evaluation/"}
    row_of = {label: row for row, each in enumerate(architecture.layers(graph)) for label in each}
    for label, targets in graph.items():
        assert all(row_of[target] < row_of[label] for target in targets)
    for one, other in combinations(graph, 2):
        assert _reaches(few, one, other) == _reaches(graph, one, other)


def _reaches(graph: architecture.Graph, begin: str, end: str) -> bool:
    return end in graph[begin] or any(_reaches(graph, each, end) for each in graph[begin])
