"""Run a module nD-parallel: the plan as data, and what carries it out.

The rooms, in the order in which data passes through them:

- ``_parallelize``: the entry point, which goes through the others.
- ``_plan``: a parallel plan as frozen data.
- ``_model``: what a module is made of.
- ``_mesh``: the DeviceMesh and its process groups.
- ``_trace``: forwards on fake tensors.
- ``_auto_sharding``: proposes a sharding plan.
- ``_verify``: compares a sharding plan with one device, numerically.
- ``_parameters``: a parameter, sharded (a DTensor) and unsharded (a plain tensor).
- ``_tensor_parallel``: collectives where sharded regions begin and end.
- ``_pipeline``: stages, schedules, point-to-point.
- ``_data_parallel``: ZeRO parameter groups, the data loader.
- ``_rng``: every rank's share of one device's random numbers.
- ``_cross_replica``: what is computed over rows of the global batch.
- ``_loss``: the loss of one device from those of its shards.
- ``_runtime``: one call of the model, one backward, one optimizer step.

What is promised is in ``__all__``. The other names are what vescale-planner needs to know what
would run; they change together with it, in any version.
"""

from vescale_dtensor import leave_uncompiled

from ._auto_sharding.invariant import propose_in_chunks as propose_in_chunks
from ._auto_sharding.place_collectives import ShardingProposal as ShardingProposal
from ._auto_sharding.policies import (
    propose_sharding as propose_sharding,
    tensor_parallel_plan as tensor_parallel_plan,
)
from ._cross_replica.batch import check_micro_batches as check_micro_batches
from ._data_parallel.data.loader import ParallelLoader as ParallelLoader
from ._expert_parallel.find import planned_experts as planned_experts
from ._expert_parallel.layers import ExpertLayer as ExpertLayer, expert_layers as expert_layers
from ._expert_parallel.load import expert_load as expert_load
from ._model.blocks import block_stacks as block_stacks, pipeline_blocks as pipeline_blocks
from ._model.signature import (
    check_signature as check_signature,
    model_signature as model_signature,
)
from ._parallelize import parallelize as parallelize
from ._parameters.shared_memory import refuse_shared_memory as refuse_shared_memory
from ._pipeline.call_order import observed_calls as observed_calls
from ._pipeline.check import check_pipeline as check_pipeline
from ._pipeline.cuts.block_calls import (
    called_blocks as called_blocks,
    names_of_calls as names_of_calls,
)
from ._pipeline.cuts.stage_costs import (
    PartCost as PartCost,
    StageRule as StageRule,
    balanced_starts as balanced_starts,
    state_bytes as state_bytes,
)
from ._pipeline.execution import (
    RecordedSchedule as RecordedSchedule,
    record_schedule as record_schedule,
)
from ._pipeline.layer_outputs import give_no_layers as give_no_layers
from ._pipeline.schedules.picture import draw_schedule as draw_schedule
from ._pipeline.schedules.simulator import simulate_schedule as simulate_schedule
from ._pipeline.stage_assignment import modules_outside_blocks as modules_outside_blocks
from ._plan.config import (
    Batch as Batch,
    ContextParallel as ContextParallel,
    DataParallel as DataParallel,
    ExpertParallel as ExpertParallel,
    Precision as Precision,
    TensorParallel as TensorParallel,
)
from ._plan.constraints import (
    check_constraints as check_constraints,
    with_constraints as with_constraints,
)
from ._plan.pipeline_config import PipelineParallel as PipelineParallel, SplitMethod as SplitMethod
from ._plan.pipeline_schedules import (
    SCHEDULE_RULES as SCHEDULE_RULES,
    ScheduleName as ScheduleName,
    StagePlacement as StagePlacement,
    refused_microbatches as refused_microbatches,
    rule_of as rule_of,
)
from ._plan.plan import (
    Estimate as Estimate,
    ModelSignature as ModelSignature,
    ParallelPlan as ParallelPlan,
    constraint_keys as constraint_keys,
)
from ._plan.recomputation import recompute_by_block as recompute_by_block
from ._plan.supported import check_supported as check_supported, refuse_wrapped as refuse_wrapped
from ._rng.planned_context import planned_context as planned_context
from ._runtime.compiled.blocks import (
    CompiledBlock as CompiledBlock,
    compile_report as compile_report,
)
from ._runtime.optimizer.kinds import declare_optimizer as declare_optimizer
from ._runtime.optimizer.matrices import declare_matrices as declare_matrices
from ._runtime.position import (
    data_parallel_rank as data_parallel_rank,
    mesh_coordinate as mesh_coordinate,
)
from ._tensor_parallel.explain import (
    PackedDim as PackedDim,
    ParallelExplanation as ParallelExplanation,
    explain as explain,
    packed_dims as packed_dims,
)
from ._trace.fake_tensors import ObservationError as ObservationError
from ._trace.observation import Observation as Observation
from ._trace.observe import observe as observe

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "CompiledBlock",
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
    "RecordedSchedule",
    "TensorParallel",
    "compile_report",
    "constraint_keys",
    "data_parallel_rank",
    "declare_matrices",
    "declare_optimizer",
    "draw_schedule",
    "expert_load",
    "explain",
    "observe",
    "observed_calls",
    "parallelize",
    "record_schedule",
    "tensor_parallel_plan",
    "with_constraints",
]

leave_uncompiled(__name__)
