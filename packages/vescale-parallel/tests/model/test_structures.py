"""Tests of structures that pytree opens once they were met."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vescale_parallel._model.structures import flattened, leaves_of
from vescale_parallel._torch_private import pytree


@dataclass(frozen=True, slots=True)
class Inner:
    x: Tensor
    note: str = "inner"


@dataclass
class Outer:
    """Its constructor wants a list, and one field has no value at first."""

    layers: list[Inner]
    table: dict[str, Tensor]
    later: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.layers, "is not made of nothing"


@dataclass
class Numbers:
    count: int


@dataclass
class MadeByItself:
    x: Tensor

    def __new__(cls, *_: Any) -> MadeByItself:
        return super().__new__(cls)


def test_dataclasses_are_filled_with_other_tensors() -> None:
    made = Outer([Inner(torch.ones(2)), Inner(torch.zeros(1), "last")], {"t": torch.ones(3)})
    vars(made)["seen"] = {1}
    leaves, spec = flattened((made, 3))
    assert [type(leaf) for leaf in leaves] == [Tensor, str, Tensor, str, Tensor, int]
    doubled, three = pytree.tree_unflatten(
        [leaf * 2 if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )
    assert (type(doubled), three) == (Outer, 3)
    assert [(each.x.tolist(), each.note) for each in doubled.layers] == [
        ([2.0, 2.0], "inner"),
        ([0.0], "last"),
    ]
    assert doubled.table["t"].tolist() == [2.0, 2.0, 2.0]
    assert vars(doubled)["seen"] == {1}
    assert not hasattr(doubled, "later")
    assert made.layers[0].x.tolist() == [1.0, 1.0]


def test_namespaces_have_what_they_have_when_they_are_met() -> None:
    for names in ("ab", "cde"):
        made = SimpleNamespace(**{name: torch.ones(2) for name in names})
        leaves, spec = flattened([made])
        (filled,) = pytree.tree_unflatten(leaves, spec)
        assert filled == made
        assert filled is not made


@pytest.mark.parametrize(
    "shut", [Numbers(3), MadeByItself(torch.ones(2)), Outer, torch.nn.Linear(2, 2), range(3)]
)
def test_other_objects_stay_as_they_are(shut: Any) -> None:
    leaves, _ = flattened([shut])
    assert leaves == [shut]


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "tree",
    [
        None,
        torch.ones(2),
        (),
        [(), {}, None],
        ([torch.ones(2), {"a": (1, "b")}], {"c": None, "d": [True, 2.5]}),
        Pair(torch.ones(1), [torch.ones(2), Pair(1, 2)]),
        {"ordered": OrderedDict(b=torch.ones(1), a=2), "queue": deque([torch.ones(1), 3])},
        [torch.nn.Parameter(torch.ones(1)), defaultdict(list, x=[1, 2]), torch.Size([1, 2])],
        {"deep": [[[[torch.ones(1)]]]], "object": object()},
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_leaves_are_those_of_pytree(tree: Any) -> None:
    found, expected = leaves_of(tree), pytree.tree_leaves(tree)
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))
