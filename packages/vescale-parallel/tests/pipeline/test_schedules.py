"""Schedules, run by a simulator that knows only what depends on what."""

import pytest

from vescale_parallel._pipeline.schedules import Action, actions_of, order_of_passes
from vescale_parallel._plan.pipeline_schedules import StagePlacement

CASES = [
    (schedule, size, 1, microbatches)
    for schedule in ("gpipe", "1f1b")
    for size in (2, 3, 4, 8)
    for microbatches in (1, 2, 3, 4, 7, 16)
] + [
    ("interleaved_1f1b", size, virtual, size * k)
    for size in (2, 3, 4)
    for virtual in (2, 3)
    for k in (1, 2, 3)
]


def programs_of(
    schedule: str, size: int, virtual: int, microbatches: int
) -> list[tuple[Action, ...]]:
    return [
        actions_of(schedule, rank, size=size, virtual_stages=virtual, microbatches=microbatches)
        for rank in range(size)
    ]


def needs(action: Action, num_stages: int) -> list[Action]:
    """Return what must have happened, on any rank, before an action can."""
    if action.kind == "F":
        return [Action("F", action.stage - 1, action.microbatch)] if action.stage else []
    before = [Action("F", action.stage, action.microbatch)]
    if action.stage < num_stages - 1:
        before.append(Action("B", action.stage + 1, action.microbatch))
    return before


@pytest.mark.parametrize(("schedule", "size", "virtual", "microbatches"), CASES)
def test_every_schedule_finishes(
    schedule: str, size: int, virtual: int, microbatches: int
) -> None:
    programs = programs_of(schedule, size, virtual, microbatches)
    done: set[Action] = set()
    positions = [0] * size
    while any(p < len(program) for p, program in zip(positions, programs, strict=True)):
        moved = False
        for rank, program in enumerate(programs):
            while positions[rank] < len(program) and done.issuperset(
                needs(program[positions[rank]], size * virtual)
            ):
                done.add(program[positions[rank]])
                positions[rank] += 1
                moved = True
        assert moved, f"deadlock at {positions}"


@pytest.mark.parametrize(("schedule", "size", "virtual", "microbatches"), CASES)
def test_every_pass_happens_once_and_where_its_stage_is(
    schedule: str, size: int, virtual: int, microbatches: int
) -> None:
    for rank, program in enumerate(programs_of(schedule, size, virtual, microbatches)):
        expected = {
            Action(kind, chunk * size + rank, microbatch)
            for kind in ("F", "B")
            for chunk in range(virtual)
            for microbatch in range(microbatches)
        }
        assert len(program) == len(expected)
        assert set(program) == expected


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_one_forward_one_backward_keeps_few_activations(size: int) -> None:
    for rank, program in enumerate(programs_of("1f1b", size, 1, 16)):
        kept = peak = 0
        for action in program:
            kept += 1 if action.kind == "F" else -1
            peak = max(peak, kept)
        assert peak == size - rank


@pytest.mark.parametrize(("size", "virtual", "microbatches"), [(2, 1, 3), (4, 2, 8)])
def test_passes_of_one_kind_alone_are_in_the_order_of_the_schedule(
    size: int, virtual: int, microbatches: int
) -> None:
    schedule = "1f1b" if virtual == 1 else "interleaved_1f1b"
    for rank, program in enumerate(programs_of(schedule, size, virtual, microbatches)):
        for kind in ("F", "B"):
            alone = order_of_passes(kind, rank, StagePlacement(size, virtual), microbatches)
            assert alone == tuple(action for action in program if action.kind == kind)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(("size", "virtual"), [(2, 1), (2, 2), (3, 2)])
def test_any_number_of_microbatches_passes_forward_and_back_without_waiting_in_a_circle(
    size: int, virtual: int, microbatches: int
) -> None:
    placement = StagePlacement(size, virtual)
    left = [
        [a for kind in ("F", "B") for a in order_of_passes(kind, rank, placement, microbatches)]
        for rank in range(size)
    ]
    done: set[Action] = set()
    while any(left):
        ready = [p for p in left if p and {*needs(p[0], size * virtual)} <= done]
        assert ready, "every rank waits for another one"
        done |= {program.pop(0) for program in ready}
    assert len(done) == 2 * size * virtual * microbatches


def _transfers(
    program: tuple[Action, ...], rank: int, size: int, virtual: int
) -> dict[tuple[str, str, int], list[Action]]:
    """Return what a rank sends and receives, in order, by pass and by the other rank."""
    found: dict[tuple[str, str, int], list[Action]] = {}
    last = size * virtual - 1
    for action in program:
        forward = 1 if action.kind == "F" else -1
        source, target = action.stage - forward, action.stage + forward
        if 0 <= source <= last:
            found.setdefault((action.kind, "receives", source % size), []).append(action)
        if 0 <= target <= last:
            # Named by the pass that needs it.
            needed = Action(action.kind, target, action.microbatch)
            found.setdefault((action.kind, "sends", target % size), []).append(needed)
    return found


@pytest.mark.parametrize(("schedule", "size", "virtual", "microbatches"), CASES)
def test_a_rank_receives_from_each_other_in_the_order_in_which_that_one_sends(
    schedule: str, size: int, virtual: int, microbatches: int
) -> None:
    """NCCL knows no tags: messages of one group between two ranks arrive in order."""
    programs = programs_of(schedule, size, virtual, microbatches)
    transfers = [_transfers(p, rank, size, virtual) for rank, p in enumerate(programs)]
    num_sends = 0
    for rank, (kind, what, peer) in [(r, key) for r, each in enumerate(transfers) for key in each]:
        if what == "sends":
            num_sends += 1
            assert transfers[rank][kind, what, peer] == transfers[peer][kind, "receives", rank]
    assert num_sends >= 2 * (size - 1)


@pytest.mark.parametrize(("schedule", "size", "virtual", "microbatches"), CASES)
def test_backward_passes_of_a_stage_are_in_the_order_of_its_forward_passes(
    schedule: str, size: int, virtual: int, microbatches: int
) -> None:
    """So that gradients are summed in the order of micro-batches on every stage."""
    for rank, program in enumerate(programs_of(schedule, size, virtual, microbatches)):
        for stage in range(rank, size * virtual, size):
            for kind in ("F", "B"):
                order = [a.microbatch for a in program if (a.kind, a.stage) == (kind, stage)]
                assert order == list(range(microbatches))


@pytest.mark.parametrize(("schedule", "size", "virtual", "microbatches"), CASES)
def test_ranks_idle_for_one_pass_each_way_per_other_rank(
    schedule: str, size: int, virtual: int, microbatches: int
) -> None:
    """The bubble of Narayanan et al. 2021b: of chunks where there are several, hence smaller."""
    programs = programs_of(schedule, size, virtual, microbatches)
    done: dict[Action, int] = {}  # to the tick after which its result is there
    positions = [0] * size
    tick = 0
    while any(p < len(program) for p, program in zip(positions, programs, strict=True)):
        for rank, program in enumerate(programs):
            if positions[rank] == len(program):
                continue
            action = program[positions[rank]]
            if all(done.get(each, tick) < tick for each in needs(action, size * virtual)):
                done[action] = tick
                positions[rank] += 1
        tick += 1
    assert tick == 2 * microbatches * virtual + 2 * (size - 1)
