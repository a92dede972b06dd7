"""Every combination of sizes that the constraints and the model allow, and why others are not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vescale_parallel import (
    ContextParallel,
    DataParallel,
    ScheduleName,
    refused_microbatches,
    rule_of,
)

from .layouts import (
    ACCUMULATION,
    Layout,
    divisors_of,
    is_interleaving_asked_for,
    is_pipeline_asked_for,
)
from .recomputation import Recompute, priced_recompute

PREFETCH, REDUCTION = "data_parallel.prefetch", "data_parallel.reduction"
RESHARD = "data_parallel.reshard_after_forward"
REPLICATE = "data_parallel.replicate_size"
SHARE_STATE = "data_parallel.replicate_zero_stage"
ATTENDS = "context_parallel.method"
Attends = Literal["all_to_all", "ring", "gather"]


@dataclass(frozen=True, order=True, kw_only=True)
class Candidate:
    """One plan before its details are filled in.

    Attributes:
        recompute: How blocks run again in backward.
        rows: Rows of the batch that one data-parallel replica gets in a step.
        recomputed: Share of the blocks of a stage that run again, where not all do.
        accumulation: Of ``batch.gradient_accumulation``: how many times ``microbatches``.
        prefetch: Blocks that ZeRO 3 gathers ahead.
        reduction: How gradients are summed over ranks.
        reshards: Whether ZeRO 3 frees blocks between forward and backward.
        offload: What is on the host.
        shares_state: Whether the ``replicate`` copies share out the optimizer state (HFSDP).
        attends: How ranks attend that share a sequence: ``"gather"`` is what Llama 3 did (keys and
            values of all, sec. 3.3.2), which vescale does not.
    """

    layout: Layout
    zero_stage: int
    replicate: int
    schedule: ScheduleName
    virtual_stages: int
    microbatches: int
    recompute: Recompute
    rows: int
    recomputed: float = 1.0
    accumulation: int = 1
    prefetch: int = DataParallel.prefetch
    reduction: Literal["ordered", "library"] = DataParallel.reduction
    reshards: bool = True
    offload: Literal["none", "optimizer", "parameters"] = DataParallel.offload
    shares_state: bool = False
    attends: Attends = ContextParallel.method

    @property
    def parts(self) -> int:
        """What a replica's rows are cut into, run one after the other."""
        return self.microbatches * self.accumulation

    @property
    def rows_of_part(self) -> float:
        """Rows of one micro-batch; of a row of which a rank has a part, that part."""
        return self.rows / self.parts / self.layout.cp

    @property
    def shard(self) -> int:
        """Ranks that share one copy of the sharded state; those of a sequence are among them."""
        return self.layout.dp * self.layout.cp // self.copies if self.zero_stage else 1

    @property
    def copies(self) -> int:
        """Of the sharded state: ranks that share experts have copies of everything else."""
        return max(self.replicate, self.layout.ep)

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.layout.pp * self.virtual_stages

    @property
    def moving_parts(self) -> int:
        """How much machinery it needs: decides between equally fast candidates."""
        axes = (
            self.layout.dp, self.layout.tp, self.layout.pp, self.layout.cp, self.layout.ep
        )  # fmt: skip
        return (
            10 * sum(size > 1 for size in axes)
            + self.zero_stage
            + (self.zero_stage > 0 and self.copies > 1)
            + self.shares_state
            + (not self.reshards)
            + 4 * (self.virtual_stages > 1)
            + (self.schedule == "gpipe")
            + 5 * (self.recompute != "none")
            + (self.recomputed < 1)
            + 2 * (self.accumulation > 1)
        )

    def __str__(self) -> str:
        words = [str(self.layout)]
        if self.zero_stage:
            copies = f" in {self.copies} copies" if self.copies > 1 else ""
            copies += " of what is no expert" if self.layout.ep > 1 else ""
            copies += " that share out the optimizer state" if self.shares_state else ""
            kept = "" if self.reshards else ", gathered once a step"
            words.append(f"ZeRO {self.zero_stage}{copies}{kept}")
        if self.layout.pp > 1:
            words.append(f"{counted(self.microbatches, 'micro-batch', 'es')} ({self.schedule})")
        if self.accumulation > 1:
            words.append(f"gradient accumulation {self.accumulation}")
        if self.recompute != "none":
            in_part = " but for products" if self.recompute == "selective" else ""
            of = "" if self.recomputed == 1 else f" of {self.recomputed:.0%} of blocks"
            words.append(f"activations{of} recomputed{in_part}")
        return ", ".join(words)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number and its noun."""
    return f"{number} {noun}{'' if number == 1 else plural}"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is known of the batch.

    Attributes:
        global_size: Rows of one step over all ranks.
        example: Rows of the example batch.
        is_stated: Whether nobody constrained ``global_size``: see :func:`.layouts.stated_batch`.
    """

    global_size: int
    example: int | None
    is_stated: bool = False

    def of_replica(self, dp: int, microbatches: int) -> int:
        """Return the rows of one replica, 0 if they cannot be cut evenly."""
        whole = self.global_size % (dp * microbatches) == 0
        return self.global_size // dp if whole else 0


