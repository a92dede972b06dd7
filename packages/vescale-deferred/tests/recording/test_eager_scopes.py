"""Constructors of which some part cannot be deferred: that part is real, and the rest is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_deferred import DeferredWarning, deferred_init, is_deferred, materialize


class Resizing(nn.Module):
    """Makes a tensor, and resizes it in place: that cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.rand(4)
        weight.resize_(2, 2)
        self.weight = nn.Parameter(weight)
        self.linear = nn.Linear(3, 3)


class LooksAtAddress(nn.Module):
    """Asks where a tensor lies, and a deferred one lies nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 3))
        self.address = self.weight.data_ptr()


class ResizesAnothers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.linear.weight.data.resize_(2, 6)
        self.after = nn.Linear(3, 4)


class Net(nn.Module):
    def __init__(self, *others: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.others = nn.ModuleList(make() for make in others)
        self.last = nn.Linear(16, 16)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)


def _resized() -> Tensor:
    return torch.rand(6).resize_(2, 3)


class CallsFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", _resized())
        self.weight = nn.Parameter(torch.rand(3))


def _check(factory: Callable[[], nn.Module], match: str) -> tuple[Any, set[str]]:
    """Compare with ordinary construction; return the module, and the names of what was real."""
    torch.manual_seed(3)
    ordinary = factory()
    end = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.warns(DeferredWarning, match=match):
        module = deferred_init(factory)
    assert torch.equal(torch.get_rng_state(), end)
    real = {name for name, tensor in module.state_dict().items() if not is_deferred(tensor)}
    materialize(module)
    for name, expected in ordinary.state_dict().items():
        assert torch.equal(module.state_dict()[name], expected), name
    return module, real


def test_only_what_the_failing_constructor_makes_is_real():
    match = (
        r"Resizing\.__init__ was constructed for real.*aten::resize_.*test_eager_scopes\.py:\d+"
    )
    _, real = _check(lambda: Net(Resizing, lambda: nn.Linear(2, 2)), match)
    assert real == {"others.0.weight"}


def test_a_failing_function_makes_real_tensors_and_its_callers_do_not():
    _, real = _check(lambda: Net(CallsFunction), r"_resized was constructed for real")
    assert real == {"others.0.table"}


def test_each_failing_part_is_named():
    with pytest.warns(DeferredWarning) as caught:
        module = deferred_init(Net, Resizing, LooksAtAddress, CallsFunction)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 3
    for name, message in zip(("Resizing", "LooksAtAddress", "_resized"), messages, strict=True):
        assert message.startswith(name)
    assert is_deferred(module.first.weight)
    assert is_deferred(module.others[2].weight)


def test_submodules_are_real_if_the_failing_constructor_changes_them():
    _, real = _check(lambda: Net(ResizesAnothers), r"ResizesAnothers\.__init__")
    assert real == {f"others.0.{n}.{p}" for n in ("linear", "after") for p in ("weight", "bias")}


def test_what_fails_everywhere_is_constructed_for_real():
    def factory() -> nn.Module:
        net = nn.Linear(3, 4)
        net.weight.data.resize_(2, 6)
        return net

    _, real = _check(factory, "factory was constructed for real")
    assert real == {"weight", "bias"}


def test_a_constructor_that_raises_runs_only_twice():
    calls: list[int] = []

    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            calls.append(1)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        deferred_init(Net, Raises)
    assert len(calls) == 2


def test_a_constructor_that_torch_refuses_raises_as_usual():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="negative dimension"):
        deferred_init(lambda: Net(lambda: nn.Linear(-1, 2)))
    assert not torch.equal(torch.get_rng_state(), state)  # where ordinary construction stops
