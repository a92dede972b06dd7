"""Real views of complex tensors, and complex ones of real tensors, of pending reductions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial

from vescale_dtensor import DTensor, GatherWarning, RankTensor, emulate

OF_COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "view_as_real": torch.view_as_real,
    "copy": torch.view_as_real_copy,
    "real": torch.real,
    "imag": torch.imag,
    "conj": lambda x: x.conj().resolve_conj(),
    "abs": torch.abs,
    "angle": torch.angle,
}


def check(f: Callable[[Tensor], Tensor], op: str, dtype: torch.dtype) -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        parts = [torch.randn(3, 2, dtype=dtype) for _ in range(2)]
        x = DTensor.from_local(RankTensor(parts), mesh, [Partial(op)])
        found = f(x)
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), f(x.full_tensor()))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.filterwarnings(f"ignore::{GatherWarning.__module__}.{GatherWarning.__name__}")
def test_pairs_of_parts_are_complex_numbers(op: str) -> None:
    check(torch.view_as_complex, op, torch.float64)


@pytest.mark.parametrize("op", ["sum", "avg", "product"])
@pytest.mark.parametrize("name", OF_COMPLEX)
@pytest.mark.filterwarnings(f"ignore::{GatherWarning.__module__}.{GatherWarning.__name__}")
def test_what_is_made_of_complex_parts(name: str, op: str) -> None:
    check(OF_COMPLEX[name], op, torch.complex128)
