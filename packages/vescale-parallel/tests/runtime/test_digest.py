"""Digests of arguments: equal for equal ones, told apart for others, up to rounding."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_parallel._runtime.compared.digest import Leaf, difference, digest_of
from vescale_testing.memory import peak_nbytes

CPU = torch.device("cpu")


def row(*args: Any) -> list[int]:
    return digest_of({str(i): arg for i, arg in enumerate(args)}, CPU).row.tolist()


def leaves(value: Any) -> list[Leaf]:
    return digest_of({"x": value}, CPU).with_numbers()


def floats(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


ONE = torch.arange(12)
OTHERS: dict[str, Any] = {
    "value": torch.arange(12).index_fill(0, torch.tensor(3), 99),
    "swapped": ONE[[1, 0, *range(2, 12)]],
    "negated": -ONE,
    "shape": ONE.view(3, 4),
    "dtype": ONE.int(),
    "container": [ONE],
    "half": ONE[:6],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_have_another_digest(name: str) -> None:
    assert row(ONE) == row(ONE.clone())
    assert row(OTHERS[name]) != row(ONE)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64,
    ],
)  # fmt: skip
def test_every_dtype_has_a_digest(dtype: torch.dtype) -> None:
    x = (floats() > 0).to(dtype)
    assert row(x) == row(x.clone())
    assert row(x) != row(x.flip(0))


def test_arguments_without_values_count_by_what_they_are() -> None:
    assert row(True, None, "sum") == row(True, None, "sum")
    assert row(True) != row(False)
    assert row(object()) == row(object())
    assert row(torch.empty(3, device="meta")) == row(torch.empty(3, device="meta"))
    assert row(torch.empty(0)) == row(torch.empty(0))


def test_mappings_of_all_kinds_are_opened() -> None:
    assert leaves(UserDict(ids=ONE))[0].name == "x['ids']"
    assert row(UserDict(ids=ONE)) != row(UserDict(ids=ONE + 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_difference_and_one_row_is(dtype: torch.dtype) -> None:
    x = floats(dtype)
    rounded = x * (1 + torch.finfo(dtype).eps)
    other = x.clone()
    other[17] = x[16]
    assert difference({0: leaves(x), 1: leaves(rounded)}) == ""
    assert "one value on rank 0, another on rank 1" in difference({0: leaves(x), 1: leaves(other)})


def test_a_nan_is_a_difference() -> None:
    x = floats()
    other = x.clone()
    other[3, 3] = torch.nan
    assert difference({0: leaves(x), 1: leaves(other)})
    assert not difference({0: leaves(other), 1: leaves(other.clone())})


def test_elements_that_are_far_apart_are_told_apart() -> None:
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    swapped = x.clone()
    swapped[[0, 250_000]] = x[[250_000, 0]]
    assert row(x) == row(x.clone())
    assert row(x) != row(swapped)
    nearly = x * (1 + 2.0**-22)
    assert not difference({0: leaves(x), 1: leaves(nearly)})
    assert difference({0: leaves(x), 1: leaves(swapped)})


def test_a_digest_takes_little_memory_beside_what_it_is_of() -> None:
    x = torch.zeros(2**22)
    row(x)  # threads and kernels
    before = peak_nbytes(reset=True)
    row(x)
    assert peak_nbytes() - before < x.nbytes / 2
