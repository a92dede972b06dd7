"""What ranks of a pipeline exchange in a step besides activations and their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)
from torch.utils._pytree import tree_leaves  # noqa: PLC2701 (no public name)

from vescale_testing import World

from .plans import PARTS
from .programs import PIPELINE, Plain, Run, both, right, rows
from .short_group import in_short_group
from .test_bad_input import check

_NUM_COMPARED_CALLS = 4  # whose inputs ranks compare


class Exchanged(TorchDispatchMode):
    """Notes every collective, with the bytes that this rank gets of it, and every message."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []
        self.messages: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        if name in {"c10d::send", "c10d::recv_"}:
            self.messages.append(name)
        elif name.startswith("c10d::"):
            nbytes = sum(t.nbytes for t in tree_leaves(args[0]) if torch.is_tensor(t))
            self.collectives.append((name, nbytes))
        return func(*args, **(kwargs or {}))


class Reports(Plain):
    """Returns its loss, scalars beside it, and for the same inputs another key once asked to."""

    def __init__(self, num_scalars: int) -> None:
        super().__init__()
        self.num_scalars = num_scalars
        self.more = False

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        loss = F.mse_loss(self.logits(batch), batch["y"])
        found: dict[str, Any] = {"loss": loss, "none": None}
        found |= {f"scalar{i}": loss.detach() * i for i in range(1, self.num_scalars)}
        return found | ({"more": loss.detach()} if self.more else {})


class WithWords(Plain):
    """Returns Python objects that are others in every call."""

    calls = 0

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        self.calls += self.training
        return {"loss": F.mse_loss(self.logits(batch), batch["y"]), "word": f"step {self.calls}"}


def exchanged_in_steps(num_scalars: int) -> list[tuple[list[tuple[str, int]], int]]:
    """Return the collectives and the number of messages of every step."""
    model, _ = Run(PIPELINE).start(Reports(num_scalars))
    found: list[tuple[list[tuple[str, int]], int]] = []
    for batch in rows(_NUM_COMPARED_CALLS + 2):
        with Exchanged() as seen:
            model(batch)["loss"].backward()
        found.append((seen.collectives, len(seen.messages)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_scalars", [1, 3])
def test_a_step_sends_what_its_schedule_says_and_one_gather(
    world2: World, num_scalars: int
) -> None:
    num_params = len([*Plain().parameters()])
    for steps in world2.run(exchanged_in_steps, num_scalars):
        assert len(steps[0][0]) > 2, "structures are told once"
        # Scalars, and which parameters have a gradient, of both ranks.
        expected = [("c10d::_allgather_base_", 2 * (8 * num_scalars + num_params))]
        for collectives, num_messages in steps[_NUM_COMPARED_CALLS:]:
            assert collectives == expected
            # An activation for each micro-batch, and its gradient.
            assert num_messages == 2 * PIPELINE[PARTS]


class Skips(Plain):
    """Runs without a block in one step, of the second stage and then of the first."""

    skipped: int | None = None

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for index, block in enumerate(self.blocks):
            x = block(x) if index != self.skipped else x + block(x.detach()).detach()
        return F.mse_loss(self.head(x), batch["y"])


def which_have_gradients(run: Run) -> None:
    model, _ = run.start(Skips())
    for batch, skipped in zip(rows(4), (None, 3, 1, None), strict=True):
        model.skipped = skipped
        model(batch).backward()
        for param in model.parameters():
            run.results.append(torch.tensor(float(param.grad is not None)))
            param.grad = None


@pytest.mark.slow
def test_a_parameter_has_a_gradient_on_all_ranks_or_on_none(world2: World) -> None:
    for found, expected in world2.run(both, which_have_gradients, PIPELINE):
        assert found == expected
        assert 0.0 in found


def words() -> list[str]:
    model, _ = Run(PIPELINE).start(WithWords())
    return [model(batch)["word"] for batch in rows(3)]


@pytest.mark.slow
def test_objects_that_change_arrive_on_every_stage(world2: World) -> None:
    first, last = world2.run(words)
    assert first == last
    assert len({*first}) == len(first)


def another_key() -> None:
    torch.manual_seed(0)
    model, _ = Run(PIPELINE).start(Reports(2))
    for step, batch in enumerate(rows(3)):
        model.more = step == 2
        model(batch)["loss"].backward()


@pytest.mark.slow
def test_another_structure_in_a_later_call_is_refused(world2: World, tmp_path: Path) -> None:
    message = "the same structure of scalars in every call .*return the same keys in every call"
    check(world2, Exception, message, in_short_group, str(tmp_path), another_key)
    world2.close()


def forms_of_calls() -> list[list[str]]:
    """Training, evaluation and batches of other sizes, each with keys of its own."""
    model, _ = Run(PIPELINE).start(Reports(1))
    found: list[list[str]] = []
    for trains in (True, False, True, False):
        model.train(trains)
        model.more = not trains
        output = model(rows(1)[0])
        found.append([key for key, value in output.items() if value is not None])
    return found


@pytest.mark.slow
def test_forms_of_call_have_structures_of_their_own(world2: World) -> None:
    expected = [["loss"], ["loss", "more"]] * 2
    assert world2.run(forms_of_calls) == [expected] * 2


class Counted(Plain):
    """Trains on classes, and notes how often its own forward runs.

    By identity: an attribute of its own would count calls of the model, one of the class the runs
    of copies, too.
    """

    runs: ClassVar[Counter[int]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.skips = 0
        self.register_buffer("unused", torch.ones(2))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        self.runs[id(self)] += 1
        targets = batch["targets"].masked_fill(batch["targets"] < self.skips, -100)
        return F.cross_entropy(self.logits(batch), targets)


def of_classes(count: int) -> list[dict[str, Tensor]]:
    return [{"x": batch["x"], "targets": batch["y"].abs().argmax(1)} for batch in rows(count)]


def counted_targets(run: Run) -> None:
    model, optimizer = run.start(Counted())
    for batch in of_classes(4):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def runs_of_steps() -> list[int]:
    model, _ = Run(PIPELINE).start(Counted())
    found: list[int] = []
    for batch in of_classes(3):
        before = model.runs[id(model)]
        model(batch).backward()
        found.append(model.runs[id(model)] - before)
    return found


@pytest.mark.slow
def test_targets_are_counted_without_forward_from_the_second_step_on(world2: World) -> None:
    microbatches = PIPELINE[PARTS]
    first, last = world2.run(runs_of_steps)
    assert first == [microbatches] * 3
    assert last[1:] == [microbatches] * 2
    right(world2, counted_targets, PIPELINE)


def other_targets() -> None:
    model, _ = Run(PIPELINE).start(Counted())
    for step, batch in enumerate(of_classes(3)):
        model.skips = 5 * step
        model(batch).backward()


@pytest.mark.slow
def test_targets_that_a_module_chooses_otherwise_later_are_refused(
    world2: World, tmp_path: Path
) -> None:
    message = "counted other targets of its loss than were counted before the step"
    check(world2, Exception, message, in_short_group, str(tmp_path), other_targets)
    world2.close()
