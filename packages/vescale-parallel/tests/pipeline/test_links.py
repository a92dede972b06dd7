"""Tensors between ranks: what they look like is learned once, and held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_parallel._pipeline.execution.links import Links
from vescale_parallel._pipeline.schedules.messages import Lane, Message

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
FIRST, SECOND, THIRD = (Message(Lane("F", 0, 1), 0, 1, index) for index in range(3))


def step(rank: int) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    links = Links([group], torch.device("cpu"))
    if rank == 1:
        for message in (FIRST, SECOND):
            links.receive(message, "form", None)
        return [links.arrived(message, "form", None).tolist() for message in (FIRST, SECOND)]
    links.send(FIRST, torch.arange(2.0), "form")
    links.send(SECOND, torch.arange(2.0) + 1, "form")
    with pytest.raises(ValueError, match=r"of shape \(2,\) .* got \(3,\) .* micro-batch 2;"):
        links.send(THIRD, torch.arange(3.0), "form")
    for message in (FIRST, SECOND):
        links.retire(message)
    return [links.num_kept]


def test_an_activation_of_another_shape_than_the_first_is_refused(in_threads: InThreads) -> None:
    assert in_threads(2, step) == [[0], [[0, 1], [1, 2]]]