def candidates(
    layout: Layout,
    rows: Rows,
    block_names: Sequence[str],
    constraints: Mapping[str, Any],
    *,
    accumulates: bool = False,
    experts: Sequence[int] = (1,),
) -> Iterator[Candidate | str]:
    """Yield the candidates of a layout, or sentences that say why there is none.

    Args:
        layout: Sizes of the mesh axes, but of ``ep``.
        rows: What is known of the batch.
        block_names: Of the model.
        constraints: Of the plan.
        accumulates: Whether the rows of a replica without a pipeline are cut, unasked.
        experts: By how many ranks experts may be shared, unasked.
    """
    get, num_blocks = constraints.get, len(block_names)
    if layout.pp > 1 and num_blocks < layout.pp * (get("pipeline_parallel.virtual_stages") or 1):
        yield _too_many_stages(layout.pp, get("pipeline_parallel.virtual_stages") or 1, num_blocks)
        return
    copies, asked = get(REPLICATE) or 1, get("expert_parallel.size")
    if layout.dp % copies:
        yield f"{REPLICATE} {copies} does not divide data_parallel.size {layout.dp}"
        return
    if asked and layout.dp * layout.cp % asked:
        yield f"expert_parallel.size {asked} does not divide data_parallel.size {layout.dp}"
        return
    if get(SHARE_STATE) and layout.dp == copies:
        yield f"{SHARE_STATE} 1 needs data_parallel.size above {REPLICATE} {copies}"
        return
    sharded = [
        (replace(layout, ep=size), *each)
        for size in ([asked] if asked else experts)
        for each in _shardings(replace(layout, ep=size), constraints)
    ]
    for pipeline in _pipelines(layout, rows, num_blocks, constraints):
        if isinstance(pipeline, str):
            yield pipeline
            continue
        schedule, virtual_stages, microbatches, rows_of_replica = pipeline
        accumulations = [get(ACCUMULATION) or 1]
        if accumulates and layout.pp == 1:
            accumulations = divisors_of(rows_of_replica, None)
        choices = itertools.product(
            accumulations,
            sharded,
            _recomputations(get("recompute"), block_names),
        )
        for accumulation, (sizes, zero_stage, copies, reshards, shares), again in choices:
            yield Candidate(
                layout=sizes,
                zero_stage=zero_stage,
                replicate=copies,
                schedule=schedule,
                virtual_stages=virtual_stages,
                microbatches=microbatches,
                recompute=again[0],
                rows=rows_of_replica,
                recomputed=again[1],
                accumulation=accumulation,
                prefetch=get(PREFETCH, DataParallel.prefetch),
                reduction=get(REDUCTION, DataParallel.reduction),
                reshards=reshards,
                offload=get("data_parallel.offload", DataParallel.offload),
                shares_state=shares,
                attends=get(ATTENDS, ContextParallel.method),
            )


