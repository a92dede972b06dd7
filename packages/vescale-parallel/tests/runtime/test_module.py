"""The class of a parallelized model, and the order in which a call meets what wraps it."""

from __future__ import annotations

import copy
import pickle
import threading
from abc import ABC
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor
from vescale_parallel import ParallelPlan, data_parallel_rank, parallelize
from vescale_parallel._runtime.engine import Engine
from vescale_parallel._runtime.module import ParallelModule

pytestmark = pytest.mark.usefixtures("world_of_one")


class Named(nn.Module):
    """A model with methods and a class attribute of its own."""

    scale = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        return self.linear(x).pow(2).mean() * factor

    def generate(self, x: Tensor) -> Tensor:
        """Say more."""
        return self(x) * self.scale


def parallel(model: nn.Module | None = None) -> Any:
    return parallelize(ParallelPlan(), Named() if model is None else model)


def test_the_class_keeps_its_name_and_module_and_is_still_the_users() -> None:
    model = parallel()
    cls = type(model)
    assert (cls.__name__, cls.__module__) == ("Named", Named.__module__)
    assert isinstance(model, Named)
    assert isinstance(model, ParallelModule)
    assert cls.scale == 3
    assert cls is not Named
    assert not isinstance(Named(), ParallelModule)


class First(ABC, Named):
    """Its first base is no module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return [super().__call__(*args, **kwargs)]


def test_a_class_whose_first_base_is_no_module_is_mixed_into_likewise() -> None:
    model = parallel(First())
    assert isinstance(model, First)
    assert isinstance(model, ParallelModule)
    assert type(model).__name__ == "First"
    (loss,) = model(torch.ones(2, 3))
    loss.backward()
    assert model.linear.weight.grad is not None
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)


def test_names_of_state_and_of_modules_are_as_before() -> None:
    before, model = Named(), parallel()
    assert list(model.state_dict()) == list(before.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in before.named_modules()]
    assert repr(model) == repr(before)


def test_a_call_passes_arguments_and_result_through() -> None:
    model = Named()
    x = torch.ones(4, 3)
    expected = model(x, factor=0.5)
    assert torch.equal(parallel(model)(x, factor=0.5), expected)


def test_generate_runs_through_calls_and_keeps_its_documentation() -> None:
    model = Named()
    x = torch.ones(4, 3)
    expected = model.generate(x)
    model = parallel(model)
    assert torch.equal(model.generate(x), expected)
    assert model.generate.__doc__ == "Say more."


def test_a_copy_has_values_settings_and_hooks_of_its_model() -> None:
    heard: list[nn.Module] = []
    plain = Named()
    plain.register_forward_hook(lambda module, args, output: heard.append(module))
    model = parallel(plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    copied = copy.deepcopy(model.eval())
    x = torch.ones(4, 3)
    assert torch.equal(copied(x), model(x))
    assert not copied.training
    assert heard == [copied, model]
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not torch.equal(copied(x), model(x))
    assert torch.equal(copy.deepcopy(copied)(x), copied(x))


def test_a_copy_of_what_cannot_be_copied_is_refused() -> None:
    plain = Named()
    vars(plain)["lock"] = threading.Lock()
    with pytest.raises(TypeError, match=r"Named cannot be copied: before parallelize .*lock"):
        copy.deepcopy(parallel(plain))


def test_a_pickle_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled: .* Save model.state_dict\(\)"):
        pickle.dumps(parallel())


def test_a_model_is_parallelized_once() -> None:
    with pytest.raises(ValueError, match="Named is parallelized already"):
        parallel(parallel())


def test_a_call_inside_a_backward_pass_is_refused() -> None:
    model = parallel()
    x = torch.ones(4, 3, requires_grad=True)
    loss: Any = checkpoint(model, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="was called inside a backward pass"):
        loss.backward()


def test_the_rank_of_a_model_that_is_not_parallelized_is_refused() -> None:
    assert data_parallel_rank(parallel()) == 0
    with pytest.raises(TypeError, match="expected the model that parallelize returned, got Named"):
        data_parallel_rank(Named())


class Recorded(nn.Module):
    """Notes when its forward runs, and with which parameters."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.events = events

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(f"forward on {held(self)}")
        return (x * self.weight).mean()


def held(model: nn.Module) -> str:
    return "distributed" if isinstance(model._parameters["weight"], DTensor) else "plain"


def test_a_call_meets_class_engine_modes_hooks_forward_in_this_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    model = Recorded(events)
    model.register_forward_pre_hook(lambda m, _: events.append(f"hook before on {held(m)}"))
    model.register_forward_hook(lambda m, _a, _o: events.append(f"hook after on {held(m)}"))
    model = parallel(model)
    engine: Engine = model._vescale_engine

    class Noted(TorchFunctionMode):
        def __enter__(self) -> Any:
            events.append(f"modes in, running {engine.is_running}")
            return super().__enter__()

        def __exit__(self, *args: Any) -> None:
            events.append("modes out")
            super().__exit__(*args)

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    call = engine.call

    def noted(*args: Any) -> Any:
        events.append(f"engine on {held(model)}")
        result = call(*args)
        events.append(f"engine left on {held(model)}, running {engine.is_running}")
        return result

    monkeypatch.setattr(engine, "call", noted)
    monkeypatch.setattr(engine.rng, "of_call", lambda *_: Noted())
    loss = model(torch.ones(2, 3))
    loss.register_hook(lambda _: events.append("backward"))
    loss.backward()
    assert events == [
        "engine on distributed",
        "modes in, running True",
        "hook before on plain",
        "forward on plain",
        "hook after on plain",
        "modes out",
        "engine left on distributed, running False",
        "backward",
    ]


def test_an_engine_that_raised_is_not_running_and_can_be_called_again() -> None:
    model = parallel()
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(torch.ones(2, 3), wrong=1)
    assert not model._vescale_engine.is_running
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(torch.ones(2, 3)).backward()
    assert isinstance(model.linear.weight.grad, DTensor)


def test_gradients_and_values_after_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    expected = Named()
    model = copy.deepcopy(expected)
    model, optimizer = parallelize(
        ParallelPlan(), model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        for each, steps in ((expected, reference), (model, optimizer)):
            steps.zero_grad()
            each(x).backward()
            steps.step()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(other.full_tensor(), one)
        assert one.grad is not None
        assert torch.equal(other.grad.full_tensor(), one.grad)


def test_modules_added_after_parallelize_are_refused_if_they_train() -> None:
    model = parallel()
    model.activation = nn.ReLU()
    model(torch.ones(2, 3))
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'adapter.weight' was added to the model after par"):
        model(torch.ones(2, 3))


def test_a_parameter_replaced_after_parallelize_is_refused() -> None:
    model = parallel()
    x = torch.ones(2, 3)
    values = {"linear.weight": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=r"'linear.weight' was replaced after parallelize"):
        torch.func.functional_call(model, values, (x,))
    model(x)
