"""What sections of a plan ask of each other."""

from __future__ import annotations

from .config import ContextParallel, DataParallel, ExpertParallel
from .pipeline_config import PipelineParallel


def check_experts(experts: ExpertParallel, data: DataParallel, context: ContextParallel) -> None:
    """Raise if experts cannot be shared by data-parallel ranks, or those of a sequence.

    Raises:
        ValueError: With the keys and what they may be.
    """
    size = experts.size
    if data.size * context.size % size:
        ranks = f"{data.size}" if context.size == 1 else f"{data.size} x {context.size}"
        times = "" if context.size == 1 else " times context_parallel.size"
        raise ValueError(
            f"expected expert_parallel.size to divide data_parallel.size{times} ({ranks}), "
            f"whose ranks it groups, got {size}"
        )
    if size > 1 and data.zero_stage and data.replicate_size not in (1, size):
        raise ValueError(
            "expected data_parallel.replicate_size to be 1 or expert_parallel.size "
            f"({size}), which is how many ranks then have a copy of what is no expert, "
            f"got {data.replicate_size}"
        )
    if size > 1 and data.replicate_zero_stage:
        raise ValueError(
            "expected data_parallel.replicate_zero_stage 0 with expert_parallel.size "
            f"{size}, got 1: the copies are the ranks that share experts then, whose "
            "optimizer state has no copy"
        )


def check_reductions(pipeline: PipelineParallel, data: DataParallel) -> None:
    """Raise if gradients of micro-batches cannot be reduced one by one.

    Raises:
        ValueError: With the keys and what they may be.
    """
    name = "pipeline_parallel.reduce_every"
    if pipeline.reduce_every == "step":
        return
    if data.zero_stage < 2:
        raise ValueError(
            f"{name} 'microbatch' keeps gradients sharded between micro-batches: expected "
            f"data_parallel.zero_stage 2 or 3, got {data.zero_stage}, where ranks keep whole ones"
        )
    if pipeline.size == 1:
        raise ValueError(
            f"expected {name} 'step' without a pipeline, got 'microbatch'; "
            "batch.gradient_accumulation reduces every micro-batch with ZeRO 2 and 3"
        )
