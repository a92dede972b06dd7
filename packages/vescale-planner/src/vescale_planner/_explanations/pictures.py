"""Pictures of a plan as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f",
    "#bab0ac",
)  # fmt: skip
_WIDTH, _LEFT, _ROW = 900, 90, 26
# Ranks of an axis, and stages, that are drawn one by one.
_MOST = 16


def mesh(axes: Mapping[str, int]) -> str:
    """Return a row of boxes for each axis, the outermost first."""
    lines: list[str] = []
    for row, (name, size) in enumerate(axes.items()):
        y, shown = row * _ROW, min(size, _MOST)
        wide = (_WIDTH - _LEFT - 60) / shown
        lines.append(_text(0, y + 16, f"{name} {size}"))
        for index in range(shown):
            x = _LEFT + index * wide
            lines.append(_box(x, y, wide - 3, _ROW - 6, _COLOURS[row % len(_COLOURS)], f"{index}"))
        if size > shown:
            lines.append(_text(_WIDTH - 50, y + 16, f"... {size - 1}"))
    return _svg(lines, len(axes) * _ROW)


def stages(blocks: Sequence[tuple[str, str]], num_ranks: int) -> str:
    """Return one box a stage, with its first and last block; a rank's have one colour."""
    if len(blocks) < 2:
        return ""
    lines: list[str] = []
    for stage, (first, last) in enumerate(blocks[: 4 * _MOST]):
        column, row = stage % 4, stage // 4
        wide = _WIDTH / 4
        said = first if first == last else f"{first} to {last}"
        colour = _COLOURS[stage % num_ranks % len(_COLOURS)]
        x, y = column * wide, row * _ROW
        lines.append(_box(x, y, 12, _ROW - 8, colour, f"stage {stage}"))
        lines.append(_text(x + 18, y + 14, f"{stage}: {said}"))
    if len(blocks) > 4 * _MOST:
        lines.append(_text(0, 4 * _MOST // 4 * _ROW + 14, f"... {len(blocks)} stages"))
    return _svg(lines, (min(len(blocks), 4 * _MOST) // 4 + 2) * _ROW)


def bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    said: Callable[[float], str],
    *,
    limit: float | None = None,
) -> str:
    """Return a stacked bar a row, a legend, and a line where the limit is."""
    most = max([*(sum(parts.values()) for _, parts in rows), limit or 0.0]) or 1.0
    scale = (_WIDTH - _LEFT - 20) / most
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    lines: list[str] = []
    for row, (label, parts) in enumerate(rows):
        x, y = float(_LEFT), row * _ROW
        lines.append(_text(0, y + 15, label))
        for name, value in parts.items():
            title = f"{name.replace('_', ' ')}: {said(value)}"
            lines.append(_box(x, y, value * scale, _ROW - 6, colours[name], title))
            x += value * scale
    height = len(rows) * _ROW
    if limit is not None:
        x = _LEFT + limit * scale
        lines.append(f'<line x1="{x:g}" x2="{x:g}" y1="0" y2="{height}" stroke="#c00"/>')
    used = [name for name in names if any(parts.get(name) for _, parts in rows)]
    for index, name in enumerate(used):
        x, y = _LEFT + index % 4 * 200, height + 8 + index // 4 * 18
        lines.append(_box(x, y, 10, 10, colours[name], name))
        several = said(max(parts.get(name, 0.0) for _, parts in rows))
        lines.append(_text(x + 16, y + 9, f"{name.replace('_', ' ')} {several}"))
    return _svg(lines, height + 12 + (len(used) + 3) // 4 * 18)


def scatter(front: Sequence[tuple[float, int]], choice: tuple[float, int], limit: int) -> str:
    """Return plans than which none is faster and smaller: time to the right, memory up."""
    if not front:
        return ""
    height, points = 260, [*front, choice]
    slowest, largest = max(x for x, _ in points), max([limit, *(y for _, y in points)])

    def place(point: tuple[float, int]) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 30) * point[0] / slowest
        return x, height - 30 - (height - 50) * point[1] / largest

    line = " ".join(f"{x:g},{y:g}" for x, y in map(place, front))
    _, top = place((0.0, limit))
    lines = [
        f'<polyline points="{line}" fill="none" stroke="#4e79a7"/>',
        *(_dot(*place(each), 3, "#4e79a7") for each in front),
        _dot(*place(choice), 6, "#e15759"),
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{top:g}" y2="{top:g}" stroke="#c00"/>',
        _text(0, top + 4, f"{limit / 2**30:.3g} GiB"),
        _text(_LEFT, height - 8, "0 s"),
        _text(_WIDTH - 80, height - 8, f"{slowest:.3g} s"),
        _text(_LEFT + 200, height - 8, "the choice is red; what is above the line does not fit"),
    ]
    return _svg(lines, height)


def _dot(x: float, y: float, radius: int, colour: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius}" fill="{colour}"/>'


def _box(x: float, y: float, wide: float, high: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{max(wide, 0):g}" height="{high:g}" '
        f'fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _svg(lines: Iterable[str], height: float) -> str:
    body = "\n".join(lines)
    where = f'viewBox="0 0 {_WIDTH} {height:g}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {where}>\n{body}\n</svg>' if body else ""
