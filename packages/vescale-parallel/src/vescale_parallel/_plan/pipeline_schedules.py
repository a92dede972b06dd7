"""What schedules of a pipeline are called, where they have stages, and what they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
]
Style = Literal["loop", "v"]


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Which pipeline rank has which stages.

    Attributes:
        size: Ranks along the pipeline axis.
        virtual_stages: Stages per rank.
        style: ``"loop"`` goes round the ranks (Narayanan et al. 2021b), ``"v"`` turns round at
            the last rank and at the first (Qi et al. 2024), so that two stages that follow each
            other are on one rank where it turns.

    Example:
        >>> [StagePlacement(2, 2, style).rank_of(stage) for style in ("loop", "v")
        ...     for stage in range(4)]
        [0, 1, 0, 1, 0, 1, 1, 0]
    """

    size: int
    virtual_stages: int = 1
    style: Style = "loop"

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.size * self.virtual_stages

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which has the loss."""
        return self.rank_of(self.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage."""
        chunk, offset = divmod(stage, self.size)
        return self.size - 1 - offset if self.style == "v" and chunk % 2 else offset

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in their order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What a schedule asks for.

    Attributes:
        virtual_stages: Fewest and most stages per rank; None is any number.
        style: Where it has them.
        in_groups: Whether micro-batches go round the ranks in groups of as many as there are
            ranks, where a rank has several stages.
        least_per_stage: Fewest micro-batches for each stage.
        splits_backward: Whether gradients of inputs and of weights are computed apart.
    """

    virtual_stages: tuple[int, int | None]
    style: Style = "loop"
    in_groups: bool = False
    least_per_stage: int = 0
    splits_backward: bool = False


SCHEDULE_RULES: dict[ScheduleName, ScheduleRule] = {
    "gpipe": ScheduleRule((1, 1)),
    "1f1b": ScheduleRule((1, 1)),
    "interleaved_1f1b": ScheduleRule((2, None), in_groups=True),
    "looped_bfs": ScheduleRule((1, None)),
    "interleaved_zero_bubble": ScheduleRule((1, None), in_groups=True, splits_backward=True),
    "zbv": ScheduleRule((2, 2), "v", splits_backward=True),
    "dualpipev": ScheduleRule((2, 2), "v", least_per_stage=1, splits_backward=True),
}


def rule_of(schedule: str) -> ScheduleRule:
    """Return what a schedule asks for."""
    return next(rule for name, rule in SCHEDULE_RULES.items() if name == schedule)


def refused_microbatches(
    schedule: str, *, size: int, virtual_stages: int, microbatches: int
) -> str | None:
    """Return what a schedule expects of micro-batches and did not get, None if all is well."""
    rule = rule_of(schedule)
    if rule.in_groups and virtual_stages > 1 and microbatches % size:
        return (
            "expected pipeline_parallel.microbatches to be a multiple of "
            f"pipeline_parallel.size ({size}) with schedule {schedule!r}, got {microbatches}"
        )
    least = rule.least_per_stage * size * virtual_stages
    if size > 1 and microbatches < least:
        return (
            f"expected pipeline_parallel.microbatches to be at least {least}, one for each of the "
            f"{size} x {virtual_stages} stages, with schedule {schedule!r}, got {microbatches}"
        )
    return None


def check_schedule(
    schedule: str, *, size: int, virtual_stages: int, microbatches: int, offloads: bool = False
) -> None:
    """Raise if a schedule has no order for these numbers.

    Raises:
        ValueError: With what was expected.
    """
    if size == 1:
        check_one_stage(microbatches, offloads=offloads)
    least, most = rule_of(schedule).virtual_stages
    interleaved = "interleaved_1f1b"
    if schedule in ("gpipe", "1f1b", interleaved):
        if (virtual_stages > 1) != (schedule == interleaved):
            raise ValueError(
                "expected pipeline_parallel.virtual_stages > 1 exactly with schedule "
                f"{interleaved!r}, got {virtual_stages} with {schedule!r}; other schedules of "
                "several stages a rank are 'looped_bfs', 'interleaved_zero_bubble', 'zbv' and "
                "'dualpipev'"
            )
    elif virtual_stages < least or (most is not None and virtual_stages > most):
        raise ValueError(
            f"expected pipeline_parallel.virtual_stages {most} with schedule {schedule!r}, whose "
            f"stages go down the ranks and back up, got {virtual_stages}"
        )
    refused = refused_microbatches(
        schedule, size=size, virtual_stages=virtual_stages, microbatches=microbatches
    )
    if refused is not None:
        raise ValueError(refused)


def check_one_stage(microbatches: int, *, offloads: bool) -> None:
    """Raise for what takes several ranks in a pipeline."""
    if microbatches > 1:
        raise ValueError(
            "pipeline_parallel.microbatches > 1 needs pipeline_parallel.size > 1, "
            f"got {microbatches} microbatches for one stage"
        )
    if offloads:
        raise ValueError(
            "pipeline_parallel.offload_activations is of micro-batches that wait for later "
            "stages: expected pipeline_parallel.size above 1, got 1"
        )
