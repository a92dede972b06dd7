"""Which hooks of users a check of rows may run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._cross_replica.hooks.pure_hooks import is_pure, put_pure_hooks

Hook = Callable[..., Any]
KEPT: list[Tensor] = []
count_of_calls = 0


def _centered(x: Tensor) -> Tensor:
    return F.normalize(x - x.mean(0)) * math.sqrt(2)


def calls_a_function(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
    return _centered(returned)


def writes_in_place(_: nn.Module, given: Any, returned: Tensor) -> None:
    returned[0] = 0


def adds_in_place(_: nn.Module, given: Any, returned: Tensor) -> None:
    returned += 1


def sets_an_attribute(module: Any, given: Any, returned: Tensor) -> Tensor:
    module.last = returned
    return torch.stack([x - returned.sum(0) for x in returned])


def reads_only(_: nn.Module, given: Any, returned: Tensor) -> None:
    assert returned.isfinite().all()


def keeps(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
    KEPT.append(returned)
    return returned * 2


def counts(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
    global count_of_calls
    count_of_calls += 1
    return returned * 2


def calls_what_keeps(module: nn.Module, given: Any, returned: Tensor) -> Tensor:
    return keeps(module, given, returned)


def saves(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
    torch.save(returned, "returned.pt")
    return returned * 2


def imports(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
    import logging

    logging.info("called")
    return returned * 2


def prints(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
    print(returned.shape)
    return returned * 2


def requires_grad(_: nn.Module, given: Any, returned: Tensor) -> None:
    returned.requires_grad_(True)


class Scaled(torch.autograd.Function):
    """Differentiated by code of its own."""


def differentiates(_: nn.Module, given: Any, returned: Tensor) -> Any:
    return Scaled.apply(returned)


def nonlocal_hook() -> Hook:
    total = 0.0

    def hook(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
        nonlocal total
        total += 1
        return returned * total

    return hook


def writes_to_a_tensor() -> Hook:
    total = torch.zeros(3)

    def hook(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
        return returned * total.add_(returned.mean(0))

    return hook


def holds_a_module() -> Hook:
    layer = nn.BatchNorm1d(3)
    return lambda module, given, returned: layer(returned)


def holds_a_tensor(tensor: Tensor) -> Hook:
    return lambda module, given, returned: returned @ tensor


PURE: dict[str, Hook] = {
    "lambda": lambda _, given, returned: returned - returned.mean(0),
    "partial": functools.partial(calls_a_function),
    "tensor": holds_a_tensor(torch.eye(3)),
    **{f.__name__: f for f in (calls_a_function, writes_in_place, adds_in_place)},
    "sets_an_attribute": sets_an_attribute,
}
OTHERS: dict[str, Hook] = {
    "lambda": lambda _, given, returned: KEPT.append(returned),
    "method": nn.Linear(2, 2).forward,
    "nonlocal": nonlocal_hook(),
    "tensor": writes_to_a_tensor(),
    "module": holds_a_module(),
    **{f.__name__: f for f in (reads_only, keeps, counts, calls_what_keeps, saves)},
    **{f.__name__: f for f in (imports, prints, requires_grad, differentiates)},
}


@pytest.mark.parametrize("name", PURE)
def test_a_function_that_only_computes_is_pure(name: str) -> None:
    assert is_pure(PURE[name])


@pytest.mark.parametrize("name", OTHERS)
def test_one_that_reaches_something_else_or_changes_nothing_is_not(name: str) -> None:
    assert not is_pure(OTHERS[name])


@pytest.mark.parametrize("where", ["torch.distributed.fsdp", "vescale_parallel._data_parallel"])
def test_one_of_torch_or_of_this_project_is_not(where: str) -> None:
    def hook(_: nn.Module, given: Any, returned: Tensor) -> Tensor:
        return returned * 2

    hook.__module__ = where
    assert not is_pure(hook)


def test_a_copy_in_float64_computes_with_what_a_hook_holds_in_float64() -> None:
    weight = torch.randn(3, 3)
    model, copied = nn.Linear(3, 3), nn.Linear(3, 3).double()
    model.register_forward_hook(holds_a_tensor(weight))
    put_pure_hooks(copied, model)
    x = torch.randn(2, 3, dtype=torch.float64)
    expected = F.linear(x, copied.weight, copied.bias) @ weight.double()
    torch.testing.assert_close(copied(x), expected)
    assert weight.dtype is torch.float32
