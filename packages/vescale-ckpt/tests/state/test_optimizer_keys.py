"""State of an optimizer is that of parameters by their place, whether numbered or named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import vescale_ckpt
from vescale_ckpt import MismatchError, SavedTensor


class Named(optim.AdamW):
    """Calls parameters by name in its state, as parallelized optimizers do."""

    def __init__(self, params: Any, names: list[str], **options: Any) -> None:
        super().__init__(params, **options)
        self.names = names

    def groups(self) -> list[dict[str, Any]]:
        names = iter(self.names)
        return [{**g, "params": [next(names) for _ in g["params"]]} for g in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()["state"]
        return {
            "state": {self.names[index]: values for index, values in state.items()},
            "param_groups": self.groups(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as torch's own
        assert [g["params"] for g in self.groups()] == [
            g["params"] for g in state_dict["param_groups"]
        ]
        assert all(isinstance(key, str) for key in state_dict["state"])
        super().load_state_dict(dict(state_dict))

    def state_template(self, saved: Mapping[str, SavedTensor]) -> Mapping[str, Any]:
        state: dict[str, dict[str, torch.Tensor]] = {}
        for path, tensor in saved.items():
            fqn, _, name = path.removeprefix("state.").rpartition(".")
            state.setdefault(fqn, {})[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return {"state": state, "param_groups": self.groups()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))


def groups_of(module: nn.Module, count: int) -> list[dict[str, Any]]:
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    if count == 1:
        return [{"params": matrices + vectors}]
    return [{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.2}]


NAMES = ["0.weight", "2.weight", "0.bias", "2.bias"]


def make(module: nn.Module, kind: str, count: int = 2) -> optim.Optimizer:
    groups = groups_of(module, count)
    return Named(groups, NAMES) if kind == "named" else optim.AdamW(groups)


def step(module: nn.Module, optimizer: optim.Optimizer) -> None:
    module(torch.arange(12.0).view(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


KINDS = [("named", "numbered"), ("numbered", "named")]


@pytest.mark.parametrize("into", ["fresh", "used"])
@pytest.mark.parametrize(("saved", "given"), KINDS)
def test_an_optimizer_goes_on_where_one_with_other_keys_was(
    tmp_path: Path, saved: str, given: str, into: str
) -> None:
    module, other = model(), model()
    optimizer, fresh = make(module, saved), make(other, given)
    for _ in range(2):
        step(module, optimizer)
    vescale_ckpt.save(tmp_path / "ckpt", {"m": module, "o": optimizer})
    if into == "used":
        step(other, fresh)
    vescale_ckpt.load(tmp_path / "ckpt", {"m": other, "o": fresh})
    assert fresh.state_dict()["param_groups"] == make(model(), given).state_dict()["param_groups"]
    for _ in range(2):
        step(module, optimizer)
        step(other, fresh)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_optimizer_takes_the_dict_that_torch_makes_of_fsdp(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    module, other = model(), model()
    optimizer, fresh = (optim.AdamW(each.parameters()) for each in (module, other))
    step(module, optimizer)
    state = {"m": module, "o": get_optimizer_state_dict(module, optimizer)}
    vescale_ckpt.save(tmp_path / "ckpt", state)
    vescale_ckpt.load(tmp_path / "ckpt", {"m": other, "o": fresh})
    step(module, optimizer)
    step(other, fresh)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_state_without_tensors_gets_the_keys_of_the_optimizer(tmp_path: Path) -> None:
    named: dict[str, Any] = {"state": {"a": {"count": 3}}, "param_groups": [{"params": ["a"]}]}
    vescale_ckpt.save(tmp_path / "ckpt", {"o": named})
    optimizer = optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(MismatchError, match=r"param_groups\.0 lacks 'dampening'"):
        vescale_ckpt.load(tmp_path / "ckpt", {"o": optimizer})
    assert optimizer.state_dict()["state"] == {0: {"count": 3}}


@pytest.mark.parametrize(("saved", "given"), KINDS)
def test_other_groups_of_parameters_are_told(tmp_path: Path, saved: str, given: str) -> None:
    module, other = model(), model()
    optimizer = make(module, saved)
    step(module, optimizer)
    vescale_ckpt.save(tmp_path / "ckpt", {"o": optimizer})
    message = r"o: the checkpoint has groups of \[2, 2\] parameters, the given optimizer of \[4\]"
    with pytest.raises(MismatchError, match=message):
        vescale_ckpt.load(tmp_path / "ckpt", {"o": make(other, given, 1)})


def test_names_that_the_caller_gives_are_the_names(tmp_path: Path) -> None:
    module, other = model(), model()
    optimizer, fresh = make(module, "numbered"), make(other, "named")
    step(module, optimizer)
    vescale_ckpt.save(tmp_path / "ckpt", {"o": optimizer})
    rename = {rf"o\.state\.{i}\.(.*)": rf"o.state.{name}.\1" for i, name in enumerate(NAMES)}
    vescale_ckpt.load(tmp_path / "ckpt", {"o": fresh}, rename=rename, only=[r"o\.state"])
    found = fresh.state_dict()["state"]
    for index, name in enumerate(NAMES):
        expected = optimizer.state_dict()["state"][index]["exp_avg"]
        assert torch.equal(found[name]["exp_avg"], expected)
