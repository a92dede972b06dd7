"""Sums in rank order: the bits of adding one after the other, in as many operators always."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_dtensor import all_gather, all_to_all, emulate, ordered_sum
from vescale_dtensor._comm.ordered_reduce import Reduction, reduce_rows
from vescale_testing import World

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _rows(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(ranks)
    # Of many magnitudes, so that any other order has other bits.
    exponents = torch.randn(ranks, *shape, generator=generator).mul(3).exp()
    return (torch.randn(ranks, *shape, generator=generator) * exponents).to(dtype)


def _one_after_the_other(rows: Tensor) -> Tensor:
    total = rows[0].to(WIDE.get(rows.dtype, rows.dtype))
    for row in rows[1:]:
        total = total + row
    return total.to(rows.dtype)


@settings(max_examples=30)
@example(47, (33000,), torch.float16)
@given(
    st.integers(1, 70),
    st.sampled_from([(), (1,), (3,), (5, 7), (33000,)]),
    st.sampled_from(
        [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
    ),
)
def test_a_sum_has_the_bits_of_adding_row_after_row(
    ranks: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rows = _rows(ranks, shape, dtype)
    before = rows.clone()
    found, expected = reduce_rows(rows.unbind(), Reduction()), _one_after_the_other(rows)
    # Large draws are infinite in float16, and one minus another is NaN on one device, too.
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rows, before)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_more_ranks_takes_no_more_operators(dtype: torch.dtype) -> None:
    counts: set[int] = set()
    for ranks in (3, 8, 64, 256):
        rows = _rows(ranks, (4,), dtype)
        with _Operators() as operators:
            reduce_rows(rows.unbind(), Reduction())
        counts.add(operators.count)
    assert len(counts) == 1


def gathered_into() -> tuple[bool, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out = torch.empty(mesh.size(), 2)
    returned = all_gather(torch.full((2,), float(dist.get_rank())), mesh, out=out)
    return returned is out, out[:, 0].tolist()


def test_ranks_gather_into_a_tensor_that_is_there(world2: World) -> None:
    assert world2.run(gathered_into) == [(True, [0.0, 1.0])] * 2


def test_a_tensor_to_gather_into_has_to_fit() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        part = torch.ones(3)
        out = torch.empty(2, 3)
        assert all_gather(part, mesh, out=out) is out
        assert torch.equal(out, torch.ones(2, 3))
        with pytest.raises(ValueError, match=r"of shape \(2, 3\) and .*, got .*\(2, 4\)"):
            all_gather(part, mesh, out=torch.empty(2, 4))
        with pytest.raises(ValueError, match="contiguous tensor with out, got strides"):
            all_gather(torch.ones(3, 2)[:, 0], mesh, out=out)
        with pytest.raises(ValueError, match="expected out or sizes, got both"):
            all_gather(part, mesh, sizes=(3, 3), out=out)
        with pytest.raises(ValueError, match="out has no gradients"):
            all_gather(part.requires_grad_(), mesh, out=out)


def exchanged_in_place() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sent = torch.arange(6.0).view(2, 3) + 10 * dist.get_rank()
    received = torch.empty(2, 3)
    assert all_to_all(sent, mesh, out=received) is received
    assert torch.equal(received, all_to_all(sent, mesh))
    expected = ordered_sum(received)
    assert ordered_sum(received, out=received[0]).data_ptr() == received.data_ptr()
    assert torch.equal(received[0], expected)
    with pytest.raises(ValueError, match="out is for tensors of one shape"):
        all_to_all(sent, mesh, input_splits=(1, 1), output_splits=(1, 1), out=received)
    with pytest.raises(ValueError, match=r"expected out to be contiguous, of shape \(2, 3\)"):
        all_to_all(sent, mesh, out=torch.empty(3, 2))


def test_what_arrives_is_written_and_summed_where_it_is_wanted(world2: World) -> None:
    world2.run(exchanged_in_place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_sum_into_its_first_row_has_the_same_bits(dtype: torch.dtype, ranks: int) -> None:
    rows = (100 * torch.randn(ranks, 33)).to(dtype)
    expected = ordered_sum(rows)
    found = ordered_sum(rows, out=rows[0])
    assert found.data_ptr() == rows.data_ptr()
    assert torch.equal(found, expected)
