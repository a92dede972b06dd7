"""Draw blocks of a tensor; the only file that knows matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

# More labels than this are smudges.
_MAX_LABELS = 400


def draw(
    edges: tuple[Sequence[int], Sequence[int]],
    labels: Mapping[tuple[int, int], str],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> None:
    """Write a picture of labelled blocks; those with one label have one color.

    ``edges`` says where rows and columns begin and end, ``labels`` what each block holds, by the
    index of its row and column. ``path`` ends in ``.png``.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install 'vescale-dtensor[visualize]'"
        ) from error
    rows, columns = edges
    colors = {label: index for index, label in enumerate(dict.fromkeys(labels.values()))}
    palette = colormaps["Set3"]
    figure = Figure(figsize=(8.0, 2.5 if len(rows) == 2 else 6.0), layout="constrained")
    axes = figure.add_subplot()
    for (row, column), label in labels.items():
        corner = (columns[column], rows[row])
        width, height = columns[column + 1] - corner[0], rows[row + 1] - corner[1]
        color = palette(colors[label] % palette.N)
        axes.add_patch(Rectangle(corner, width, height, facecolor=color, edgecolor="white"))
        if len(labels) <= _MAX_LABELS:
            middle = (corner[0] + width / 2, corner[1] + height / 2)
            axes.text(*middle, label, ha="center", va="center", fontsize=8)
    axes.set(xlim=(columns[0], columns[-1]), ylim=(rows[-1], rows[0]))
    if len(rows) == 2:
        axes.set_yticks([])
    axes.set_title(title, fontsize=9, wrap=True)
    figure.savefig(path, format="png")
