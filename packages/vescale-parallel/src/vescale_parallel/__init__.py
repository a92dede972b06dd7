"""Run a module nD-parallel: the plan as data, and what carries it out."""

from ._arrange import ShardingProposal as ShardingProposal
from ._constraints import (
    check_constraints as check_constraints,
    with_constraints as with_constraints,
)
from ._distribute import read_real as read_real
from ._explain import ParallelExplanation as ParallelExplanation, explain as explain
from ._fakes import ObservationError as ObservationError
from ._loader import ParallelLoader as ParallelLoader
from ._observation import Observation as Observation
from ._observe import observe as observe
from ._parallelize import parallelize as parallelize
from ._pipeline_check import check_pipeline as check_pipeline
from ._plan import (
    Estimate as Estimate,
    ModelSignature as ModelSignature,
    ParallelPlan as ParallelPlan,
    constraint_keys as constraint_keys,
)
from ._policies import (
    propose_sharding as propose_sharding,
    tensor_parallel_plan as tensor_parallel_plan,
)
from ._position import data_parallel_rank as data_parallel_rank
from ._sections import (
    Batch as Batch,
    ContextParallel as ContextParallel,
    DataParallel as DataParallel,
    ExpertParallel as ExpertParallel,
    PipelineParallel as PipelineParallel,
    Precision as Precision,
    TensorParallel as TensorParallel,
)
from ._stage_map import modules_outside_blocks as modules_outside_blocks
from ._structure import (
    block_stacks as block_stacks,
    model_signature as model_signature,
    pipeline_blocks as pipeline_blocks,
    split_blocks as split_blocks,
)

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "ContextParallel",
    "DataParallel",
    "Estimate",
    "ExpertParallel",
    "ModelSignature",
    "Observation",
    "ObservationError",
    "ParallelExplanation",
    "ParallelLoader",
    "ParallelPlan",
    "PipelineParallel",
    "Precision",
    "ShardingProposal",
    "TensorParallel",
    "block_stacks",
    "check_constraints",
    "check_pipeline",
    "constraint_keys",
    "data_parallel_rank",
    "explain",
    "model_signature",
    "modules_outside_blocks",
    "observe",
    "parallelize",
    "pipeline_blocks",
    "propose_sharding",
    "read_real",
    "split_blocks",
    "tensor_parallel_plan",
    "with_constraints",
]
