"""The Gantt chart of a schedule as PNG; the only file of this package that knows matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .action import Kind
from .simulator import Span


def write_png(
    spans: Sequence[Span],
    size: int,
    title: str,
    path: str | Path,
    fills: Mapping[Kind, str],
    words: Mapping[Kind, str],
) -> None:
    """Write when ranks ran their passes.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a PNG needs matplotlib: pip install 'vescale-parallel[visualize]', or write a .svg"
        ) from error
    figure = Figure(figsize=(14, 1.5 + 0.4 * size), layout="constrained")
    axes: Any = figure.add_subplot()
    for span in spans:
        shade = max(0.55, 1 - 0.2 * (span.action.stage // size))
        fill = fills[span.action.kind]
        color = [shade * int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        wide = span.end - span.start
        axes.barh(span.rank, wide, left=span.start, color=color, edgecolor="#555", height=0.85)
        middle = span.start + wide / 2
        axes.text(middle, span.rank, span.action.microbatch, ha="center", va="center", size=7)
    axes.set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=9)
    shown = {span.action.kind for span in spans}
    patches = [Patch(color=fills[kind], label=words[kind]) for kind in fills if kind in shown]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4)
    figure.savefig(path, dpi=120)
