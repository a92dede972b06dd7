"""Runs of forward in one step find attributes as they were; what the latest run left stays."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vescale_parallel._model.several_runs.attributes import Attributes, SeveralRuns


class Holder(nn.Module):
    """Holds attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.words = 1, ["a"]
        self.named, self.latest = {"a": 1}, deque([1], maxlen=2)
        self.mean, self.generator = torch.zeros(2), random.Random(0)


def write(holder: Any, value: int) -> None:
    holder.number += value
    holder.words.append(str(value))
    holder.named["b"] = value
    holder.latest.append(value)
    holder.mean.add_(value)
    holder.generator.random()
    holder.made = value


def kept(holder: Any) -> list[object]:
    held = holder.number, [*holder.words], dict(holder.named), [*holder.latest]
    return [
        *held,
        holder.mean.tolist(),
        holder.generator.getstate(),
        getattr(holder, "made", None),
    ]


def runs(holder: Holder, changes: list[Callable[[], None]]) -> SeveralRuns:
    found = SeveralRuns(Attributes(holder))
    for stage, change in enumerate(changes):
        with found.run(stage, is_kept=True):
            change()
    return found


def test_every_run_begins_with_what_was_there() -> None:
    holder = Holder()
    begin, seen = kept(holder), list[list[object]]()
    steps = runs(holder, [lambda: seen.append(kept(holder)) or write(holder, 2)] * 3)
    steps.end()
    assert seen == [begin] * 3


def test_what_the_latest_run_left_stays_as_if_it_were_the_only_one() -> None:
    holder, alone = Holder(), Holder()
    words, named = holder.words, holder.named
    runs(holder, [lambda: write(holder, 2), lambda: write(holder, 3)]).end()
    write(alone, 3)
    assert kept(holder) == kept(alone)
    assert holder.words is words
    assert holder.named is named


def test_a_run_that_does_not_count_leaves_nothing() -> None:
    holder = Holder()
    begin, steps = kept(holder), SeveralRuns(Attributes(holder))
    with steps.run(0, is_kept=False):
        write(holder, 2)
    steps.end()
    assert kept(holder) == begin


def test_a_tensor_that_is_first_written_to_later_is_refused_by_name() -> None:
    holder = Holder()
    attributes = Attributes(holder)
    attributes.learn(set())
    before = attributes.now()
    holder.mean.add_(1)
    with pytest.raises(ValueError, match="attribute 'mean' of 'the model' was written to by"):
        before.put_back()


def test_tensors_of_the_first_run_are_not_written_to_by_others() -> None:
    holder, seen = Holder(), list[torch.Tensor]()

    def look() -> None:
        write(holder, 2)
        seen.append(holder.mean)

    runs(holder, [look, look]).end()
    assert seen[0] is not seen[1]
    assert seen[0].tolist() == [2.0, 2.0]
