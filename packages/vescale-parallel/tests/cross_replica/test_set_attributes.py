"""Attributes that a module's caller has set since it was looked at."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from vescale_parallel._cross_replica.set_attributes import Attributes, put


def _layer() -> Any:
    layer = cast("Any", nn.Sequential(nn.Linear(2, 2)))
    layer.scale, layer.note = 1.0, [torch.zeros(1)]
    return layer


def test_what_others_set_is_told_by_module_and_name() -> None:
    layer = _layer()
    known = Attributes(layer)
    assert known.set_since(layer) == {}
    style = torch.ones(2)
    layer[0].style, layer.scale = style, 2.0
    assert known.set_since(layer) == {("", "scale"): 2.0, ("0", "style"): style}


def test_what_a_module_sets_itself_is_not() -> None:
    layer = _layer()
    known = Attributes(layer)
    layer.latest = torch.ones(2)
    known.note(layer)
    assert known.set_since(layer) == {}


def test_a_copy_is_set_alike() -> None:
    first, second = _layer(), _layer()
    known = Attributes(first)
    first[0].style = torch.ones(2)
    put(known.set_since(first), second)
    assert second[0].style is first[0].style


def test_a_module_that_has_come_since_tells_nothing() -> None:
    layer = _layer()
    known = Attributes(layer)
    layer[0] = nn.Linear(2, 2)
    layer[0].style = torch.ones(2)
    assert known.set_since(layer) == {}
