"""A Gantt chart of a schedule, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vescale_parallel._plan.plan import ParallelPlan

from .action import Kind
from .picture_png import write_png
from .simulator import Simulated, Span, of_spans, simulate_schedule

_FILLS: Mapping[Kind, str] = {"F": "#9ecae1", "B": "#a1d99b", "I": "#c7e9c0", "W": "#fdd0a2"}
_WORDS: Mapping[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradients of weights",
}
_ROW, _LEFT, _TOP = 24, 60, 24
_WIDTH = 1200  # pixels of a recorded run, however long it took


def draw_schedule(
    plan: ParallelPlan,
    *,
    second: int = 20,
    spans: Sequence[Span] | None = None,
    path: str | Path | None = None,
) -> str:
    """Return a Gantt chart of a plan's pipeline as SVG, simulated or of a run.

    In the simulator a forward pass of a stage takes a second, a backward pass two, each of its
    parts one; messages take none. A bar is where the gradients of a micro-batch are reduced, if
    the plan does that. Later stages of a rank are darker; numbers are micro-batches.

    Args:
        plan: With a pipeline or without one.
        second: Pixels for each, of what the simulator runs.
        spans: Of a run, what :meth:`RecordedSchedule.gather` returned; None simulates the plan.
        path: Of a file to write the chart to, too: ``.svg``, or ``.png``, which needs matplotlib.

    Raises:
        ValueError: If the file is to be something else, or nothing was recorded.
        ImportError: If matplotlib is missing.

    Example:
        One micro-batch on one rank: a paper, two passes, and a legend of two.

        >>> draw_schedule(ParallelPlan()).count("<rect")
        5
    """
    pipeline, run, pixels = plan.pipeline_parallel, "", float(second)
    if path is not None and Path(path).suffix not in (".svg", ".png"):
        raise ValueError(f"expected path to end in .svg or .png, got {str(path)!r}")
    if spans is None:
        found = simulate_schedule(
            pipeline.schedule,
            pipeline.reduce_every,
            size=pipeline.size,
            virtual_stages=pipeline.virtual_stages,
            microbatches=plan.num_microbatches,
        )
    else:
        found = of_spans(spans, pipeline.size)
        run, pixels = f", a run of {found.seconds * 1000:.3g} ms", _WIDTH / found.seconds
    title = (
        f"{pipeline.schedule}, {pipeline.size} ranks x {pipeline.virtual_stages}, "
        f"{plan.num_microbatches} micro-batches{run}: ranks wait {found.bubble:.0%} of the time "
        f"and keep up to {max(found.peak_activations)} activations"
    )
    svg = _svg(found, pipeline.size, title, pixels)
    if path is not None and Path(path).suffix == ".svg":
        Path(path).write_text(svg, encoding="utf-8")
    elif path is not None:
        write_png(found.spans, pipeline.size, title, path, _FILLS, _WORDS)
    return svg


def _svg(found: Simulated, size: int, title: str, second: float) -> str:
    width = _LEFT + max(round(found.seconds * second), 9 * len(title)) + 10
    height = _TOP + size * _ROW + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<style>text { font: 11px sans-serif }</style>",
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="16">{title}</text>',
    ]
    lines += [f'<text x="8" y="{_TOP + r * _ROW + 16}">rank {r}</text>' for r in range(size)]
    for span in found.spans:
        lines += _box(span, size, second)
    # A bar behind the pass whose gradients are reduced there.
    lines += [
        f'<line x1="{x:g}" x2="{x:g}" y1="{y}" y2="{y + _ROW - 4}" stroke="#d62728" '
        'stroke-width="3"/>'
        for rank, _, _, seconds in found.reductions
        for x, y in ((_LEFT + seconds * second, _TOP + rank * _ROW),)
    ]
    lines += _legend({span.action.kind for span in found.spans}, height - 18)
    return "\n".join([*lines, "</svg>\n"])


def _box(span: Span, size: int, second: float) -> Sequence[str]:
    x, y = _LEFT + span.start * second, _TOP + span.rank * _ROW
    wide, action = (span.end - span.start) * second, span.action
    shade = max(0.55, 1 - 0.2 * (action.stage // size))
    style = f"fill:{_FILLS[action.kind]};stroke:#555;filter:brightness({shade:g})"
    return (
        f'<rect x="{x:g}" y="{y}" width="{wide:g}" height="{_ROW - 4}" style="{style}"/>',
        f'<text x="{x + wide / 2:g}" y="{y + 14}" text-anchor="middle">{action.microbatch}</text>',
    )


def _legend(kinds: set[Kind], y: int) -> Sequence[str]:
    lines: list[str] = []
    shown: list[Kind] = [kind for kind in _FILLS if kind in kinds]
    for index, kind in enumerate(shown):
        x = _LEFT + 150 * index
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_FILLS[kind]}"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 10}">{_WORDS[kind]}</text>')
    return lines
