"""Matrix products against plain ones, and what they send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import DTensor, distribute_tensor, emulate, strict
from vescale_dtensor._debug.comm_counter import CommCounter

from .rule_oracle import check, check_placed

aten = torch.ops.aten


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "mm": (torch.mm, (normal(6, 8), normal(8, 5))),
    "mm of short dims": (torch.mm, (normal(2, 3), normal(3, 1))),
    "bmm": (torch.bmm, (normal(4, 3, 6), normal(4, 6, 2))),
    "mv": (torch.mv, (normal(6, 5), normal(5))),
    "dot": (torch.dot, (normal(7), normal(7))),
    "vdot": (torch.vdot, (normal(7), normal(7))),
    "outer": (torch.outer, (normal(6), normal(5))),
    "addmm": (torch.addmm, (normal(5), normal(6, 8), normal(8, 5))),
    "addmm scaled": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        (normal(6, 1), normal(6, 8), normal(8, 5)),
    ),
    "addmm without bias": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0),
        (normal(6, 5), normal(6, 8), normal(8, 5)),
    ),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b, alpha=3),
        (normal(3, 2), normal(4, 3, 6), normal(4, 6, 2)),
    ),
    "addbmm": (torch.addbmm, (normal(3, 2), normal(4, 3, 6), normal(4, 6, 2))),
    "addmv": (torch.addmv, (normal(6), normal(6, 5), normal(5))),
    "addr": (torch.addr, (normal(6, 5), normal(6), normal(5))),
    "linear": (nn.functional.linear, (normal(2, 4, 6), normal(8, 6), normal(8))),
    "linear of rows": (nn.functional.linear, (normal(4, 6), normal(8, 6))),
    "matmul": (torch.matmul, (normal(2, 4, 6), normal(6, 3))),
    "matmul of batches": (torch.matmul, (normal(2, 1, 4, 6), normal(3, 6, 2))),
    "einsum": (
        lambda a, b: torch.einsum("bshd,bthd->bhst", a, b),
        (normal(2, 3, 4, 2), normal(2, 5, 4, 2)),
    ),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, dims=2),
        (normal(3, 4, 2), normal(4, 2, 5)),
    ),
    "matrix_exp": (torch.linalg.matrix_exp, (normal(4, 3, 3) / 4,)),
    "cdist": (torch.cdist, (normal(2, 5, 3), normal(2, 4, 3))),
    "cdist of many": (torch.cdist, (normal(28, 3), normal(6, 3))),
    "cdist in the 1-norm": (lambda a, b: torch.cdist(a, b, p=1), (normal(5, 3), normal(4, 3))),
}
# The reshapes around some products have no rule for every uneven cut.
_RESHAPED = {"linear", "matmul", "matmul of batches", "einsum", "tensordot"}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_the_values_and_gradients_of_one_device(name: str) -> None:
    function, inputs = PRODUCTS[name]
    check(function, *inputs, allow_gather=name in _RESHAPED)


def _addmm_into(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (c * 1).addmm_(a, b)


def _baddbmm_into(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (c * 1).baddbmm_(a, b, beta=2)


@pytest.mark.filterwarnings("ignore::vescale_dtensor.GatherWarning")
def test_products_that_are_added_in_place_stay_where_they_are() -> None:
    check(_addmm_into, normal(6, 5), normal(6, 8), normal(8, 5), allow_gather=True)
    check(_baddbmm_into, normal(4, 3, 2), normal(4, 3, 6), normal(4, 6, 2), allow_gather=True)


R, P = Replicate(), Partial()
Sent = tuple[Placement, Placement, Placement, bool]

# Placements of x (tokens, in) and weight (in, out), of their product, and whether bytes move.
LAYOUTS: dict[str, Sent] = {
    "column parallel": (R, Shard(1), Shard(1), False),
    "row parallel": (Shard(1), Shard(0), P, False),
    "data parallel": (Shard(0), R, Shard(0), False),
    "pending activations": (P, R, P, False),
    "sequence parallel": (Shard(0), Shard(1), Shard(1), True),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_of_tensor_parallelism_send_what_they_have_to(
    name: str, *, bias: bool
) -> None:
    of_x, of_weight, of_result, moves = LAYOUTS[name]
    x, weight = normal(8, 16), normal(16, 32)
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (4,))
        parts = [
            distribute_tensor(x, mesh, (of_x,)),
            distribute_tensor(weight, mesh, (of_weight,)),
        ]
        if bias:
            parts.insert(0, distribute_tensor(normal(32), mesh, (R,)))
        with CommCounter() as sent:
            result = torch.addmm(*parts) if bias else torch.mm(*parts)
        assert result.placements == (of_result,)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        # Sequence parallelism gathers the tokens, not the weight.
        assert sent.nbytes == (3 * 2 * 16 * 8 if moves else 0)


def test_gradients_of_weights_are_pending_sums_over_data_parallel_ranks() -> None:
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(normal(8, 16), mesh, (Shard(0),))
        weight = distribute_tensor(normal(32, 16), mesh, (R,)).requires_grad_()
        bias = distribute_tensor(normal(32), mesh, (R,)).requires_grad_()
        with CommCounter() as sent:
            nn.functional.linear(x, weight, bias).backward(
                distribute_tensor(normal(8, 32), mesh, (Shard(0),))
            )
        assert sent.nbytes == 0
        for parameter in (weight, bias):
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == (P,)


def test_a_bias_is_added_once_to_a_pending_product() -> None:
    inputs = (normal(5), normal(6, 8), normal(8, 5))
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        placements = [(R,), (Shard(1),), (Shard(0),)]
        (result,) = check_placed(torch.addmm, inputs, placements, mesh)
        assert result.placements == (P,)
        placements[0] = (Shard(0),)
        check_placed(torch.addmm, inputs, placements, mesh)


def test_linear_layers_in_inference_mode_need_no_gather() -> None:
    x, weight, bias = normal(2, 4, 6), normal(8, 6), normal(8)
    with emulate(4), torch.inference_mode(), strict():
        mesh = init_device_mesh("cpu", (4,))
        rows = distribute_tensor(weight, mesh, (Shard(0),))
        result = nn.functional.linear(
            distribute_tensor(x, mesh, (R,)), rows, distribute_tensor(bias, mesh, (Shard(0),))
        )
        assert result.placements == (Shard(2),)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        joined = distribute_tensor(x, mesh, (R,)) @ rows.t()
        assert joined.placements == (Shard(2),)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor


_ADDED: dict[str, tuple[tuple[int, ...], ...]] = {
    "addmm": ((3, 3), (3, 3), (3, 3)),
    "addbmm": ((3, 3), (3, 3, 3), (3, 3, 3)),
    "baddbmm": ((3, 3, 3), (3, 3, 3), (3, 3, 3)),
    "addmv": ((3,), (3, 3), (3,)),
}


@pytest.mark.parametrize("name", [*_ADDED])
def test_integers_are_added_to_a_product_as_on_one_device_though_a_rank_has_no_terms(
    name: str,
) -> None:
    tensors = [torch.randint(1, 6, shape) for shape in _ADDED[name]]
    add = getattr(torch, name)
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))  # one rank more than there are indices
        # The second value finds the plan of the first.
        for beta, alpha in ((1.5, 1), (2.5, 1), (0.5, 1.5), (2, 1)):
            expected = add(*tensors, beta=beta, alpha=alpha)
            for dim in range(3):
                spread = [
                    distribute_tensor(t, mesh, (Shard(dim) if dim < t.ndim else Replicate(),))
                    for t in tensors
                ]
                spread[0] = distribute_tensor(tensors[0], mesh, (Replicate(),))
                result = add(*spread, beta=beta, alpha=alpha)
                assert all(torch.equal(x, expected) for x in result.full_tensor().parts)
