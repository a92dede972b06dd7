"""What is known of a choice, as data: where time and memory go, what is next, what would help."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from vescale_parallel import ParallelPlan
from vescale_planner._prices.cost import Cost, seconds
from vescale_planner._search.ranking import ScoredCandidate, SearchResult
from vescale_planner._search.search import Search
from vescale_planner._space.layouts import divisors_of
from vescale_planner.prediction import Prediction

from .page import Page, html_of
from .predicted import prediction
from .reasons import gib, runners_up

NUM_ALTERNATIVES = 10
# Differences below this part of the step are not worth a word.
_WORTH_SAYING = 0.005


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best plan of other sizes of the axes.

    Attributes:
        plan: In words.
        times: Its time by that of the choice, for the same batch.
        memory_bytes: Of its fullest rank.
        loses: What it spends more on, and less, in parts of the choice's step.
    """

    plan: str
    times: float
    memory_bytes: int
    loses: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """What the best plan would be if something was different; priced, not tried.

    Attributes:
        what: Is different.
        times: Time a row of the batch by that of the choice; None if nothing fits then.
        plan: In words.
    """

    what: str
    times: float | None
    plan: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan was chosen.

    Attributes:
        plan: The choice.
        prediction: Where its time and memory go.
        cluster: Name of the machines.
        memory_limit_bytes: Of a device of theirs.
        alternatives: Best first, ten at most.
        changes: A larger batch, faster links, more memory, fewer ranks.
        front: Seconds of a step and bytes of plans than which none is faster and smaller.
        stages: Blocks of every stage, first and last.
    """

    plan: ParallelPlan
    prediction: Prediction
    cluster: str
    memory_limit_bytes: int
    alternatives: tuple[Alternative, ...]
    changes: tuple[Change, ...]
    front: tuple[tuple[float, int], ...]
    stages: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        spent = asdict(self.prediction.breakdown)
        step = self.prediction.step_seconds
        lines = [f"step: {seconds(step)} on {self.cluster}"]
        lines += [
            f"  {name.replace('_', ' ')}: {seconds(value)}, {value / step:.1%}"
            for name, value in spent.items()
            if value
        ]
        fullest = max(self.prediction.memory, key=lambda each: each.total)
        lines.append(f"memory: {gib(fullest.total)} of {gib(self.memory_limit_bytes)}")
        lines += [f"  {n}: {gib(v)}" for n, v in asdict(fullest).items() if v]
        lines += [
            f"next: {each.plan}: {each.times:.3g} x the time, {gib(each.memory_bytes)}; "
            f"{each.loses}"
            for each in self.alternatives
        ]
        lines += [
            f"with {each.what}: "
            + ("nothing fits" if each.times is None else f"{each.times:.3g} x the time a row")
            + (f", {each.plan}" if each.plan else "")
            for each in self.changes
        ]
        return "\n".join((*lines, *self.plan.reasons))

    def to_html(self) -> str:
        """Return one page with pictures, which loads nothing from anywhere."""
        alternatives = [
            (each.plan, f"{each.times:.3g}", gib(each.memory_bytes), each.loses)
            for each in self.alternatives
        ]
        changes = [
            (each.what, "nothing fits" if each.times is None else f"{each.times:.3g}", each.plan)
            for each in self.changes
        ]
        return html_of(
            Page(
                plan=self.plan,
                prediction=self.prediction,
                cluster=self.cluster,
                memory_limit_bytes=self.memory_limit_bytes,
                front=self.front,
                stages=self.stages,
                alternatives=alternatives,
                changes=changes,
            )
        )


def explanation(
    plan: ParallelPlan, result: SearchResult, search: Search, world_size: int
) -> Explanation:
    """Return what is known of the first candidate of a result, whose plan is given."""
    winner = result.fits[0]
    return Explanation(
        plan=plan,
        prediction=prediction(winner.candidate, search, search.workload.assumptions),
        cluster=search.cluster.name,
        memory_limit_bytes=search.cluster.memory_bytes,
        alternatives=tuple(
            Alternative(
                plan=str(each.candidate),
                times=each.seconds_per_row / winner.seconds_per_row,
                memory_bytes=each.needed_bytes,
                loses=_difference(each, winner),
            )
            for each in runners_up(result, NUM_ALTERNATIVES)
        ),
        changes=(
            *_other_machines(winner, search, world_size),
            *_fewer_ranks(winner, search, world_size),
        ),
        front=_front((*result.fits, *result.too_large)),
        stages=_stages(winner, search),
    )


def _difference(other: ScoredCandidate, winner: ScoredCandidate) -> str:
    """Return what another spends more and less on, the most first."""
    step, mine, yours = winner.step_seconds, winner.cost, other.cost
    found = {
        each.name.replace("_", " "): (getattr(yours, each.name) - getattr(mine, each.name)) / step
        for each in fields(Cost)
    }
    said = sorted(found.items(), key=lambda item: -abs(item[1]))
    words = [f"{value:+.1%} {name}" for name, value in said[:4] if abs(value) > _WORTH_SAYING]
    return ", ".join(words) or "nothing to speak of"


def _other_machines(winner: ScoredCandidate, search: Search, world_size: int) -> Iterator[Change]:
    cluster, given = search.cluster, search.constraints
    batch = search.rows(world_size).global_size
    fixed: Mapping[str, Any] = {**given, "batch.global_size": batch}
    larger = {**given, "batch.global_size": 2 * batch}
    yield _change("twice the batch", winner, search, larger, world_size)
    machines = {
        "links inside nodes twice as fast": {
            "intra_bytes_per_second": 2 * cluster.intra_bytes_per_second
        },
        "links between nodes twice as fast": {
            "inter_bytes_per_second": 2 * cluster.inter_bytes_per_second
        },
        "twice the memory": {"memory_bytes": 2 * cluster.memory_bytes},
    }
    for what, changed in machines.items():
        other = replace(search, cluster=replace(cluster, **changed))
        yield _change(what, winner, other, fixed, world_size)


def _fewer_ranks(winner: ScoredCandidate, search: Search, world_size: int) -> Iterator[Change]:
    """Yield fewer ranks with the same batch where they are as fast or faster."""
    batch = search.rows(world_size).global_size
    given = {**search.constraints, "batch.global_size": batch}
    for ranks in divisors_of(world_size, None)[:-1]:
        what = f"{ranks} of {world_size} ranks"
        found = _change(what, winner, search, given, ranks)
        if found.times is not None and found.times <= 1:
            yield found


def _change(
    what: str,
    winner: ScoredCandidate,
    search: Search,
    constraints: Mapping[str, Any],
    world_size: int,
) -> Change:
    try:
        result = search.under(constraints, keeps_sharding=True).run(world_size)
    except ValueError:  # no sizes of the axes multiply to so many ranks
        return Change(what=what, times=None, plan="")
    if not result.fits:
        return Change(what=what, times=None, plan="")
    best = min(result.fits, key=lambda each: (each.seconds_per_row, each.candidate))
    times = best.seconds_per_row / winner.seconds_per_row
    return Change(what=what, times=times, plan=str(best.candidate))


def _front(scored: tuple[ScoredCandidate, ...]) -> tuple[tuple[float, int], ...]:
    """Return (seconds, bytes) of those than which no other is faster and smaller."""
    found: list[tuple[float, int]] = []
    for each in sorted(scored, key=lambda s: (s.step_seconds, s.needed_bytes)):
        if not found or each.needed_bytes < found[-1][1]:
            found.append((each.step_seconds, each.needed_bytes))
    return tuple(found)


def _stages(winner: ScoredCandidate, search: Search) -> tuple[tuple[str, str], ...]:
    names = search.workload.block_names
    if not names:
        return ()
    starts = [*search.starts(winner.candidate), len(names)]
    return tuple((names[start], names[end - 1]) for start, end in itertools.pairwise(starts))
