"""Who wants to know is told of plain tensors beside distributed ones, until it ends that."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, Replicate, tell_plain_operands, untold
from vescale_testing import World


class Listener:
    def __init__(self, told: list[tuple[int, int]]) -> None:
        self.told = told

    def hear(self, func: Any, plain: Sequence[Tensor], distributed: Sequence[Any]) -> None:
        self.told.append((len(plain), len(distributed)))


def _distributed() -> DTensor:
    return DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), (Replicate(),))


def _told_until_stopped() -> None:
    told: list[tuple[int, int]] = []
    listener, x = Listener(told), _distributed()
    stop = tell_plain_operands(listener.hear)
    torch.mul(x, torch.ones(2))
    torch.mul(x, x)
    with untold():
        torch.mul(x, torch.ones(2))
    torch.where(x > 0, x, torch.zeros(2))
    assert told == [(1, 1), (1, 2)]
    stop()
    torch.mul(x, torch.ones(2))
    assert len(told) == 2


def _gone() -> None:
    told: list[tuple[int, int]] = []
    listener = Listener(told)
    tell_plain_operands(listener.hear)
    del listener
    gc.collect()
    torch.mul(_distributed(), torch.ones(2))
    assert not told


def test_plain_tensors_are_told_of_outside_of_untold(world2: World) -> None:
    world2.run(_told_until_stopped)


def test_a_listener_that_is_gone_is_not_told(world2: World) -> None:
    world2.run(_gone)
