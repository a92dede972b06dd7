"""The section of a plan that says how a model is cut into stages, and how they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .choices import check_choices, check_size
from .frozen_mapping import FrozenMapping, checked_places
from .pipeline_schedules import ScheduleName, StagePlacement, check_schedule, rule_of

SplitMethod = Literal["uniform", "parameters", "flops", "memory", "auto", "manual"]


@dataclass(frozen=True, kw_only=True)
class PipelineParallel:
    """How the sequence of blocks is split into stages.

    Attributes:
        size: Ranks in the pipeline.
        schedule: Order of forward and backward passes, compared in ``docs/concepts/pipelines.md``.
        split_method: Who wrote ``split_points``, or what is made even over stages where there are
            none; ``docs/concepts/pipelines.md`` compares them. ``"manual"`` needs them.
        split_points: FQN of the first block of every stage but the first.
        microbatches: Equal parts that each rank's batch is cut into.
        virtual_stages: Stages per rank: one with ``"gpipe"`` and ``"1f1b"``, two or more with
            ``"interleaved_1f1b"``, two with ``"zbv"`` and ``"dualpipev"``, else any number.
        tail_modules: FQNs of modules outside the blocks, defined before them but called after
            them, so that they belong on the last stage.
        head_modules: FQNs of those defined after the blocks but called before them: on the first.
        called_behind: Of modules outside the blocks that are called between them or in several
            places, of parts of blocks that are called outside of their block, and of parameters
            that code around modules uses there: by FQN, the FQNs of the blocks behind each call,
            ``""`` before all of them.
        block_calls: FQNs of the blocks in the order in which forward calls them, where it calls
            one more than once; its second call is ``fqn#2`` in ``split_points``. None: each once,
            in the order of definition, or as an example is seen to call them.
        loss: Which scalar of what forward returns is the loss: an attribute or key, or a place in
            a tuple. None: what is called ``loss``, or the only one. Of
            ``batch.gradient_accumulation`` too.
        outputs: Who gets tensors that forward returns: the ranks of the last stage, or all. None:
            all ranks in evaluation, and in steps that are differentiated nobody.
        reduce_every: When gradients are summed over data-parallel ranks: once a step, or with
            ``data_parallel.zero_stage`` 2 or 3 behind every backward pass of a micro-batch, which
            keeps them sharded and sends as many times the bytes.
        offload_activations: Whether what a stage keeps for backward of a micro-batch that waits is
            in the host's memory meanwhile.
    """

    size: int = 1
    schedule: ScheduleName = "1f1b"
    split_method: SplitMethod = "uniform"
    split_points: tuple[str, ...] = ()
    microbatches: int = 1
    virtual_stages: int = 1
    tail_modules: tuple[str, ...] = ()
    head_modules: tuple[str, ...] = ()
    called_behind: Mapping[str, tuple[str, ...]] = field(
        default_factory=FrozenMapping[tuple[str, ...]]
    )
    block_calls: tuple[str, ...] = ()
    loss: str | int | None = None
    outputs: Literal["last", "broadcast"] | None = None
    reduce_every: Literal["step", "microbatch"] = "step"
    offload_activations: bool = False

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.size * self.virtual_stages

    @property
    def placement(self) -> StagePlacement:
        """Which rank has which stages."""
        return StagePlacement(self.size, self.virtual_stages, rule_of(self.schedule).style)

    def __post_init__(self) -> None:
        check_choices("pipeline_parallel.", self)
        check_size("pipeline_parallel.size", self.size)
        check_size("pipeline_parallel.microbatches", self.microbatches)
        check_size("pipeline_parallel.virtual_stages", self.virtual_stages)
        if self.loss is not None and (type(self.loss) not in (str, int) or self.loss == ""):
            raise ValueError(
                "expected pipeline_parallel.loss to be the name of an output of forward or its "
                f"place in a tuple, got {self.loss!r}"
            )
        object.__setattr__(self, "split_points", tuple(self.split_points))
        for name in ("block_calls", "tail_modules", "head_modules"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "called_behind", checked_places(self.called_behind))
        check_schedule(
            self.schedule,
            size=self.size,
            virtual_stages=self.virtual_stages,
            microbatches=self.microbatches,
            offloads=self.offload_activations,
        )
