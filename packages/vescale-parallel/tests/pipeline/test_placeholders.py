"""Placeholders: what may be asked of them, when, and that they take no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_parallel._pipeline.cuts.placeholders import Placeholder, placeholder

QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "ndim": lambda x: x.ndim,
    "size": lambda x: x.size(),
    "size of a dim": lambda x: x.size(-1),
    "dim": lambda x: x.dim(),
    "numel": lambda x: x.numel(),
    "len": len,
    "is_floating_point": lambda x: x.is_floating_point(),
    "is_complex": lambda x: x.is_complex(),
    "requires_grad": lambda x: x.requires_grad,
    "is_cuda": lambda x: x.is_cuda,
    "layout": lambda x: x.layout,
}

USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "matmul": lambda x: torch.ones(1, 2) @ x,
    "view": lambda x: x.view(6),
    "index": lambda x: x[0],
    "write": lambda x: x.add_(1),
    "to": lambda x: x.to(torch.float64),
    "item": lambda x: x.sum().item(),
    "where": lambda x: torch.where(torch.ones(2, 3) > 0, x, x),
    "cat": lambda x: torch.cat([torch.ones(2, 3), x]),
    "detach": lambda x: x.detach(),
    "bool": lambda x: bool(x.any()),
    "functional": lambda x: torch.nn.functional.relu(x),
}


@pytest.fixture
def not_usable() -> Iterator[Placeholder]:
    held = placeholder((2, 3), torch.float32, torch.device("cpu"))
    Placeholder.usable = False
    yield held
    Placeholder.usable = True


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_is_known_without_values_may_always_be_asked(
    not_usable: Placeholder, name: str
) -> None:
    like = torch.zeros(2, 3)
    assert QUESTIONS[name](not_usable) == QUESTIONS[name](like)


@pytest.mark.parametrize("name", USES)
def test_any_use_of_values_after_the_first_block_is_refused(
    not_usable: Placeholder, name: str
) -> None:
    with pytest.raises(ValueError, match="uses a tensor that another pipeline stage computes"):
        USES[name](not_usable)


@pytest.mark.parametrize("name", ["add", "radd", "matmul", "view", "index", "to", "where", "cat"])
def test_before_it_what_is_computed_from_one_is_one(name: str) -> None:
    held = placeholder((2, 3), torch.float32, torch.device("cpu"))
    result = USES[name](held)
    assert isinstance(result, Placeholder)
    assert result.shape == USES[name](torch.zeros(2, 3)).shape


def test_it_takes_the_memory_of_one_element_whatever_its_shape() -> None:
    held = placeholder((1 << 20, 1 << 10), torch.bfloat16, torch.device("cpu"))
    assert held.shape == (1 << 20, 1 << 10)
    assert held.dtype == torch.bfloat16
    assert held.untyped_storage().size() == 2
