"""Where the time of a step goes: spans of every rank on one clock, a trace, and a table."""

from .summary import (
    AxisTime as AxisTime,
    ModuleTime as ModuleTime,
    TimelineSummary as TimelineSummary,
)
from .timeline import Span as Span, Timeline as Timeline, timeline as timeline
