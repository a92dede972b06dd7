"""An explanation as one page of HTML with pictures, which loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape

from vescale_parallel import ParallelPlan, draw_schedule
from vescale_planner._prices.cost import seconds
from vescale_planner.prediction import Prediction

from .pictures import bars, mesh, scatter, stages
from .reasons import gib

# Larger pipelines than these are unreadable, and simulating them takes seconds.
_MOST_RANKS, _MOST_PASSES = 16, 4
_NAMES_OF_AXES = {
    "pp": "pipeline", "dp_replicate": "data", "dp_shard": "data", "ep": "expert", "cp": "context",
    "tp": "tensor",
}  # fmt: skip
_NEXT = ("plan", "times the time", "memory", "more and less, of a step")
_OTHERS = ("what", "times the time a row", "best plan then")
_STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}"
    "svg{max-width:100%;height:auto}svg text{font:11px sans-serif}h2{margin-top:1.6em}"
)


@dataclass(frozen=True, kw_only=True)
class Page:
    """What is on it.

    Attributes:
        plan: With its reasons.
        prediction: Of it.
        cluster: Name of the machines.
        memory_limit_bytes: Of a device of theirs.
        front: Seconds of a step and bytes of plans than which none is faster and smaller.
        stages: Blocks of every stage, first and last.
        alternatives: Rows of a table: plan, times, memory, what it spends more on.
        changes: Likewise: what is different, times, plan.
    """

    plan: ParallelPlan
    prediction: Prediction
    cluster: str
    memory_limit_bytes: int
    front: Sequence[tuple[float, int]]
    stages: Sequence[tuple[str, str]]
    alternatives: Sequence[Sequence[str]]
    changes: Sequence[Sequence[str]]


def html_of(found: Page) -> str:
    """Return the page as a document."""
    predicted = found.prediction
    title = f"{found.plan.world_size} ranks of {found.cluster}"
    said = (
        f"A step takes {seconds(predicted.step_seconds)}: "
        f"{predicted.tokens_per_second_per_device:.4g} tokens a second and device, "
        f"{predicted.mfu:.1%} of the peak. The fullest rank needs "
        f"{gib(predicted.memory_bytes)} of {gib(found.memory_limit_bytes)}."
    )
    sections = [
        f"<p>{escape(said)}</p>",
        *_section("Mesh", mesh(_axes(found.plan))),
        *_section("Layers of stages", stages(found.stages, found.plan.pipeline_parallel.size)),
        *_section("Time of a step", _times(found)),
        *_section("Memory of pipeline ranks", _memories(found)),
        *_section("Schedule", _schedule(found.plan)),
        *_section("Time against memory", scatter(found.front, *_choice(found))),
        *_section("The next ones", _table(_NEXT, found.alternatives)),
        *_section("If something was different", _table(_OTHERS, found.changes)),
        *_section("Reasons", _list(found.plan.reasons)),
        *_section("Assumed", _list(predicted.assumptions)),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join((f"<h1>{escape(title)}</h1>", *sections))
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    )


def _section(title: str, content: str) -> Iterator[str]:
    if content:
        yield f"<h2>{title}</h2>"
        yield content


def _axes(plan: ParallelPlan) -> dict[str, int]:
    """Return the axes as people name them, outermost first; their product is that of all ranks.

    Ranks that share experts are ranks of the batch, and of sequences where they are more.
    """
    sizes: dict[str, int] = {}
    for axis, size in plan.axes.items():
        name = _NAMES_OF_AXES[axis]
        sizes[name] = sizes.get(name, 1) * size
    return {name: size for name, size in sizes.items() if size > 1}


def _times(found: Page) -> str:
    spent = {n.replace("_", " "): v for n, v in asdict(found.prediction.breakdown).items()}
    return bars([("step", spent)], seconds)


def _memories(found: Page) -> str:
    ranks = [
        (f"rank {rank}", asdict(memory)) for rank, memory in enumerate(found.prediction.memory)
    ]
    return bars(ranks[:_MOST_RANKS], gib, limit=found.memory_limit_bytes)


def _choice(found: Page) -> tuple[tuple[float, int], int]:
    predicted = found.prediction
    return (predicted.step_seconds, predicted.memory_bytes), found.memory_limit_bytes


def _schedule(plan: ParallelPlan) -> str:
    pipeline = plan.pipeline_parallel
    if pipeline.size == 1:
        return ""
    if pipeline.size > _MOST_RANKS:
        return f"<p>{pipeline.size} ranks of a pipeline are more than a picture shows.</p>"
    most = _MOST_PASSES * pipeline.size
    if pipeline.microbatches <= most:
        return draw_schedule(plan)
    few = replace(pipeline, microbatches=most)
    drawn = draw_schedule(ParallelPlan(pipeline_parallel=few))
    return f"<p>The first {most} of {pipeline.microbatches} micro-batches.</p>{drawn}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    first = "".join(f"<th>{escape(each)}</th>" for each in head)
    others = ("".join(f"<td>{escape(each)}</td>" for each in row) for row in rows)
    body = "\n".join(f"<tr>{each}</tr>" for each in (first, *others))
    return f"<table>{body}</table>"


def _list(sentences: Iterable[str]) -> str:
    items = "\n".join(f"<li>{escape(each)}</li>" for each in sentences)
    return f"<ul>{items}</ul>" if items else ""
