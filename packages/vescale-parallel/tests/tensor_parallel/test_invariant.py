"""Sums in a fixed tree, and products in chunks, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._tensor_parallel.invariant.entrance import for_chunks
from vescale_parallel._tensor_parallel.invariant.placed import in_place_of_its_own
from vescale_parallel._tensor_parallel.invariant.products import Columns, Cut, Rows
from vescale_parallel._tensor_parallel.invariant.tree import tree_sum


def _same(x: Tensor) -> Tensor:
    return x


def test_neighbours_are_added_first() -> None:
    terms = list(torch.randn(8, 5).unbind())
    first = (terms[0] + terms[1]) + (terms[2] + terms[3])
    second = (terms[4] + terms[5]) + (terms[6] + terms[7])
    assert torch.equal(tree_sum(terms), first + second)
    assert torch.equal(tree_sum([tree_sum(terms[:4]), tree_sum(terms[4:])]), first + second)


def test_half_precision_is_added_in_float32() -> None:
    terms = [torch.tensor([256.0, 1.0]).bfloat16(), torch.tensor([1.0, 2.0]).bfloat16()]
    assert torch.equal(tree_sum(terms), torch.tensor([257.0, 3.0]))
    assert tree_sum(terms[:1]).dtype == torch.float32


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dim", [0, 1], ids=["out_first", "in_first"])
def test_column_wise_chunks_compute_the_layer(dim: int, parts: int) -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(24, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(24, dtype=torch.float64, requires_grad=True)
    held = weight if dim == 0 else weight.t().contiguous()
    _, copies = for_chunks(x, _same, _same, 4)
    y = Columns.apply(Cut(dim, True, 4, parts), held, bias, *copies)
    wanted = F.linear(x, weight, bias)
    torch.testing.assert_close(y, wanted)
    grad = torch.randn_like(wanted)
    leaves = (x, weight, bias)
    given = torch.autograd.grad(y, leaves, grad)
    torch.testing.assert_close(given, torch.autograd.grad(wanted, leaves, grad))


@pytest.mark.parametrize("dim", [0, 1], ids=["in_first", "out_first"])
def test_row_wise_chunks_compute_the_layer(dim: int) -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    held = weight if dim == 1 else weight.t().contiguous()
    y = Rows.apply(Cut(dim, False, 4, 1), held, x)
    wanted = F.linear(x, weight)
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(y, wanted)
    given = torch.autograd.grad(y, (x, weight), grad)
    torch.testing.assert_close(given, torch.autograd.grad(wanted, (x, weight), grad))


def test_frozen_weights_get_no_gradient() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    _, copies = for_chunks(x, _same, _same, 2)
    Columns.apply(Cut(0, True, 2, 1), weight, None, *copies).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 8))


def test_what_else_reads_an_entered_tensor_is_refused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    whole, copies = for_chunks(x, _same, _same, 2, "a region of 'blocks'")
    with pytest.raises(ValueError, match="a region of 'blocks' is read by column-wise"):
        (whole.sum() + copies[0].sum()).backward()


def test_what_norms_get_and_their_gradients_begin_where_torch_begins_tensors() -> None:
    x = torch.randn(33, 16, requires_grad=True)
    found = in_place_of_its_own(x[1:].t())
    assert torch.equal(found, x[1:].t())
    assert found.is_contiguous()
    assert found.data_ptr() % 64 == 0
    strides: list[tuple[int, ...]] = []
    y = x.tanh()
    y.register_hook(lambda grad: strides.append(grad.stride()))
    in_place_of_its_own(y).backward(torch.randn(16, 33).t())
    assert strides == [(16, 1)]
