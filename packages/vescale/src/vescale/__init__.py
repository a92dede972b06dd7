"""Train an unmodified model nD-parallel: five calls around an ordinary loop."""

from vescale_ckpt import CheckpointError as CheckpointError
from vescale_deferred import deferred_init as deferred_init
from vescale_dtensor import PeerError as PeerError, leave_uncompiled
from vescale_parallel import (
    ParallelPlan as ParallelPlan,
    data_parallel_rank as data_parallel_rank,
    declare_matrices as declare_matrices,
    declare_optimizer as declare_optimizer,
)
from vescale_planner import Cluster as Cluster, generate_plan as generate_plan

from ._checkpoint import load as load, save as save
from ._emulate import emulate as emulate
from ._export import export as export, load_pretrained as load_pretrained
from ._memory import MemoryReport as MemoryReport, memory_report as memory_report
from ._nonfinite import detect_nonfinite as detect_nonfinite
from ._parallelize import parallelize as parallelize
from ._progress import Progress as Progress
from ._spikes import Spike as Spike, SpikeWatch as SpikeWatch, detect_spikes as detect_spikes
from ._timeline import (
    Span as Span,
    Timeline as Timeline,
    TimelineSummary as TimelineSummary,
    timeline as timeline,
)
from ._verify import VerifyReport as VerifyReport, verify as verify

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Cluster",
    "MemoryReport",
    "ParallelPlan",
    "PeerError",
    "Progress",
    "Span",
    "Spike",
    "SpikeWatch",
    "Timeline",
    "TimelineSummary",
    "VerifyReport",
    "data_parallel_rank",
    "declare_matrices",
    "declare_optimizer",
    "deferred_init",
    "detect_nonfinite",
    "detect_spikes",
    "emulate",
    "export",
    "generate_plan",
    "load",
    "load_pretrained",
    "memory_report",
    "parallelize",
    "save",
    "timeline",
    "verify",
]

leave_uncompiled(__name__)
