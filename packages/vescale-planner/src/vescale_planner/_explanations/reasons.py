"""Say in sentences why a plan was chosen, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vescale_planner._experts import EVEN_EXPERTS
from vescale_planner._prices.cost import seconds
from vescale_planner._prices.memory import UNTIMED_OFFLOAD, Memory, needed_bytes
from vescale_planner._search.ranking import TIE, ScoredCandidate, SearchResult
from vescale_planner._space.candidates import PREFETCH, REDUCTION, RESHARD, counted
from vescale_planner._space.layouts import ACCUMULATION, Layout
from vescale_planner._workload import Workload
from vescale_planner.cluster import Cluster

NUM_RUNNERS_UP = 3
_SHOWN = 8
# What methods to split a pipeline count that a run would tell.
_ESTIMATED = {"flops": "flops", "memory": "bytes", "auto": "times"}


def reasons(
    result: SearchResult,
    workload: Workload,
    cluster: Cluster,
    constraints: Mapping[str, Any],
    split: str,
) -> tuple[str, ...]:
    """Return why the winner won, why others did not, and what was assumed."""
    winner = result.fits[0]
    per_row = seconds(winner.seconds_per_row)
    where = f"{per_row} a row of the batch on {cluster.name}"
    overhead = (
        f"x {cluster.fragmentation} fragmentation and {gib(cluster.reserved_bytes)} reserved"
    )
    lines = [
        f"{winner.candidate}: {where}, a step is {winner.cost}",
        (
            f"memory of the fullest rank: {_itemized(winner.memory)}, {overhead}, "
            f"of {gib(cluster.memory_bytes)}"
        ),
    ]
    accumulation = winner.candidate.accumulation
    if accumulation > 1 and ACCUMULATION not in constraints:
        whole = any(each.candidate.accumulation == 1 for each in result.fits)
        why = "fewer activations at once" if whole else "nothing fits with all rows at once"
        lines.append(
            f"{ACCUMULATION} {accumulation}: {why}; each rank runs {winner.candidate.rows} rows "
            f"in {accumulation} micro-batches, one after the other, and forward has to return its "
            "loss"
        )
    fastest = min(result.fits, key=lambda s: (s.seconds_per_row, s.candidate))
    if fastest.candidate != winner.candidate:
        slower = winner.seconds_per_row / fastest.seconds_per_row - 1
        lines.append(
            f"a tie: {fastest.candidate} is predicted {slower:.1%} faster, within the "
            f"{TIE - 1:.0%} that count as equal; the plan with fewer moving parts was chosen"
        )
    lines += _data_parallel(winner, constraints)
    lines += _runners_up(result)
    lines += _too_large(result, cluster)
    lines += [f"not possible: {reason}" for reason in result.rejected[:NUM_RUNNERS_UP]]
    if len(result.rejected) > NUM_RUNNERS_UP:
        lines.append(f"not possible: {len(result.rejected) - NUM_RUNNERS_UP} more combinations")
    lines += [f"assumed: {note}" for note in workload.assumptions]
    if winner.candidate.layout.ep > 1:
        lines.append(f"assumed: {EVEN_EXPERTS}")
    if winner.candidate.layout.cp > 1 and not workload.observed:
        lines.append("assumed: attention can be sliced, which the runtime compares when it starts")
    lines += _about_rows(winner, workload, constraints)
    if winner.candidate.layout.pp > 1 and split in _ESTIMATED and not workload.observed:
        what = _ESTIMATED[split]
        lines.append(f"assumed: stages are balanced by estimated {what}; give example_batch")
    return tuple(lines)


def _data_parallel(winner: ScoredCandidate, constraints: Mapping[str, Any]) -> list[str]:
    """Return what options of data parallelism change that the candidate's name does not say."""
    candidate, lines = winner.candidate, list[str]()
    if PREFETCH in constraints:
        if candidate.zero_stage < 3 or candidate.shard == 1:
            why = "no effect: nothing is gathered block by block without ZeRO 3"
        elif candidate.prefetch == 0:
            why = "one block is whole at a time, and compute waits for every gather"
        else:
            blocks = counted(candidate.prefetch + 1, "block")
            why = f"the parameters of {blocks} are whole at the same time"
        lines.append(f"{PREFETCH} {candidate.prefetch}: {why}")
    if not candidate.reshards:
        lines.append(f"{RESHARD} False: blocks are gathered once a step, and whole until backward")
    elif RESHARD in constraints and constraints[RESHARD] is not True:
        lines.append(f"assumed: blocks are freed after forward whatever {RESHARD} says of some")
    if candidate.offload != "none":
        lines.append(f"data_parallel.offload {candidate.offload!r}: {UNTIMED_OFFLOAD}")
    if candidate.reduction == "library":
        lines.append(
            f"{REDUCTION} 'library': gradients are summed in the backend's own order, not to the "
            "bits of one device"
        )
    return lines


