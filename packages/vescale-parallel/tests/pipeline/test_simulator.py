"""Every schedule with its messages, run by the simulator; and torch's schedules beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from vescale_parallel._pipeline.schedules import Action, actions_of, order_of_passes
from vescale_parallel._pipeline.schedules.messages import (
    Await,
    Compute,
    Lane,
    Message,
    Operation,
    Receive,
    Reduce,
    Retire,
    Send,
    channels_of,
    operations_of,
    received_by,
    sent_by,
)
from vescale_parallel._pipeline.schedules.simulator import (
    DeadlockError,
    simulate,
    simulate_schedule,
)
from vescale_parallel._plan.pipeline_schedules import (
    SCHEDULE_RULES,
    StagePlacement,
    refused_microbatches,
    rule_of,
)

Case = tuple[str, int, int, int]


def cases(sizes: range, microbatches: tuple[int, ...]) -> list[Case]:
    return [*_cases(sizes, microbatches)]


def _cases(sizes: range, microbatches: tuple[int, ...]) -> Iterator[Case]:
    for schedule, rule in SCHEDULE_RULES.items():
        least, most = rule.virtual_stages
        for size in sizes:
            for virtual in range(least, (most or 3) + 1):
                for count in microbatches:
                    shape = {"size": size, "virtual_stages": virtual, "microbatches": count}
                    if refused_microbatches(schedule, **shape) is None:
                        yield schedule, size, virtual, count


def orders_of(schedule: str, size: int, virtual: int, count: int) -> list[tuple[Action, ...]]:
    shape = {"size": size, "virtual_stages": virtual, "microbatches": count}
    return [actions_of(schedule, rank, **shape) for rank in range(size)]


def placement_of(schedule: str, size: int, virtual: int) -> StagePlacement:
    return StagePlacement(size, virtual, rule_of(schedule).style)


def check(case: Case) -> None:
    """No deadlock, every pass once and in order, and no wait for what is let go."""
    schedule, size, virtual, count = case
    placement, orders = placement_of(schedule, size, virtual), orders_of(*case)
    operations = [operations_of(orders, rank, placement) for rank in range(size)]
    found = simulate(operations, placement)
    kept = [[each for each in order if not isinstance(each, Retire)] for order in operations]
    assert simulate(kept, placement).seconds == found.seconds
    done: dict[tuple[str, int], list[int]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            assert placement.rank_of(action.stage) == rank
            done.setdefault((action.kind, action.stage), []).append(action.microbatch)
    for stage in range(placement.num_stages):
        assert done["F", stage] == list(range(count))
        backwards = done.get(("B", stage), []) + done.get(("I", stage), [])
        assert sorted(backwards) == list(range(count))
        assert done.get(("W", stage), []) == done.get(("I", stage), [])


@pytest.mark.parametrize("case", cases(range(2, 5), (1, 2, 3, 4, 8)), ids=str)
def test_no_schedule_deadlocks(case: Case) -> None:
    check(case)


@pytest.mark.nightly
@pytest.mark.parametrize("size", range(2, 17))
def test_no_schedule_of_many_ranks_deadlocks(size: int) -> None:
    counts = (*range(1, 9), 12, 16, 24, 31, 32, 48, 63, 64, size, 2 * size, 3 * size)
    for case in cases(range(size, size + 1), tuple(sorted({n for n in counts if n <= 64}))):
        check(case)


@pytest.mark.parametrize("case", cases(range(2, 4), (1, 4)), ids=str)
def test_every_micro_batch_is_reduced_once_and_one_stage_has_whole_gradients(case: Case) -> None:
    schedule, size, virtual, count = case
    shape = {"size": size, "virtual_stages": virtual, "microbatches": count}
    often = simulate_schedule(schedule, "microbatch", **shape)
    once = simulate_schedule(schedule, **shape)
    assert often.seconds == once.seconds
    reduced = [(stage, microbatch) for _, stage, microbatch, _ in often.reductions]
    assert sorted(reduced) == [(s, m) for s in range(size * virtual) for m in range(count)]
    assert often.peak_gradients == (1,) * size
    assert once.reductions == ()
    assert max(once.peak_gradients) <= virtual


def test_a_micro_batch_without_gradients_cannot_be_reduced() -> None:
    placement = StagePlacement(1)
    order: list[Operation] = [Compute(Action("F", 0, 0)), Reduce(0, 0)]
    with pytest.raises(ValueError, match="reduces micro-batch 0 of stage 0, of which it has no"):
        simulate([order], placement)


@pytest.mark.parametrize("style", ["loop", "v"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_all_forward_and_then_all_backward_passes_do_not_deadlock(
    style: str, size: int, count: int
) -> None:
    placement = StagePlacement(size, 2, "v" if style == "v" else "loop")
    operations: list[list[Operation]] = [[] for _ in range(size)]
    for kind in ("F", "B"):
        orders = [order_of_passes(kind, rank, placement, count) for rank in range(size)]
        for rank in range(size):
            operations[rank] += operations_of(orders, rank, placement)
    found = simulate(operations, placement)
    assert len(found.spans) == 2 * size * 2 * count


def on_two_channels(order: tuple[Action, ...], placement: StagePlacement) -> list[Operation]:
    """Activations on one channel, gradients on another; receives when they are needed."""

    def moved(message: Message | None) -> Message | None:
        if message is None:
            return None
        channel = "FB".index(message.lane.kind)
        return Message(message.lane, channel, message.stage, message.microbatch)

    operations: list[Operation] = []
    for action in order:
        needed, sent = moved(received_by(action, placement)), moved(sent_by(action, placement))
        operations += [] if needed is None else [Receive(needed), Await(needed)]
        operations.append(Compute(action))
        operations += [] if sent is None else [Send(sent)]
    return operations


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("virtual", [2, 3])
def test_one_channel_a_direction_deadlocks_where_stages_go_round(size: int, virtual: int) -> None:
    """Why channels have one sender and one receiver each."""
    orders = orders_of("interleaved_1f1b", size, virtual, 2 * size)
    placement = StagePlacement(size, virtual)
    with pytest.raises(DeadlockError, match="rank 0: Await"):
        simulate([on_two_channels(order, placement) for order in orders], placement)
    check(("interleaved_1f1b", size, virtual, 2 * size))


def test_messages_that_meet_by_order_alone_are_compared() -> None:
    first, second = (Message(Lane("F", 0, 1), 0, 1, microbatch) for microbatch in (0, 1))
    placement = StagePlacement(2)
    for wrong, right in (((first,), (second,)), ((first, second), (second, first))):
        orders = [[*map(Send, wrong)], [*map(Receive, right), *map(Await, right)]]
        with pytest.raises(ValueError, match=r"rank 1 expects .*microbatch=1"):
            simulate(orders, placement)
    with pytest.raises(ValueError, match="rank 1 runs 1F0 before"):
        simulate([[], [Compute(Action("F", 1, 0))]], placement)
    with pytest.raises(ValueError, match="rank 0 runs 0B0 before 0F0"):
        simulate([[Compute(Action("B", 0, 0))], []], StagePlacement(1))


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("style", ["loop", "v"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_on_a_channel_a_rank_has_one_partner(size: int, virtual: int, style: str) -> None:
    placement = StagePlacement(size, virtual, "v" if style == "v" else "loop")
    ends: dict[tuple[int, int], list[Lane]] = {}
    for lane, channel in channels_of(placement).items():
        for rank in (lane.source, lane.target):
            ends.setdefault((channel, rank), []).append(lane)
    assert all(len(lanes) == 1 for lanes in ends.values())


def test_peaks_and_bubbles_are_those_of_the_literature() -> None:
    p, m = 4, 16

    def simulated(schedule: str, virtual: int) -> tuple[tuple[int, ...], float]:
        found = simulate_schedule(schedule, size=p, virtual_stages=virtual, microbatches=m)
        return found.peak_activations, round(found.seconds, 6)

    # A forward of one stage takes a second, a whole backward two.
    assert simulated("gpipe", 1) == ((m,) * p, 3 * (m + p - 1))
    assert simulated("1f1b", 1) == (tuple(range(p, 0, -1)), 3 * (m + p - 1))
    kept = tuple(2 * (p - rank - 1) + p + 1 for rank in range(p))
    assert simulated("interleaved_1f1b", 2) == (kept, 3 * (2 * m + p - 1))
    assert simulated("looped_bfs", 2) == ((2 * m,) * p, 3 * (2 * m + p - 1))
    # ZB-H1: a third of the bubble; ZBV with the memory of 1F1B.
    assert simulated("interleaved_zero_bubble", 1) == ((p,) * p, 3 * m + p - 1)
    assert simulated("zbv", 2) == ((2 * p,) * p, 6 * m + p - 1)
    assert simulated("dualpipev", 2) == ((2 * p + 1,) * p, 6 * m + p - 1)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_few_messages_are_kept_however_many_microbatches(schedule: str) -> None:
    virtual = rule_of(schedule).virtual_stages[0]
    peaks = {
        count: simulate_schedule(schedule, size=4, virtual_stages=virtual, microbatches=count)
        for count in (12, 24)
    }
    assert peaks[12].peak_sends == peaks[24].peak_sends
    assert max(peaks[24].peak_sends) <= 4 * virtual


_KINDS: dict[str, Any] = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}
_CLASSES = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
}


def of_torch(case: Case, rank: int) -> list[Action]:
    """Return torch's order of a rank; without its constructor, which wants modules."""
    schedule, size, virtual, count = case
    cls = _CLASSES[schedule]
    made: Any = object.__new__(cls)
    rounds = max(1, count // size)
    vars(made).update(
        pp_group_size=size, rank=rank, _n_microbatches=count, n_local_stages=virtual,
        _num_stages=size * virtual, num_stages=size * virtual, number_of_rounds=rounds,
        microbatches_per_round=count // rounds, _stages=[None] * virtual,
    )  # fmt: skip
    order = (
        made._get_pipeline_order()[rank]
        if schedule in ("gpipe", "1f1b")
        else made._calculate_single_rank_operations(rank)
    )
    found: list[Action] = []
    for each in order:
        for part in () if each is None else each.sub_actions or (each,):
            kind = _KINDS.get(part.computation_type.name)
            if kind is not None:  # not what data parallelism does at the end
                found.append(Action(kind, part.stage_index, part.microbatch_index))
    return found


@pytest.mark.parametrize(
    "case",
    # Torch lists forwards that 1F1B has not when there are fewer micro-batches than ranks.
    [each for each in cases(range(2, 5), (2, 4, 6, 8, 12)) if each[0] != "1f1b" or each[3] > 3],
    ids=str,
)
def test_orders_are_those_of_torch(case: Case) -> None:
    schedule, _, _, count = case
    if schedule == "looped_bfs":
        # Torch's backwards begin with the last micro-batch: gradients are summed in another order.
        reverse = {"B": lambda k: count - 1 - k, "F": lambda k: k}
    else:
        reverse = dict.fromkeys("FBIW", lambda k: k)
    for rank, order in enumerate(orders_of(*case)):
        theirs = [
            Action(each.kind, each.stage, reverse[each.kind](each.microbatch))
            for each in of_torch(case, rank)
        ]
        if schedule == "1f1b" and rank == case[1] - 1:
            # There it counts them from 1.
            theirs = [
                Action("F", each.stage, each.microbatch - 1) if each.kind == "F" else each
                for each in theirs
            ]
        assert list(order) == theirs
