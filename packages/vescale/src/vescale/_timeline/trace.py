"""Spans in the trace event format, which Perfetto and chrome://tracing open.

One process of the trace is a rank, one thread of it a lane; times are in microseconds since the
first span. Format: "Trace Event Format", complete events ("ph": "X") and metadata ("ph": "M").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from .span import Lane, Span

_LANES: tuple[Lane, ...] = get_args(Lane)


def write_trace(path: Path, spans: Sequence[Sequence[Span]], names: Sequence[str]) -> None:
    """Write the spans of every rank, and what the ranks are called."""
    first = min((span.begin for own in spans for span in own), default=0)
    events: list[Mapping[str, Any]] = []
    for rank, (own, name) in enumerate(zip(spans, names, strict=True)):
        events.append(_named("process_name", rank, 0, name=name))
        events.append(_named("process_sort_index", rank, 0, sort_index=rank))
        lanes = dict.fromkeys(span.lane for span in own)
        events += [_named("thread_name", rank, _LANES.index(lane), name=lane) for lane in lanes]
        # Outer ones first, where two begin at once.
        ordered = sorted(own, key=lambda span: (span.begin, -span.end))
        events += [_complete(span, rank, first) for span in ordered]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _named(what: str, rank: int, lane: int, **args: object) -> Mapping[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": args}


def _complete(span: Span, rank: int, first: int) -> Mapping[str, Any]:
    known = {
        "axis": span.axis or None,
        "bytes": span.nbytes or None,
        "stage": span.stage,
        "micro-batch": span.microbatch,
    }
    is_pass = span.lane == "modules"
    return {
        "ph": "X",
        "name": f"{span.name} ({span.kind})" if is_pass else span.name,
        "cat": span.kind if is_pass else span.lane,
        "ts": (span.begin - first) / 1e3,
        "dur": (span.end - span.begin) / 1e3,
        "pid": rank,
        "tid": _LANES.index(span.lane),
        "args": {key: value for key, value in known.items() if value is not None},
    }