def left_whole(parameters: Mapping[str, str]) -> list[str]:
    """Return what tensor parallelism could not shard, a few reasons in full."""
    shown = [f"replicated: {name}: {why}" for name, why in list(parameters.items())[:_SHOWN]]
    if len(parameters) > _SHOWN:
        shown.append(f"replicated: {len(parameters) - _SHOWN} more")
    return shown


def runners_up(result: SearchResult, count: int = NUM_RUNNERS_UP) -> list[ScoredCandidate]:
    """Return the best of every other layout, best first, ``count`` at most."""
    winner = result.fits[0]
    best: dict[Layout, ScoredCandidate] = {}
    for each in sorted(result.fits, key=lambda s: (s.seconds_per_row, s.candidate)):
        if each.candidate.layout != winner.candidate.layout:
            best.setdefault(each.candidate.layout, each)
    return list(best.values())[:count]


def _runners_up(result: SearchResult) -> list[str]:
    """Return how much slower the others are."""
    winner = result.fits[0]
    lines: list[str] = []
    for each in runners_up(result):
        ratio = each.seconds_per_row / winner.seconds_per_row
        tied = ratio <= TIE and each.candidate.moving_parts >= winner.candidate.moving_parts
        verdict = f"{ratio:.3g} x the time"
        verdict += ", as good as equal, and more moving parts" if tied else ""
        lines.append(f"next: {each.candidate}: {verdict} ({each.cost})")
    if lines:
        lines.append("the next ones are priced; only what is returned was tried as well")
    return lines


def _too_large(result: SearchResult, cluster: Cluster) -> list[str]:
    """Return the simplest layouts that do not fit."""
    fitting = {each.candidate.layout for each in result.fits}
    best: dict[Layout, ScoredCandidate] = {}
    for each in result.too_large:
        if each.candidate.layout not in fitting:
            best.setdefault(each.candidate.layout, each)
    chosen = sorted(best.values(), key=lambda s: (s.candidate.moving_parts, s.needed_bytes))
    return [
        f"too large: {each.candidate} needs {gib(each.needed_bytes)} of "
        f"{gib(cluster.memory_bytes)}"
        for each in chosen[:2]
    ]


def _about_rows(
    winner: ScoredCandidate, workload: Workload, constraints: Mapping[str, Any]
) -> list[str]:
    candidate = winner.candidate
    if constraints.get("batch.global_size") is not None:
        return []
    size = candidate.layout.dp * candidate.rows
    origin = "one for each rank" if workload.rows is None else "an example_batch for each rank"
    rows = counted(candidate.rows, "row")
    note = (
        f"assumed: a global batch of {counted(size, 'row')} for all plans ({origin} that may be "
        f"data parallel, {2**24:,} tokens at most), {rows} a data-parallel rank; constrain "
        "batch.global_size to say otherwise"
    )
    return [note]


def nothing_fits(result: SearchResult, cluster: Cluster, helpers: Mapping[str, Memory]) -> str:
    """Return by how much the smallest candidate is too large, and what would help.

    Args:
        result: The search's result.
        cluster: The machines.
        helpers: What could be changed, and the memory it would take then.
    """
    least = result.too_large[0]
    missing = least.needed_bytes - cluster.memory_bytes
    fits = [
        change
        for change, memory in helpers.items()
        if needed_bytes(memory, cluster) <= cluster.memory_bytes
    ]
    advice = f"would fit: {'; '.join(fits)}" if fits else "use more ranks or larger devices"
    return (
        f"expected a plan of at most {gib(cluster.memory_bytes)} a rank ({cluster.name}), but "
        f"the smallest ({least.candidate}) needs {gib(least.needed_bytes)}, "
        f"{gib(missing)} too much: {_itemized(least.memory)}; {advice}; if it is for other "
        "machines, give cluster"
    )


def _itemized(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "model output": memory.output,
    }
    return ", ".join(f"{name} {gib(value)}" for name, value in parts.items() if value)


def gib(nbytes: float) -> str:
    """Return a size with three digits and a fitting unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes / 2**10:.3g} KiB"
