"""Tensors between ranks: what they look like is learned once, and held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_parallel._pipeline.execution.links import Bundle, Links
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
        arrived = [links.arrived(message, "form") for message in (FIRST, SECOND)]
        return [bundle.tensors[0].tolist() for bundle in arrived]
    links.send(FIRST, Bundle.of([torch.arange(2.0)]), "form")
    links.send(SECOND, Bundle.of([torch.arange(2.0) + 1]), "form")
    with pytest.raises(ValueError, match=r"of shape \(2,\) .* got \(3,\) .* micro-batch 2;"):
        links.send(THIRD, Bundle.of([torch.arange(3.0)]), "form")
    for message in (FIRST, SECOND):
        links.retire(message)
    return [links.num_kept]


def test_an_activation_of_another_shape_than_the_first_is_refused(in_threads: InThreads) -> None:
    assert in_threads(2, step) == [[0], [[0, 1], [1, 2]]]


def several(rank: int) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    links = Links([group], torch.device("cpu"))
    if rank == 1:
        found: list[Any] = []
        for message in (FIRST, SECOND):
            links.receive(message, "form", None)
            bundle = links.arrived(message, "form", num_tensors=3)
            tensors = zip(bundle.tensors, bundle.has_grad, strict=True)
            found.append([(x.tolist(), x.dtype, has) for x, has in tensors])
        return found
    trained = torch.ones(1, requires_grad=True)
    for message in (FIRST, SECOND):
        bundle = Bundle.of([torch.tensor([True, False]), trained * 2, torch.zeros(())])
        links.send(message, bundle, "form")
        links.retire(message)
    with pytest.raises(
        ValueError, match=r"depend on trained parameters in every call of one form"
    ):
        links.send(THIRD, Bundle.of([torch.tensor([True, False]), trained, trained.sum()]), "form")
    return []


def test_a_message_of_several_tensors_says_which_gradients_are_sent_back(
    in_threads: InThreads,
) -> None:
    expected = [([True, False], torch.bool, False), ([2.0], torch.float32, True)]
    expected.append((0.0, torch.float32, False))  # pyright: ignore[reportArgumentType]: of no dims
    assert in_threads(2, several) == [[], [expected, expected]]


def test_one_gradient_is_sent_back_at_least() -> None:
    frozen = [torch.ones(2, dtype=torch.int64), torch.ones(2), torch.ones(2)]
    assert Bundle.of(frozen).has_grad == [False, True, False]
    with torch.no_grad():
        assert Bundle.of(frozen).has_grad == [False, False, False]
