"""Indexing, gathering and scattering against plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_dtensor import DTensor, RaggedShard, distribute_tensor, emulate, strict
from vescale_dtensor._debug.comm_counter import CommCounter

from .rule_oracle import check, check_placed

R, P = Replicate(), Partial()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def below(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape)


def _written(method: str, *rest: Any, **named: Any) -> Callable[..., Tensor]:
    """Return what calls an in-place method of a copy that autograd records."""
    return lambda x, *tensors: getattr(x * 1, method)(*rest, *tensors, **named)


def _set_rows(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    y = x * 1
    y[index] = values
    return y


def _set_columns(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    y = x * 1
    y[:, index] = values
    return y


x, wide = normal(6, 4), normal(6, 4, 3)
rows, signed = torch.tensor([4, 0, 5]), torch.tensor([-1, 2, -4, 1])
each = below(6, 3, 4)

READS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "embedding": (lambda i, w: nn.functional.embedding(i, w), (below(6, 2, 4), x)),
    "embedding with padding": (
        lambda i, w: nn.functional.embedding(i, w, padding_idx=2),
        (below(6, 8), x),
    ),
    "embedding scaled by frequency": (
        lambda i, w: nn.functional.embedding(i, w, scale_grad_by_freq=True),
        (below(3, 8), x),
    ),
    "embedding of one id": (lambda i, w: nn.functional.embedding(i, w), (below(6), x)),
    "index_select": (lambda x, i: x.index_select(0, i), (x, below(6, 5))),
    "index_select of one": (lambda x, i: x.index_select(0, i), (x, torch.tensor(4))),
    "index_select inside": (lambda x, i: x.index_select(1, i), (wide, below(4, 3))),
    "gather": (lambda x, i: x.gather(0, i), (x, each)),
    "gather of fewer": (lambda x, i: x.gather(1, i), (x, below(4, 5, 2))),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), (x, below(4, 6, 3))),
    "x[i]": (lambda x, i: x[i], (wide, signed)),
    "x[i] of matrices": (lambda x, i: x[i], (x, below(6, 2, 3))),
    "x[i] of one": (lambda x, i: x[i], (wide, torch.tensor(3))),
    "x[:, i]": (lambda x, i: x[:, i], (wide, signed)),
    "x[i, j]": (lambda x, i, j: x[i, j], (wide, below(6, 3, 1), below(4, 2))),
    "x[i, :, j]": (lambda x, i, j: x[i, :, j], (wide, below(6, 4), below(3, 4))),
    "x[:, i, j]": (lambda x, i, j: x[:, i, j], (wide, below(4, 5), below(3, 5))),
}


@pytest.mark.parametrize("name", READS)
def test_reads_have_the_values_and_gradients_of_one_device(name: str) -> None:
    function, inputs = READS[name]
    check(function, *inputs)


WRITES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "index_add": (lambda x, i, v: x.index_add(0, i, v, alpha=2), (x, below(6, 5), normal(5, 4))),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v), (x, rows, normal(3, 4))),
    "index_copy of one": (
        lambda x, i, v: x.index_copy(0, i, v),
        (x, torch.tensor(4), normal(1, 4)),
    ),
    "index_add of one": (lambda x, i, v: x.index_add(0, i, v), (x, torch.tensor(1), normal(1, 4))),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), (x, signed)),
    "index_put": (lambda x, i, v: x.index_put((i,), v), (wide, rows, normal(3, 1, 3))),
    "index_put added": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (wide, below(6, 2, 3), normal(4, 3)),
    ),
    "index_put of pairs": (
        lambda x, i, j, v: x.index_put((i, j), v, accumulate=True),
        (wide, below(6, 5), below(4, 5), normal(5, 3)),
    ),
    "scatter": (lambda x, i, v: x.scatter(0, i, v), (x, each.sort(0)[0], normal(3, 4))),
    "scatter of a value": (lambda x, i: x.scatter(1, i, 3.0), (x, below(4, 6, 2))),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i, v), (x, each, normal(3, 4))),
    "scatter_add of more": (
        lambda x, i, v: x.scatter_add(1, i, v),
        (x, below(4, 5, 7), normal(5, 7)),
    ),
    "scatter_reduce": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "sum", include_self=False),
        (x, each, normal(3, 4)),
    ),
    "scatter_reduce amax": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "amax"),
        (x, each, normal(3, 4)),
    ),
    "scatter_reduce mean": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "mean"),
        (x, each, normal(3, 4)),
    ),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.filterwarnings("ignore::vescale_dtensor.GatherWarning")
def test_writes_have_the_values_and_gradients_of_one_device(name: str) -> None:
    function, inputs = WRITES[name]
    # What the gradient of a mean writes in place is pending for some placements.
    check(function, *inputs, allow_gather=name == "scatter_reduce mean")


IN_PLACE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "index_add_": (_written("index_add_", 0), (x, below(6, 5), normal(5, 4))),
    "index_copy_": (_written("index_copy_", 1), (x, torch.tensor([3, 1]), normal(6, 2))),
    "index_fill_": (lambda x, i: (x * 1).index_fill_(1, i, -1.0), (x, torch.tensor([1]))),
    "index_reduce_": (
        lambda x, i, v: x.detach().clone().index_reduce_(0, i, v.detach(), "amax"),
        (x, below(6, 5), normal(5, 4)),
    ),
    "x[i] = v": (_set_rows, (wide, rows, normal(4, 3))),
    "x[:, i] = v": (_set_columns, (wide, torch.tensor([2, -4]), normal(2, 3))),
    "scatter_": (_written("scatter_", 0), (x, each.sort(0)[0], normal(3, 4))),
    "scatter_ of a value": (lambda x, i: (x * 1).scatter_(0, i, 1.5), (x, each)),
    "scatter_add_": (_written("scatter_add_", 1), (x, below(4, 6, 5), normal(6, 5))),
    "scatter_reduce_": (
        lambda x, i, v: x.detach().clone().scatter_reduce_(0, i, v.detach(), "prod"),
        (x, each, normal(3, 4)),
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.filterwarnings("ignore::vescale_dtensor.GatherWarning")
@pytest.mark.filterwarnings("ignore:index_reduce.*beta:UserWarning")
def test_writes_in_place_have_the_values_and_gradients_of_one_device(name: str) -> None:
    function, inputs = IN_PLACE[name]
    check(function, *inputs, allow_gather=True)


def test_a_cut_vocabulary_is_looked_up_without_sending() -> None:
    ids, weight = below(10, 2, 3), normal(10, 4)
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (4,))
        for rows in (Shard(0), RaggedShard((0,), 1, (1, 0, 2, 7))):
            with CommCounter() as sent:
                found = nn.functional.embedding(
                    distribute_tensor(ids, mesh, (R,)), distribute_tensor(weight, mesh, (rows,))
                )
            assert sent.nbytes == 0
            assert found.placements == (P,)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        check_placed(nn.functional.embedding, (ids, weight), [(P,), (Shard(0),)], mesh)


def test_gradients_of_embeddings_are_pending_sums_over_data_parallel_ranks() -> None:
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (2, 2))
        weight = distribute_tensor(normal(10, 4), mesh, (R, Shard(1))).requires_grad_()
        ids = distribute_tensor(below(10, 4, 3), mesh, (Shard(0), R))
        with CommCounter() as sent:
            found = nn.functional.embedding(ids, weight)
            found.backward(torch.ones_like(found))
        assert sent.nbytes == 0
        assert found.placements == (Shard(0), Shard(2))  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.placements == (P, Shard(1))


def test_indices_that_do_not_exist_are_errors_on_every_rank() -> None:
    weight = normal(3, 4)
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        table = distribute_tensor(weight, mesh, (Shard(0),))  # nothing for the last rank
        for bad in (3, -4):
            index = distribute_tensor(torch.tensor([0, bad]), mesh, (R,))
            grid = distribute_tensor(torch.full((1, 4), bad), mesh, (R,))
            for read in (
                lambda index=index: nn.functional.embedding(index, table),
                lambda index=index: table.index_select(0, index),
                lambda index=index: table[index],
                lambda grid=grid: table.gather(0, grid),
                lambda index=index: table.clone().index_put_((index,), table[:2] * 1),
                lambda index=index: table.clone().index_fill_(0, index, 1.0),
                lambda grid=grid: table.clone().scatter_(0, grid, 1.0),
            ):
                with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
                    read()


def test_a_lookup_in_parts_keeps_the_sign_of_zero() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        table = distribute_tensor(torch.full((8, 1), -0.0), mesh, (Shard(0),))
        rows = table[distribute_tensor(torch.tensor([7, 1]), mesh, (R,))]
        assert isinstance(rows, DTensor)
        found = rows.full_tensor()
        assert torch.signbit(found.of_rank(2)).all()  # pyright: ignore[reportAttributeAccessIssue]: emulated
