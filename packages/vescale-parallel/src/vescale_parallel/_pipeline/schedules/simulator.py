"""Run all ranks of a schedule in one process, with the semantics of a communicator.

On a channel a rank runs its sends and receives in the order in which it issued them, one at a
time. A send and a receive meet when both are first in line, whatever they carry: there are no
tags. A send ends when its receive does (NCCL's rendezvous). Nothing else lets a rank wait but its
own ``Await`` and ``Retire``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vescale_parallel._plan.pipeline_schedules import StagePlacement, rule_of

from .action import Action, Kind
from .actions import actions_of
from .messages import (
    Await,
    Compute,
    Message,
    Operation,
    Receive,
    Reduce,
    ReduceEvery,
    Retire,
    Send,
    operations_of,
    received_by,
)

# A backward pass takes twice a forward pass, half of it for the weights.
SECONDS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class DeadlockError(Exception):
    """Ranks wait for each other: what each waits for."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank ran an action."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """What a schedule does.

    Attributes:
        spans: Every action of every rank.
        seconds: When the last one ends.
        bubble: Share of all ranks' time in which they wait.
        peak_activations: For every rank, the most micro-batches of its stages that wait for their
            backward at a time.
        peak_sends: For every rank, the most messages that it keeps at a time.
        peak_gradients: For every rank, the most stages at a time whose whole gradients it has,
            those that no reduction over data-parallel ranks has taken.
        reductions: Rank, stage and micro-batch of what was reduced by micro-batches, and when.
    """

    spans: tuple[Span, ...]
    seconds: float
    bubble: float
    peak_activations: tuple[int, ...]
    peak_sends: tuple[int, ...]
    peak_gradients: tuple[int, ...] = ()
    reductions: tuple[tuple[int, int, int, float], ...] = ()


@dataclass(eq=False)
class _Queued:
    """A send or a receive that a rank has issued; ``issued`` is when, ``done`` when it ended."""

    message: Message
    is_send: bool
    issued: float
    done: float | None = None


@dataclass(eq=False)
class _Rank:
    index: int
    left: deque[Operation]
    clock: float = 0.0
    # When the operation before the first in line of a channel ended.
    free: dict[int, float] = field(default_factory=dict[int, float])
    lines: dict[int, deque[_Queued]] = field(default_factory=dict[int, deque[_Queued]])
    issued: dict[tuple[bool, Message], _Queued] = field(
        default_factory=dict[tuple[bool, Message], _Queued]
    )
    done: set[Action] = field(default_factory=set[Action])
    arrived: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    spans: list[Span] = field(default_factory=list[Span])
    waiting: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    peak_activations: int = 0
    num_sends: int = 0
    peak_sends: int = 0
    unreduced: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    peak_gradients: int = 0
    reductions: list[tuple[int, int, int, float]] = field(
        default_factory=list[tuple[int, int, int, float]]
    )


def simulate_schedule(
    schedule: str,
    reduce_every: ReduceEvery = "step",
    /,
    *,
    size: int,
    virtual_stages: int,
    microbatches: int,
) -> Simulated:
    """Simulate a training step of a schedule by its name; see :func:`simulate`."""
    placement = StagePlacement(size, virtual_stages, rule_of(schedule).style)
    shape = {"size": size, "virtual_stages": virtual_stages, "microbatches": microbatches}
    orders = [actions_of(schedule, rank, **shape) for rank in range(size)]
    every: list[Sequence[Operation]] = [
        operations_of(orders, rank, placement, reduce_every=reduce_every) for rank in range(size)
    ]
    return simulate(every, placement)


def simulate(
    orders: Sequence[Sequence[Operation]],
    placement: StagePlacement,
    *,
    seconds: Mapping[Kind, float] = SECONDS,
    message_seconds: float = 0.0,
) -> Simulated:
    """Run what all ranks do, until all are done.

    Args:
        orders: For each rank.
        placement: Where stages are.
        seconds: How long an action of each kind takes.
        message_seconds: How long a message takes when both sides are there.

    Raises:
        DeadlockError: If ranks wait for each other forever.
        ValueError: If an action comes before what it depends on, or a receive meets another
            message than it is for.
    """
    ranks = [_Rank(index, deque(order)) for index, order in enumerate(orders)]
    while any(rank.left for rank in ranks):
        moved = [_advance(rank, placement, seconds) for rank in ranks]
        met = _deliver(ranks, message_seconds)
        if not any(moved) and not met:
            waits = [f"rank {rank.index}: {rank.left[0]}" for rank in ranks if rank.left]
            raise DeadlockError("; ".join(waits))
    spans = tuple(span for rank in ranks for span in rank.spans)
    end = max((span.end for span in spans), default=0.0)
    busy = sum(span.end - span.start for span in spans)
    return Simulated(
        spans,
        end,
        1 - busy / (end * len(ranks)) if end else 0.0,
        tuple(rank.peak_activations for rank in ranks),
        tuple(rank.peak_sends for rank in ranks),
        tuple(rank.peak_gradients for rank in ranks),
        tuple(each for rank in ranks for each in rank.reductions),
    )


