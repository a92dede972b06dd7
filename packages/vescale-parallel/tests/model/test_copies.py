"""Tests of copies of what modules are called with."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vescale_parallel._model.copies import snapshot, tensors_within


class Uncopied(nn.Linear):
    """Copying it is an operation of all ranks, as of a parallelized model."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def __deepcopy__(self, memo: Any) -> Any:
        pytest.fail("was copied")

    def other(self) -> None:
        """Is given to a block, as a function."""


class Cache:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.values = module, [torch.ones(2)]


@pytest.mark.parametrize(
    "given",
    [
        lambda module: module,
        lambda module: module.other,
        lambda module: functools.partial(module.other, module),
        lambda module: {"state": SimpleNamespace(module=module, method=module.other)},
    ],
    ids=["module", "method", "partial", "namespace"],
)
def test_modules_in_arguments_are_not_copied(given: Any) -> None:
    snapshot(([given(Uncopied())], 3))


def test_objects_are_copied_around_what_they_share() -> None:
    cache = Cache(module := Uncopied())
    (copied,) = snapshot((cache,))
    assert copied is not cache
    assert copied.module is module
    assert copied.values is not cache.values
    assert copied.values[0] is cache.values[0]


def test_a_method_holds_no_tensors_of_what_it_is_bound_to() -> None:
    assert [*tensors_within(Uncopied().other)] == []
