"""Every optimizer of torch goes on where it was, from a fresh one too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import vescale_ckpt
from vescale_ckpt import CheckpointError, MismatchError

Make = Callable[[list[nn.Parameter]], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1)),
    "adamax": lambda p: optim.Adamax(p),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "adadelta": lambda p: optim.Adadelta(p),
    "adafactor": lambda p: optim.Adafactor(p),
    "asgd": lambda p: optim.ASGD(p),
    "rprop": lambda p: optim.Rprop(p),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3),
    "lbfgs of one iteration": lambda p: optim.LBFGS(p, lr=0.1, max_iter=1),
    "lbfgs with line search": lambda p: optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "lbfgs with a short history": lambda p: optim.LBFGS(p, lr=0.1, max_iter=4, history_size=2),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [
        nn.Parameter(torch.randn(3, 2)),
        nn.Parameter(torch.randn(2)),
        nn.Parameter(torch.ones(())),
    ]


def step(params: list[nn.Parameter], optimizer: optim.Optimizer) -> None:
    def loss() -> Any:
        optimizer.zero_grad()
        value = (params[0] ** 2).sum() + (params[0] @ params[1]).cos().sum() + params[2] ** 4
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]: every optimizer takes one


@pytest.mark.parametrize("into", ["fresh", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str, into: str) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    for _ in range(3):
        step(params, optimizer)
    vescale_ckpt.save(tmp_path / "ckpt", {"p": params, "o": optimizer})
    others = parameters()
    other = OPTIMIZERS[name](others)
    if into == "used":
        step(others, other)
    with torch.no_grad():
        for parameter in others:
            parameter.fill_(9)
    vescale_ckpt.load(tmp_path / "ckpt", {"p": others, "o": other})
    assert repr(other.state_dict()) == repr(optimizer.state_dict())
    for _ in range(3):
        step(params, optimizer)
        step(others, other)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


class Nested(optim.Optimizer):
    """An optimizer whose state is made late, of all that a state may be made of."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as torch's own
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["nothing"] = None
            state["count"] = state.get("count", 0) + 1
            state["pair"] = (torch.full((2,), 5.0), None, [torch.ones_like(parameter)])
            state["nested"] = {"a": {"b": torch.full((3,), 7.0)}, 5: [1, {"c": torch.ones(1)}]}
            state["empty"] = {"list": [], "dict": {}, "tensor": torch.empty(0)}


def test_state_of_any_structure_is_made_for_a_fresh_optimizer(tmp_path: Path) -> None:
    optimizer, other = Nested(parameters()), Nested(parameters())
    optimizer.step()
    vescale_ckpt.save(tmp_path / "ckpt", {"o": optimizer})
    vescale_ckpt.load(tmp_path / "ckpt", {"o": other})
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


def test_state_of_more_parameters_than_there_are_is_refused(tmp_path: Path) -> None:
    optimizer = Nested(parameters())
    optimizer.step()
    vescale_ckpt.save(tmp_path / "ckpt", {"o": optimizer})
    with pytest.raises(MismatchError, match=r"o\.state\.2"):
        vescale_ckpt.load(tmp_path / "ckpt", {"o": Nested(parameters()[:2])})


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_back_to_where_it_was(tmp_path: Path, name: str, num_steps: int) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    step(params, optimizer)
    vescale_ckpt.save(tmp_path / "ckpt", {"p": params, "o": optimizer})
    expected = repr((params, optimizer.state_dict()))
    for _ in range(num_steps):
        step(params, optimizer)
    vescale_ckpt.load(tmp_path / "ckpt", {"p": params, "o": optimizer})
    assert repr((params, optimizer.state_dict())) == expected


@pytest.mark.parametrize("num_stepped", [0, 1])
def test_parameters_without_state_have_none_again(tmp_path: Path, num_stepped: int) -> None:
    params = parameters()
    optimizer = optim.Adam(params)
    for parameter in params[:num_stepped]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    vescale_ckpt.save(tmp_path / "ckpt", {"p": params, "o": optimizer})
    expected = repr(optimizer.state_dict())
    step(params, optimizer)
    vescale_ckpt.load(tmp_path / "ckpt", {"p": params, "o": optimizer})
    assert repr(optimizer.state_dict()) == expected


def test_state_that_other_groups_lack_is_missing(tmp_path: Path) -> None:
    optimizer = optim.Adam(parameters()[:2])
    vescale_ckpt.save(tmp_path / "ckpt", {"o": optimizer})
    params = parameters()
    other = optim.Adam(params)
    step(params, other)
    with pytest.raises(MismatchError, match=r"missing in the checkpoint: o\.state\.2"):
        vescale_ckpt.load(tmp_path / "ckpt", {"o": other})


# Those whose state is of each parameter on its own.
PER_PARAMETER = [name for name in OPTIMIZERS if name != "sgd" and "lbfgs" not in name]


@pytest.mark.parametrize("name", PER_PARAMETER)
def test_state_of_a_parameter_of_another_shape_does_not_fit(tmp_path: Path, name: str) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    step(params, optimizer)
    vescale_ckpt.save(tmp_path / "ckpt", {"o": optimizer})
    fresh = OPTIMIZERS[name](parameters()[::-1])
    with pytest.raises(MismatchError, match=r"o\.state\.2\..*of shape \(\),.*\(3, 2\)"):
        vescale_ckpt.load(tmp_path / "ckpt", {"o": fresh})


@pytest.mark.parametrize(
    ("saved", "given", "complaint"),
    [
        ("adam", "momentum", r"o\.param_groups\.0 lacks 'dampening', 'momentum'.* than SGD"),
        ("sgd", "rmsprop", r"o\.param_groups\.0 lacks 'alpha', .* than RMSprop"),
        ("momentum", "adam", r"o: Adam\.load_state_dict\(\) failed .*KeyError: 'step'"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    tmp_path: Path, saved: str, given: str, complaint: str
) -> None:
    params = parameters()
    optimizer = OPTIMIZERS[saved](params)
    step(params, optimizer)
    vescale_ckpt.save(tmp_path / "ckpt", {"o": optimizer})
    with pytest.raises(CheckpointError, match=complaint):
        vescale_ckpt.load(tmp_path / "ckpt", {"o": OPTIMIZERS[given](parameters())})
