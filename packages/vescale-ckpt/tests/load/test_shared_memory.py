"""Tensors of a state that share memory come back as they were, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, MismatchError

States = Callable[[Tensor], dict[str, Tensor]]

VIEWS: dict[str, States] = {
    "a buffer and its parts": lambda t: {"flat": t, "a": t[:30], "b": t[30:100]},
    "parts first": lambda t: {"a": t[:30], "b": t[30:100], "flat": t},
    "the same transposed": lambda t: {"w": t[:24].view(4, 6), "v": t[:24].view(4, 6).t()},
    "half over one another": lambda t: {"a": t[:60], "b": t[30:90]},
    "another dtype": lambda t: {"a": t, "b": t.view(torch.int64)[3:9]},
    "columns of one matrix": lambda t: {"a": t.view(10, 12)[:, :5], "b": t.view(10, 12)[:, 5:]},
    "columns over one another": lambda t: {
        "a": t.view(10, 12)[:, :6], "b": t.view(10, 12)[:, 5:]
    },
    "every other": lambda t: {"a": t[::2], "b": t[1::2], "c": t[::3]},
    "twice the same": lambda t: {"a": t, "b": t},
    "within itself": lambda t: {"a": t[:5].view(5, 1).expand(5, 4), "b": t[:5]},
    "a scalar expanded": lambda t: {"a": t[0].expand(3, 7)},
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_memory_come_back(tmp_path: Path, name: str) -> None:
    memory = torch.randn(120)
    memory[4] = torch.nan
    vescale_ckpt.save(tmp_path / "ckpt", VIEWS[name](memory))
    other = torch.zeros(120)
    given = VIEWS[name](other)
    vescale_ckpt.load(tmp_path / "ckpt", given)
    for key, tensor in VIEWS[name](memory).items():
        assert torch.equal(given[key].nan_to_num(7), tensor.nan_to_num(7)), key


OVER_ONE_ANOTHER = sorted(set(VIEWS) - {"columns of one matrix"})


@pytest.mark.parametrize("name", OVER_ONE_ANOTHER)
def test_values_that_cannot_be_in_one_memory_are_refused(tmp_path: Path, name: str) -> None:
    given = VIEWS[name](torch.zeros(120))
    state = {
        key: torch.randint(1, 9, tensor.shape).to(tensor.dtype) + number
        for number, (key, tensor) in enumerate(given.items())
    }
    vescale_ckpt.save(tmp_path / "ckpt", state)
    with pytest.raises(CheckpointError, match=r"shares? (its|their) memory"):
        vescale_ckpt.load(tmp_path / "ckpt", given)


def test_elements_that_lie_over_one_another_are_refused(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"w": torch.ones(4, 3)})
    given = {"w": torch.zeros(20).as_strided((4, 3), (2, 1))}
    with pytest.raises(CheckpointError, match=r"'w' has strides \(2, 1\), .*clone"):
        vescale_ckpt.load(tmp_path / "ckpt", given)


def test_the_same_tensor_under_two_dtypes_of_the_file_is_refused(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"a": torch.ones(3), "b": torch.ones(3).half()})
    given = torch.zeros(3)
    with pytest.raises(CheckpointError, match="'a' and 'b' share their memory"):
        vescale_ckpt.load(tmp_path / "ckpt", {"a": given, "b": given}, cast=True)


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 4, bias=False)
        self.register_buffer("b", self.a.weight.detach()[1:])


def test_a_module_with_a_view_of_its_parameter_comes_back(tmp_path: Path) -> None:
    model, other = _Tied(), _Tied()
    vescale_ckpt.save(tmp_path / "ckpt", {"model": model})
    vescale_ckpt.load(tmp_path / "ckpt", {"model": other})
    assert torch.equal(other.a.weight, model.a.weight)
    with torch.no_grad():
        model.a.weight.add_(1)
    vescale_ckpt.save(
        tmp_path / "odd", {"model": {"a.weight": model.a.weight, "b": torch.ones(3, 3)}}
    )
    with pytest.raises(
        MismatchError, match=r"'model.a.weight' shares its memory .* with 'model.b'"
    ):
        vescale_ckpt.load(tmp_path / "odd", {"model": other})


def test_a_tensor_and_its_conjugate_in_one_memory_come_back(tmp_path: Path) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    state = {"x": x, "conjugate": x.conj(), "imag": x.imag, "negative": x.conj().imag}
    vescale_ckpt.save(tmp_path / "step-1", state)
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(tmp_path / "step-2", state)
    for name in ("step-1", "step-2"):
        loaded = {key: torch.zeros_like(tensor).resolve_neg() for key, tensor in state.items()}
        vescale_ckpt.load(tmp_path / name, loaded)
        assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


def test_a_tensor_is_not_read_into_its_own_conjugate(tmp_path: Path) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    vescale_ckpt.save(tmp_path / "tied", {"a": x, "b": x})
    vescale_ckpt.save(tmp_path / "conjugate", {"a": x, "b": x.conj()})
    given = torch.zeros(3, dtype=torch.complex64)
    state = {"a": given, "b": given.conj()}
    with pytest.raises(MismatchError, match=r"'a' shares its memory.*with 'b'"):
        vescale_ckpt.load(tmp_path / "tied", state)
    vescale_ckpt.load(tmp_path / "conjugate", state)
    assert torch.equal(given, x)
