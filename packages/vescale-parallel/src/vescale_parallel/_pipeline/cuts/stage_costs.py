"""What the parts of a model cost a pipeline, and the split that evens it out over stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_parallel._pipeline.schedules.actions import passes_in_flight
from vescale_parallel._plan.pipeline_config import PipelineParallel
from vescale_parallel._plan.plan import ParallelPlan

from .partition import lightest_split

# Tensors of a parameter's size that an optimizer keeps, where nobody says which it is: Adam's.
_OPTIMIZER_STATES = 2
# Of arithmetic in the time of a byte to or from memory: an H100's 990 Tflop/s in bf16 at half its
# peak, and 3.35 TB/s.
_FLOPS_PER_BYTE = 150.0


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """A block, or what runs before or behind all blocks, for one micro-batch.

    Attributes:
        numel: Parameter elements that it uses, tied ones too.
        nbytes: Their bytes.
        flops: Of its forward.
        saved_bytes: Kept for its backward.
        output_bytes: What it hands to the next part.
    """

    numel: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0

    def __add__(self, other: PartCost) -> PartCost:
        return PartCost(
            numel=self.numel + other.numel,
            nbytes=self.nbytes + other.nbytes,
            flops=self.flops + other.flops,
            saved_bytes=self.saved_bytes + other.saved_bytes,
            output_bytes=other.output_bytes,
        )


def state_bytes(
    zero_stage: int, shard_size: int, optimizer_states: float = _OPTIMIZER_STATES
) -> float:
    """Return bytes of parameter, gradient and optimizer state a rank has of a parameter's byte."""
    parts = (1.0, zero_stage == 3), (1.0, zero_stage >= 2), (optimizer_states, zero_stage >= 1)
    return sum(kept / shard_size if sharded else kept for kept, sharded in parts)


@dataclass(frozen=True)
class StageRule:
    """What decides how heavy a part is on a stage.

    Attributes:
        pipeline: Its size, virtual stages, schedule and split method.
        microbatches: Of a step.
        recomputes: Whether blocks keep their input alone, and run forward again in backward.
        states: Bytes of parameter, gradient and optimizer state, for each byte of a parameter.
        flops_per_byte: Of arithmetic in the time of a byte to or from memory.
    """

    pipeline: PipelineParallel
    microbatches: int = 1
    recomputes: bool = False
    states: float = state_bytes(0, 1)
    flops_per_byte: float = _FLOPS_PER_BYTE

    @classmethod
    def of(cls, plan: ParallelPlan) -> StageRule:
        """Return that of a plan, with the states of Adam."""
        data = plan.data_parallel
        return cls(
            pipeline=plan.pipeline_parallel,
            microbatches=plan.num_microbatches,
            recomputes=plan.recompute == "full",
            states=state_bytes(data.zero_stage, data.shard_size),
        )


def balanced_starts(
    before: PartCost, blocks: Sequence[PartCost], after: PartCost, rule: StageRule
) -> list[int]:
    """Cut blocks into stages so that the heaviest stage is lightest, by a split method.

    ``"uniform"`` counts blocks, ``"parameters"`` elements, ``"flops"`` those of forward,
    ``"memory"`` the bytes of parameters, gradients and optimizer state and of the activations
    that a stage keeps at a time under its schedule, ``"auto"`` an estimate of time: arithmetic
    or reading the parameters, whichever takes longer, then activations to memory and back. All
    but the first count what runs before the blocks on the first stage, and what runs behind
    them, the head and the loss, on the last one.

    Returns:
        Index of the first block of every stage.

    Raises:
        ValueError: If there are fewer blocks than stages.

    Example:
        A head that takes as long as two blocks.

        >>> rule = StageRule(pipeline=PipelineParallel(size=2, split_method="flops"))
        >>> balanced_starts(PartCost(), [PartCost(flops=1)] * 4, PartCost(flops=2), rule)
        [0, 3]
    """
    pipeline = rule.pipeline
    method, num_stages = pipeline.split_method, pipeline.num_stages
    kept: Sequence[int] = [1] * num_stages
    if method == "memory":
        kept = passes_in_flight(
            pipeline.schedule,
            size=pipeline.size,
            virtual_stages=pipeline.virtual_stages,
            microbatches=rule.microbatches,
        )

    def weight(part: PartCost, stage: int, *, is_block: bool) -> float:
        if method == "uniform":
            return float(is_block)
        if method == "parameters":
            return part.numel
        if method == "flops":
            return part.flops
        recomputes = rule.recomputes and is_block
        if method == "memory":
            activations = part.output_bytes if recomputes else part.saved_bytes
            return rule.states * part.nbytes + kept[stage] * activations
        return _time(part, recomputes=recomputes, flops_per_byte=rule.flops_per_byte)

    rows = [[weight(part, s, is_block=True) for part in blocks] for s in range(num_stages)]
    # No stage but these has them.
    extra = [0.0] * num_stages
    extra[0] += weight(before, 0, is_block=False)
    extra[-1] += weight(after, num_stages - 1, is_block=False)
    return lightest_split(rows, extra)


def _time(part: PartCost, *, recomputes: bool, flops_per_byte: float) -> float:
    """Return how long forward and backward take, in flops; backward is two forwards."""
    passes = 4 if recomputes else 3
    products = passes * max(part.flops, part.nbytes * flops_per_byte)
    return products + (passes + 1) * part.saved_bytes * flops_per_byte