def of_spans(spans: Sequence[Span], size: int) -> Simulated:
    """Return what ranks of a pipeline did, from when they did it.

    Raises:
        ValueError: If there is no span.
    """
    if not spans:
        raise ValueError(
            "expected the passes of a pipeline, got none: record_schedule() records calls of a "
            "model with pipeline_parallel.size above 1 inside of it"
        )
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    ranks = [_Rank(index, deque()) for index in range(size)]
    for span in sorted(spans, key=lambda each: each.end):
        _count(ranks[span.rank], span.action)
    busy = sum(span.end - span.start for span in spans)
    return Simulated(
        tuple(replace(each, start=each.start - start, end=each.end - start) for each in spans),
        end - start,
        1 - busy / ((end - start) * size),
        tuple(rank.peak_activations for rank in ranks),
        (0,) * size,
    )


def _advance(rank: _Rank, placement: StagePlacement, seconds: Mapping[Kind, float]) -> bool:
    """Run a rank until it waits; return whether it did anything."""
    before = len(rank.left)
    while rank.left and _run(rank, rank.left[0], placement, seconds):
        rank.left.popleft()
    return len(rank.left) < before


def _run(
    rank: _Rank, operation: Operation, placement: StagePlacement, seconds: Mapping[Kind, float]
) -> bool:
    """Run one operation, unless it has to wait."""
    match operation:
        case Compute(action):
            _check_dependencies(rank, action, placement)
            end = rank.clock + seconds[action.kind]
            rank.spans.append(Span(rank.index, action, rank.clock, end))
            rank.clock = end
            rank.done.add(action)
            _count(rank, action)
        case Receive(message) | Send(message):
            is_send = isinstance(operation, Send)
            queued = _Queued(message, is_send, rank.clock)
            rank.lines.setdefault(message.channel, deque()).append(queued)
            rank.issued[is_send, message] = queued
            rank.num_sends += is_send
            rank.peak_sends = max(rank.peak_sends, rank.num_sends)
        case Reduce():
            _reduce(rank, operation)
        case Await(message) | Retire(message):
            is_send = isinstance(operation, Retire)
            queued = rank.issued[is_send, message]
            if queued.done is None:
                return False
            rank.clock = max(rank.clock, queued.done)
            rank.num_sends -= is_send
            if not is_send:
                rank.arrived.add((message.lane.kind, message.stage, message.microbatch))
    return True


def _count(rank: _Rank, action: Action) -> None:
    key = (action.stage, action.microbatch)
    if action.kind == "F":
        rank.waiting.add(key)
        rank.peak_activations = max(rank.peak_activations, len(rank.waiting))
    elif action.kind != "I":
        rank.waiting.discard(key)
        rank.unreduced.add(key)
        held = len({stage for stage, _ in rank.unreduced})
        rank.peak_gradients = max(rank.peak_gradients, held)


def _reduce(rank: _Rank, operation: Reduce) -> None:
    """Take gradients away; raise if a stage is reduced that has a pass left that gives some."""
    stage, microbatch = operation.stage, operation.microbatch
    if microbatch is not None:
        if (stage, microbatch) not in rank.unreduced:
            raise ValueError(
                f"rank {rank.index} reduces micro-batch {microbatch} of stage {stage}, of which "
                "it has no gradients"
            )
        rank.unreduced.discard((stage, microbatch))
        rank.reductions.append((rank.index, stage, microbatch, rank.clock))
        return
    later = [each.action for each in rank.left if isinstance(each, Compute)]
    if any(action.stage == stage for action in later):
        raise ValueError(f"rank {rank.index} reduces stage {stage} before its last pass")
    rank.unreduced = {each for each in rank.unreduced if each[0] != stage}


def _check_dependencies(rank: _Rank, action: Action, placement: StagePlacement) -> None:
    stage, microbatch = action.stage, action.microbatch
    needed: list[list[Action]] = []  # of each, one
    if action.kind == "F" and stage > 0 and placement.rank_of(stage - 1) == rank.index:
        needed.append([Action("F", stage - 1, microbatch)])
    if action.kind in ("B", "I"):
        needed.append([Action("F", stage, microbatch)])
        last = stage == placement.num_stages - 1
        if not last and placement.rank_of(stage + 1) == rank.index:
            needed.append([Action(kind, stage + 1, microbatch) for kind in ("B", "I")])
    if action.kind == "W":
        needed.append([Action("I", stage, microbatch)])
    missing = [each for each in needed if not rank.done & {*each}]
    message = received_by(action, placement)
    key = ("F" if action.kind == "F" else "B", stage, microbatch)
    if missing or (message is not None and key not in rank.arrived):
        raise ValueError(
            f"rank {rank.index} runs {action} before "
            f"{missing[0][0] if missing else message} is there"
        )


def _deliver(ranks: Sequence[_Rank], message_seconds: float) -> bool:
    """Let sends and receives meet that are both first in line; return whether any did."""
    met = False
    for rank in ranks:
        for channel, line in rank.lines.items():
            while line and line[0].is_send:
                target = ranks[line[0].message.lane.target]
                theirs = target.lines.get(channel)
                if not theirs or theirs[0].is_send:
                    break
                if theirs[0].message.lane.source != rank.index:
                    break
                _meet(rank, target, line.popleft(), theirs.popleft(), message_seconds)
                met = True
    return met


def _meet(
    source: _Rank, target: _Rank, send: _Queued, receive: _Queued, message_seconds: float
) -> None:
    if send.message != receive.message:
        raise ValueError(f"rank {target.index} expects {receive.message}, gets {send.message}")
    channel = send.message.channel
    ready = [send.issued, receive.issued]
    ready += [rank.free.get(channel, 0.0) for rank in (source, target)]
    done = max(ready) + message_seconds
    send.done = receive.done = done
    source.free[channel] = target.free[channel] = done
