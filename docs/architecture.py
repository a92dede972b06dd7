"""Draw the packages and their rooms from what the sources import: ``python docs/architecture.py``.

A room is a folder of a package; where a package has none, its files are drawn. An arrow goes from
a room to one that it imports. An import that arrows already lead to is left out, so is
what any room may import. The picture changes with the rooms, not with the code inside of them.

The page ends with a list of them, and what the first sentence of their docstrings says.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from graphlib import TopologicalSorter
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
_HEADING = "## Rooms\n"

# Any room may import these; what is public comes from __init__.
_EVERYWHERE = {"__init__", "__main__", "_torch_private", "exceptions"}

Graph = Mapping[str, frozenset[str]]

# Pixels. A character of a monospaced font is 0.6 of its size wide, in some fonts a bit more.
_FONT, _CHARACTER = 13, 8.2
_BOX_HEIGHT, _PADDING, _GAP, _ROW_GAP = 28, 12, 16, 38
_LANE = 4  # a line that passes between the boxes of a row
_ROW_WIDTH = 780
_MARGIN, _TITLE_HEIGHT = 20, 34


def package_sources(root: Path = ROOT) -> dict[str, Path]:
    """Return the source folder of each package, by the name it is imported by."""
    folders = [file.parent for file in root.glob("packages/*/src/*/__init__.py")]
    return {folder.name: folder for folder in sorted(folders)}


def packages(root: Path = ROOT) -> Graph:
    """Return which package imports which."""
    sources = package_sources(root)
    found: dict[str, frozenset[str]] = {}
    for name, folder in sources.items():
        tops = {parts[0] for file in folder.rglob("*.py") for parts in _imports(file, folder)}
        found[name] = frozenset(tops & sources.keys() - {name})
    return found


def rooms(folder: Path) -> Graph:
    """Return which room of a package imports which: ``name/`` a folder, ``name.py`` a file."""
    labels = {label.partition(".")[0].rstrip("/"): label for label in _files(folder)}
    found: dict[str, set[str]] = {label: set() for label in labels.values()}
    for file in sorted(folder.rglob("*.py")):
        own = labels.get(file.relative_to(folder).with_suffix("").parts[0])
        if own is None:
            continue
        for parts in _imports(file, folder):
            if parts[0] == folder.name and len(parts) > 1 and parts[1] in labels:
                found[own].add(labels[parts[1]])
    return {label: frozenset(imported - {label}) for label, imported in found.items()}


def _files(folder: Path) -> dict[str, Path]:
    """Return the rooms of a package, and the file of each that has its docstring."""
    found: dict[str, Path] = {}
    for child in sorted(folder.iterdir()):
        if child.stem in _EVERYWHERE:
            continue
        if child.suffix == ".py":
            found[child.name] = child
        elif any(child.glob("*.py")):
            found[f"{child.name}/"] = child / "__init__.py"
    return found


@cache
def _imports(file: Path, package: Path) -> tuple[tuple[str, ...], ...]:
    """Return what a file imports, as the parts of absolute names."""
    found: list[tuple[str, ...]] = []
    here = file.relative_to(package.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            # ``from package import room`` names the room last.
            found += ((*module, alias.name) for alias in node.names)
    return tuple(found)


def reduced(graph: Graph) -> dict[str, frozenset[str]]:
    """Return ``graph`` without the edges that a longer way replaces.

    Raises:
        graphlib.CycleError: If it has a cycle.
    """
    below: dict[str, frozenset[str]] = {}
    result: dict[str, frozenset[str]] = {}
    for node in TopologicalSorter(graph).static_order():
        targets = graph[node]
        indirect = frozenset[str]().union(*(below[target] for target in targets))
        below[node] = targets | indirect
        result[node] = targets - indirect
    return result


def layers(graph: Graph) -> list[list[str]]:
    """Return rows of nodes, the bottom one first: each above all that it imports.

    A row is as low as the longest way down allows, and not much wider than ``_ROW_WIDTH``.
    """
    heights: dict[str, int] = {}
    for node in TopologicalSorter(graph).static_order():
        heights[node] = max((heights[target] + 1 for target in graph[node]), default=0)
    rows: list[list[str]] = []
    row_of: dict[str, int] = {}
    for node in sorted(graph, key=lambda each: (heights[each], each)):
        row = max((row_of[target] + 1 for target in graph[node]), default=0)
        while row < len(rows) and _width_of([*rows[row], node]) > _ROW_WIDTH:
            row += 1
        if row == len(rows):
            rows.append([])
        rows[row].append(node)
        row_of[node] = row
    return rows


def _box_width(label: str) -> int:
    return round(len(label) * _CHARACTER) + 2 * _PADDING


def _width_of(labels: Sequence[str]) -> int:
    return sum(map(_box_width, labels)) + _GAP * (len(labels) - 1)


@dataclass(eq=False)
class Cell:
    """A place in a row: a box, or a lane in which a long arrow passes the row.

    Attributes:
        label: What is written in the box, empty for a lane.
        row: Counted from the bottom.
        below: Where its arrows go on, one row down.
        x: Its middle.
    """

    label: str
    row: int
    below: list[Cell] = field(default_factory=list["Cell"])
    above: list[Cell] = field(default_factory=list["Cell"])
    x: float = 0

    @property
    def width(self) -> int:
        """Pixels it takes in its row."""
        return _box_width(self.label) if self.label else _LANE


def placed(graph: Graph) -> list[list[Cell]]:
    """Return the rows of a drawing of ``graph``, the bottom one first."""
    rows = [[Cell(label, row) for label in each] for row, each in enumerate(layers(graph))]
    boxes = {cell.label: cell for row in rows for cell in row}
    for label, targets in sorted(graph.items()):
        for target in sorted(targets):
            _connect(boxes[label], boxes[target], rows)
    # What belongs together goes side by side: sweep down and up by the mean of neighbours.
    for sweep in range(8):
        for row in rows if sweep % 2 else rows[::-1]:
            row.sort(key=lambda cell: (_wanted(cell), cell.label))
            _spread(row, [0.0] * len(row))
    for sweep in range(40):
        for row in rows if sweep % 2 else rows[::-1]:
            _spread(row, [_wanted(cell) for cell in row])
    left = min((cell.x - cell.width / 2 for row in rows for cell in row), default=0)
    for cell in (cell for row in rows for cell in row):
        cell.x = round(cell.x - left)
    return rows


def _connect(source: Cell, target: Cell, rows: list[list[Cell]]) -> None:
    """Lead an arrow down from row to row, through a lane in each row between its ends."""
    last = source
    for row in range(source.row - 1, target.row, -1):
        lane = Cell("", row)
        rows[row].append(lane)
        last.below.append(lane)
        lane.above.append(last)
        last = lane
    last.below.append(target)
    target.above.append(last)


def _wanted(cell: Cell) -> float:
    """Return where the cells that it is connected to would have it; lanes like to be straight."""
    ends = [
        (other.x, 1 if cell.label or other.label else 4) for other in (*cell.above, *cell.below)
    ]
    total = sum(weight for _, weight in ends)
    return sum(x * weight for x, weight in ends) / total if ends else cell.x


def _spread(row: Sequence[Cell], wanted: Sequence[float]) -> None:
    """Put the cells of a row as near to where they want to be as their widths allow.

    Cells that would overlap are pushed together into a block, whose place is the mean of what its
    cells want: the least squares under the order and the distances.
    """
    offsets = [0.0]
    for one, other in pairwise(row):
        offsets.append(offsets[-1] + (one.width + other.width) / 2 + _GAP)
    blocks: list[tuple[float, int]] = []  # sum of what is wanted, less the offsets; cells
    for offset, want in zip(offsets, wanted, strict=True):
        total, count = want - offset, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            total, count = total + blocks[-1][0], count + blocks[-1][1]
            blocks.pop()
        blocks.append((total, count))
    places = [total / count for total, count in blocks for _ in range(count)]
    for cell, place, offset in zip(row, places, offsets, strict=True):
        cell.x = place + offset


@dataclass(frozen=True)
class Frame:
    """One graph, drawn: a title, and boxes on a ground of their own."""

    title: str
    rows: list[list[Cell]]

    @property
    def width(self) -> int:
        """Of the boxes and of the title, with margins."""
        right = max(round(cell.x + cell.width / 2) for row in self.rows for cell in row)
        return max(right, round(len(self.title) * _CHARACTER)) + 2 * _MARGIN

    @property
    def height(self) -> int:
        """Of all rows, with margins and the title."""
        rows = len(self.rows) * (_BOX_HEIGHT + _ROW_GAP) - _ROW_GAP
        return rows + _TITLE_HEIGHT + 2 * _MARGIN - _MARGIN // 2

    def boxes(self, width: int) -> dict[Cell, tuple[int, int]]:
        """Return the middle of the upper edge of each cell in a frame of that width."""
        inner = max(round(cell.x + cell.width / 2) for row in self.rows for cell in row)
        first = _TITLE_HEIGHT + _MARGIN // 2
        return {
            cell: (round(cell.x) + (width - inner) // 2, first + steps * (_BOX_HEIGHT + _ROW_GAP))
            for steps, row in enumerate(self.rows[::-1])
            for cell in row
        }

    def svg(self, width: int) -> Iterator[str]:
        """Yield its elements: the ground, the arrows, then the boxes."""
        yield f'<rect class="frame" width="{width}" height="{self.height}" rx="8"/>'
        yield f'<text class="title" x="{_MARGIN}" y="26">{escape(self.title)}</text>'
        at = self.boxes(width)
        for cell in at:
            yield from _arrows(cell, at)
        for cell, (middle, top) in at.items():
            if not cell.label:
                continue
            kind = "file" if cell.label.endswith(".py") else "room"
            place = f'x="{middle - cell.width // 2}" y="{top}"'
            size = f'width="{cell.width}" height="{_BOX_HEIGHT}"'
            yield f'<rect class="{kind}" {place} {size} rx="5"/>'
            place = f'x="{middle}" y="{top + _BOX_HEIGHT // 2 + 5}"'
            yield f'<text class="name" {place}>{escape(cell.label)}</text>'


def _arrows(cell: Cell, at: Mapping[Cell, tuple[int, int]]) -> Iterator[str]:
    """Yield the lines from a cell to those below it."""
    begin, top = at[cell]
    bottom = top + _BOX_HEIGHT
    if not cell.label:
        yield f'<path d="M{begin} {top}V{bottom}"/>'
    for other in sorted(cell.below, key=lambda each: each.x):
        end, low = at[other]
        half = (bottom + low) // 2
        head = ' marker-end="url(#head)"' if other.label else ""
        stop = low - 3 if other.label else low
        yield f'<path d="M{begin} {bottom}C{begin} {half} {end} {half} {end} {stop}"{head}/>'


# Grounds are opaque and light, so that the picture is the same on a dark page.
_STYLE = f"""\
text {{ font: {_FONT}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.title {{ font-weight: 700; fill: #1f2933; }}
.name {{ text-anchor: middle; fill: #1f2933; }}
.frame {{ fill: #f3f5f8; stroke: #c3ccd6; }}
.room {{ fill: #cfe3f7; stroke: #3b6ea5; }}
.file {{ fill: #ffffff; stroke: #8795a5; }}
path {{ fill: none; stroke: #5f6f80; stroke-width: 1.3; }}
#head path {{ fill: #5f6f80; stroke: none; }}"""

_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z"/></marker>'
)


def frames(root: Path = ROOT) -> list[Frame]:
    """Return the drawing of all packages, then of each from the top one down."""
    inside = [Frame(name, placed(reduced(rooms(folder)))) for name, folder in _from_top(root)]
    return [Frame("packages", placed(reduced(packages(root)))), *inside]


def _from_top(root: Path) -> list[tuple[str, Path]]:
    """Return the packages that have rooms, each before what it imports."""
    sources = package_sources(root)
    names = [name for row in layers(packages(root))[::-1] for name in row]
    return [(name, sources[name]) for name in names if _files(sources[name])]


def _height_of(column: Sequence[Frame]) -> int:
    return sum(frame.height + _MARGIN for frame in column)


def picture(root: Path = ROOT) -> str:
    """Return the whole picture as SVG."""
    columns: list[list[Frame]] = [[], []]
    for frame in frames(root):
        min(columns, key=_height_of).append(frame)
    body: list[str] = []
    x = 0
    for column in columns:
        width, y = max((frame.width for frame in column), default=0), 0
        for frame in column:
            body += [f'<g transform="translate({x} {y})">', *frame.svg(width), "</g>"]
            y += frame.height + _MARGIN
        x += width + _MARGIN
    width, height = x - _MARGIN, max(map(_height_of, columns)) - _MARGIN
    box = f"-1 -1 {width + 2} {height + 2}"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">'
    title = "<title>The packages, their rooms, and what imports what</title>"
    defs = f"<defs><style>\n{_STYLE}\n</style>{_HEAD}</defs>"
    return "\n".join([opening, title, defs, *body, "</svg>\n"])


def page(root: Path = ROOT) -> str:
    """Return the text of the page, with the list of rooms as it is now."""
    text = PAGE.read_text(encoding="utf-8").partition(_HEADING)[0]
    lines = [_HEADING]
    for name, folder in _from_top(root):
        lines += [f"### {name}\n", "| room | what it does |", "| --- | --- |"]
        inside = _files(folder)
        rows = layers(rooms(folder))[::-1]
        lines += [f"| `{label}` | {_summary(inside[label])} |" for row in rows for label in row]
        lines[-1] += "\n"
    return text + "\n".join(lines)


def _summary(file: Path) -> str:
    """Return the first paragraph of a file's docstring."""
    if not file.exists():
        return ""
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = words.partition("\n\n")[0].replace("\n", " ")
    return paragraph.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