def _shardings(
    layout: Layout, constraints: Mapping[str, Any]
) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield (ZeRO stage, copies of the sharded state, frees blocks, copies share their state).

    Unasked, any number of copies is tried that divides: each may be inside a node then. Under
    stage 3 they may share out the optimizer state, and blocks may stay gathered until backward.
    Ranks that share experts have copies of everything else, and no other ranks have.
    """
    get = constraints.get
    # Of ranks of a sequence, too, where experts are shared by more than the batch is.
    replicate = max(get(REPLICATE) or 1, math.gcd(layout.ep, layout.dp))
    frees, shares = get(RESHARD, True) is not False, get(SHARE_STATE) == 1
    unasked = get(REPLICATE) is None and not shares and replicate == 1
    on_device = get("data_parallel.offload", DataParallel.offload) == "none"
    for zero_stage in _zero_stages(layout, replicate, constraints):
        yield zero_stage, replicate, frees, shares
        # The sequence's ranks are among those that shard.
        several = zero_stage == 3 and on_device and layout.dp * layout.cp > replicate
        if several and get(RESHARD) is None:
            yield zero_stage, replicate, False, shares
        if not zero_stage or not unasked:
            continue
        for copies in divisors_of(layout.dp, None)[1:-1]:
            yield zero_stage, copies, frees, shares
            if several and get(SHARE_STATE) is None:
                yield zero_stage, copies, frees, True
            if several and get(RESHARD) is None:
                yield zero_stage, copies, False, False


def _too_many_stages(pp: int, virtual_stages: int, num_blocks: int) -> str:
    return (
        f"expected at most {num_blocks} pipeline stages, one per block, got "
        f"{pp * virtual_stages} (pipeline_parallel.size {pp} x virtual_stages {virtual_stages})"
    )


def _recomputations(
    fixed: Recompute | Mapping[str, Recompute] | None, block_names: Sequence[str]
) -> tuple[tuple[Recompute, float], ...]:
    """Return (how blocks run again, which share of them does)."""
    if fixed is None:
        return ("none", 1.0), ("full", 1.0)
    return (priced_recompute(fixed, block_names) or ("none", 1.0),)


def _zero_stages(
    layout: Layout, replicate: int, constraints: Mapping[str, Any]
) -> tuple[int, ...]:
    fixed = constraints.get("data_parallel.zero_stage")
    if fixed is not None:
        return (fixed,)
    if layout.dp * (layout.cp if layout.ep > 1 else 1) == max(replicate, layout.ep):
        return (0,)
    # Hybrid sharding was asked for, and stage 0 would replicate everything.
    is_hybrid = (constraints.get(REPLICATE) or 1) > 1
    return (1, 2, 3) if is_hybrid else (0, 1, 2, 3)


def _pipelines(
    layout: Layout, rows: Rows, num_blocks: int, constraints: Mapping[str, Any]
) -> Iterator[tuple[ScheduleName, int, int, int] | str]:
    """Yield (schedule, virtual stages, micro-batches, rows of a replica)."""
    get = constraints.get
    any_rows = False
    schedules = _schedules(layout.pp, num_blocks, constraints)
    if not schedules:
        named = get("pipeline_parallel.schedule")
        yield (
            f"pipeline_parallel.schedule {named or 'interleaved_1f1b'!r} needs "
            "pipeline_parallel.size above 1 and two blocks a rank, "
            f"got size {layout.pp} and {num_blocks} blocks"
        )
    points = get("pipeline_parallel.split_points")
    for schedule, virtual_stages in schedules:
        stages = layout.pp * virtual_stages
        if points is not None and stages != len(points) + 1:
            yield (
                f"{len(points)} pipeline_parallel.split_points make {len(points) + 1} stages, "
                f"pipeline_parallel.size {layout.pp} x virtual_stages {virtual_stages} is {stages}"
            )
            continue
        fixed = get("pipeline_parallel.microbatches")
        if fixed is not None and layout.pp == 1 and fixed > 1:
            yield f"pipeline_parallel.microbatches {fixed} needs pipeline_parallel.size above 1"
            return
        options = [fixed] if fixed else _microbatches(layout, rows)
        if layout.pp > 1 and not is_pipeline_asked_for(constraints):
            few = not options or max(options) < layout.pp
            options = [count for count in options if count >= layout.pp]
            if few:
                yield (
                    f"{counted(stages, 'pipeline stage')} need {layout.pp} micro-batches or more "
                    "to work at the same time, and a replica gets "
                    f"{counted(rows.global_size // layout.dp, 'row')}"
                )
        for microbatches in options:
            refused = refused_microbatches(
                schedule,
                size=layout.pp,
                virtual_stages=virtual_stages,
                microbatches=microbatches,
            )
            if refused is not None:
                if is_interleaving_asked_for(constraints):
                    yield refused
                continue
            accumulation = get(ACCUMULATION) or 1
            found = rows.of_replica(layout.dp, microbatches * accumulation)
            if found:
                any_rows = True
                yield schedule, virtual_stages, microbatches, found
            elif not any_rows:
                yield _uneven(rows, layout.dp, microbatches * accumulation)


def _uneven(rows: Rows, dp: int, microbatches: int) -> str:
    if rows.is_stated:
        return (
            f"{counted(rows.global_size, 'row')} of a step, as in the example batch, cannot be "
            f"split over data_parallel.size {dp} in {microbatches} equal micro-batches; constrain "
            "batch.global_size"
        )
    return (
        f"expected batch.global_size to be a multiple of data_parallel.size x "
        f"pipeline_parallel.microbatches x batch.gradient_accumulation "
        f"({dp} x {microbatches} = {dp * microbatches}), "
        f"got {rows.global_size}"
    )


def _schedules(
    pp: int, num_blocks: int, constraints: Mapping[str, Any]
) -> list[tuple[ScheduleName, int]]:
    """Return every schedule that may be, and its stages per rank.

    Those besides 1F1B and its interleaved form only if constrained: "gpipe" takes the time of
    "1f1b" and more memory; what the others win depends on times that are not known this well.
    Interleaved, a rank has two stages, or any number that gives all of them as many blocks, or the
    first and the last one less: what is before and behind takes its place (Llama 3, sec. 3.3.2).
    """
    schedule: ScheduleName | None = constraints.get("pipeline_parallel.schedule")
    virtual: int | None = constraints.get("pipeline_parallel.virtual_stages")
    interleaved = is_interleaving_asked_for(constraints)
    if schedule is None and interleaved:
        schedule = "interleaved_1f1b"
    if pp == 1:
        return [] if interleaved else [(schedule or "1f1b", 1)]
    if schedule is not None:
        least, most = rule_of(schedule).virtual_stages
        if most == 1:
            return [(schedule, 1)]
        options = range(least, (most or 4) + 1)
        fitting = [virtual] if virtual else [v for v in options if pp * v <= num_blocks]
        return [(schedule, v) for v in fitting]
    several: list[tuple[ScheduleName, int]] = [
        ("interleaved_1f1b", v)
        for v in range(2, num_blocks // pp + 1)
        if virtual != 1 and (v == 2 or 0 in (num_blocks % (pp * v), (num_blocks + 2) % (pp * v)))
    ]
    return [("1f1b", 1), *several]


def _microbatches(layout: Layout, rows: Rows) -> list[int]:
    if layout.pp == 1:
        return [1]
    return divisors_of(max(1, rows.global_size // layout.dp), None)
