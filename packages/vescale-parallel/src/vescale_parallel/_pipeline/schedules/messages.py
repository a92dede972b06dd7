"""What ranks of a pipeline send each other, over which channel and when: a plan, as data.

[Note: channels without tags]
NCCL ignores tags, and runs the operations of a communicator on a rank in the order in which they
were issued; a send ends when its receive has begun. So two ranks that send to each other first,
over one communicator, wait forever, and so does a ring of ranks that all do. A lane is the
messages of one kind from one rank to another; both have them in one order. Every channel (a
process group of all ranks of the pipeline) carries lanes that have no rank in common: on a channel
a rank only sends to one rank, or only receives from one. No message then waits for another one
that does not come before it in its lane. Megatron-LM's groups of even and odd ranks are the two
channels of the forward passes of a plain pipeline.

[Note: when a tensor is let go]
A rank that waits for a send to end may wait for a rank that waits for it. So it only does when a
message from there says that the tensor has arrived: an activation's gradient is one. Gradients of
the last micro-batches are answered by nothing. Where a rank has one stage, they go one way only,
from the last rank to the first, and all but two are waited for; else those that are left are let
go at the end. (Backends that tell whether a send has ended are asked at every send.) Windows for
all messages deadlock: a first stage runs ahead by as many micro-batches as the schedule says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vescale_parallel._plan.pipeline_schedules import StagePlacement

from .action import Action

ReduceEvery = Literal["step", "microbatch"]
# Tensors of a lane, of which nothing will be heard, that are kept: one moves while the next is
# computed.
_WINDOW = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """The messages of one kind from one rank to another.

    Attributes:
        kind: ``"F"`` activations, ``"B"`` their gradients.
        source: Rank along the pipeline axis.
        target: Likewise.
    """

    kind: Literal["F", "B"]
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor that one rank sends another.

    Attributes:
        lane: Of what kind it is, and between whom.
        channel: Index of the process group.
        stage: The stage that receives it.
        microbatch: Index of the micro-batch.
    """

    lane: Lane
    channel: int
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an action."""

    action: Action


@dataclass(frozen=True, slots=True)
class Receive:
    """Begin to receive a message, without waiting for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a message has arrived."""

    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send a message, without waiting for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Retire:
    """Wait until a message was sent, and let go of its tensor."""

    message: Message


@dataclass(frozen=True, slots=True)
class Reduce:
    """Begin to sum the gradients of a stage over data-parallel ranks.

    Attributes:
        stage: Index of the stage.
        microbatch: Of which these are, None if of all: then the stage has all of them.
    """

    stage: int
    microbatch: int | None = None


Operation = Compute | Receive | Await | Send | Retire | Reduce


def operations_of(
    orders: Sequence[Sequence[Action]],
    rank: int,
    placement: StagePlacement,
    *,
    reduce_every: ReduceEvery = "step",
) -> tuple[Operation, ...]:
    """Return what a rank does in order: its actions, and the messages around them.

    A receive begins one action before the action that needs it, so that it runs along with that
    one. See [Note: when a tensor is let go] for sends.

    Args:
        orders: The actions of every rank; those of its neighbours are looked at.
        rank: Whose.
        placement: Where stages are.
        reduce_every: Whether a stage is reduced behind its last backward pass, or behind each.
    """
    operations = list(_without_retiring(orders[rank], placement, reduce_every))
    sent = [each.message for each in operations if isinstance(each, Send)]
    targets = {message.lane.target for message in sent}
    told: dict[Message, frozenset[Message]] = {}
    for target in targets:
        told |= _known_to_have_arrived(_without_retiring(orders[target], placement), rank)
    returned = set[Message]().union(*(told.get(m, ()) for m in _awaited(operations)))
    in_flight: dict[Lane, list[Message]] = {}
    done: list[Operation] = []
    arrived: frozenset[Message] = frozenset()
    for operation in operations:
        if isinstance(operation, Send):
            kept = in_flight.setdefault(operation.message.lane, [])
            # Nothing will be heard of it.
            alone = [each for each in kept if each not in returned]
            if placement.virtual_stages == 1 and len(alone) == _WINDOW:
                kept.remove(alone[0])
                done.append(Retire(alone[0]))
            kept.append(operation.message)
        done.append(operation)
        if isinstance(operation, Await):
            arrived = told.get(operation.message, arrived)
        # Behind the action, which waits for the message that tells it where it needs it.
        if isinstance(operation, Compute) and arrived:
            for lane, kept in in_flight.items():
                done += [Retire(each) for each in kept if each in arrived]
                in_flight[lane] = [each for each in kept if each not in arrived]
            arrived = frozenset()
    return (*done, *(Retire(each) for kept in in_flight.values() for each in kept))


def _without_retiring(
    actions: Sequence[Action], placement: StagePlacement, reduce_every: ReduceEvery = "step"
) -> Iterator[Operation]:
    needs = [received_by(action, placement) for action in actions]
    # Every stage's last action that gives its weights gradients.
    ends = {action.stage: action for action in actions if action.kind in ("B", "W")}
    if needs and needs[0] is not None:
        yield Receive(needs[0])
    for action, needed, ahead in zip(actions, needs, [*needs[1:], None], strict=True):
        if ahead is not None:
            yield Receive(ahead)
        if needed is not None:
            yield Await(needed)
        yield Compute(action)
        message = sent_by(action, placement)
        if message is not None:
            yield Send(message)
        # Behind what others wait for.
        if reduce_every == "microbatch" and action.kind in ("B", "W"):
            yield Reduce(action.stage, action.microbatch)
        if reduce_every == "step" and ends.get(action.stage) == action:
            yield Reduce(action.stage)


def _awaited(operations: Iterable[Operation]) -> list[Message]:
    return [each.message for each in operations if isinstance(each, Await)]


def _known_to_have_arrived(
    operations: Iterable[Operation], rank: int
) -> dict[Message, frozenset[Message]]:
    """Return for every message to a rank what of it has arrived since the one before."""
    found: dict[Message, frozenset[Message]] = {}
    since: list[Message] = []
    for operation in operations:
        if isinstance(operation, Await) and operation.message.lane.source == rank:
            since.append(operation.message)
        if isinstance(operation, Send) and operation.message.lane.target == rank:
            found[operation.message] = frozenset(since)
            since = []
    return found


def received_by(action: Action, placement: StagePlacement) -> Message | None:
    """Return what an action needs of another rank, None if it needs nothing."""
    if action.kind == "F":
        return _message("F", action.stage - 1, action.stage, action, placement)
    if action.kind in ("B", "I"):
        return _message("B", action.stage + 1, action.stage, action, placement)
    return None


def sent_by(action: Action, placement: StagePlacement) -> Message | None:
    """Return what another rank needs of an action, None if none does."""
    if action.kind == "F":
        return _message("F", action.stage, action.stage + 1, action, placement)
    if action.kind in ("B", "I"):
        return _message("B", action.stage, action.stage - 1, action, placement)
    return None


def _message(
    kind: Literal["F", "B"], sender: int, receiver: int, action: Action, placement: StagePlacement
) -> Message | None:
    if not (0 <= sender < placement.num_stages and 0 <= receiver < placement.num_stages):
        return None
    lane = Lane(kind, placement.rank_of(sender), placement.rank_of(receiver))
    if lane.source == lane.target:
        return None
    return Message(lane, channels_of(placement)[lane], receiver, action.microbatch)


@functools.cache
def channels_of(placement: StagePlacement) -> dict[Lane, int]:
    """Return the channel of every lane; see [Note: channels without tags].

    Example:
        >>> list(channels_of(StagePlacement(3)).values())
        [0, 1, 2, 3]
    """
    channels: dict[Lane, int] = {}
    taken: set[tuple[int, int]] = set()
    last = placement.num_stages - 1
    for kind in ("F", "B"):
        for stage in range(last):
            ends = placement.rank_of(stage), placement.rank_of(stage + 1)
            lane = Lane(kind, *(ends if kind == "F" else ends[::-1]))
            if lane.source == lane.target or lane in channels:
                continue
            channel = 0
            while taken & {(channel, lane.source), (channel, lane.target)}:
                channel += 1
            taken |= {(channel, lane.source), (channel, lane.target)}
            channels[lane] = channel
    return channels
