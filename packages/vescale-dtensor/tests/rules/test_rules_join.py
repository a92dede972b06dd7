"""Putting together, repeating, and putting back what a view took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_dtensor import (
    DTensor,
    InterleavedShard,
    RaggedShard,
    distribute_tensor,
    emulate,
    strict,
)
from vescale_dtensor._debug.comm_counter import CommCounter

from .rule_oracle import assert_same, check, check_placed

aten = torch.ops.aten
R, P = Replicate(), Partial()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


x, y, cube = normal(6, 4), normal(6, 4), normal(6, 4, 2)

JOINS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "cat": (lambda *ts: torch.cat(ts), (x, y)),
    "cat inside": (lambda *ts: torch.cat(ts, -1), (x, y, normal(6, 4))),
    "cat of unequal": (lambda *ts: torch.cat(ts, 1), (x, normal(6, 1), normal(6, 0))),
    "cat of one": (lambda *ts: torch.cat(ts), (x,)),
    "cat with an empty one": (lambda t: torch.cat([torch.tensor([]), t], -2), (x,)),
    "stack": (lambda *ts: torch.stack(ts, 1), (x, y)),
    "repeat": (lambda t: t.repeat(2, 1, 3), (x,)),
    "tile": (lambda t: t.tile(3, 1), (x,)),
    "repeat_interleave": (lambda t: t.repeat_interleave(2, 1), (cube,)),
    "meshgrid": (
        lambda a, b: torch.meshgrid(a, b, indexing="ij"),
        (normal(6), normal(4)),
    ),
    "new_zeros": (lambda t: t.new_zeros(6, 4), (x,)),
    "new_full of another shape": (lambda t: t.new_full((3, 5), 2.0), (x,)),
    "slice_scatter": (lambda t, s: t.slice_scatter(s, 0, 1, 4), (x, normal(3, 4))),
    "slice_scatter of steps": (lambda t, s: t.slice_scatter(s, 1, 0, 4, 2), (x, normal(6, 2))),
    "slice_scatter of everything": (lambda t, s: t.slice_scatter(s, 0), (x, y)),
    "select_scatter": (lambda t, s: t.select_scatter(s, 0, 3), (x, normal(4))),
    "diagonal_scatter": (lambda t, s: t.diagonal_scatter(s), (cube, normal(2, 4))),
}
# Views of uneven parts may have no place but whole.
_VIEWED = {"repeat_interleave"}


@pytest.mark.parametrize("name", JOINS)
def test_joined_tensors_have_the_values_and_gradients_of_one_device(name: str) -> None:
    function, inputs = JOINS[name]
    check(function, *inputs, allow_gather=name in _VIEWED)


VIEWS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rows": (lambda t: t[1:5] * 2, (x,)),
    "every other row": (lambda t: t[1::2] * 2, (x,)),
    "columns": (lambda t: t[:, :3] * 2, (x,)),
    "all rows": (lambda t: t[-6:] * 2, (x,)),
    "one chunk": (lambda t: [c * 2 for c in t.split([6])], (x,)),
    "a row": (lambda t: t[4] * 2, (x,)),
    "a column": (lambda t: t[:, 1] * 2, (cube,)),
    "an element": (lambda t: t[4, 1] * 2, (x,)),
    "diagonal": (lambda t: t.diagonal() * 2, (cube,)),
    "windows": (lambda t: t.unfold(0, 3, 2) * 2, (x,)),
    "chunks": (lambda t: [c * 2 for c in t.chunk(3)], (x,)),
    "unbind": (lambda t: [c * 2 for c in t.unbind(1)], (x,)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.filterwarnings("ignore::vescale_dtensor.GatherWarning")
def test_gradients_of_views_are_those_of_one_device(name: str) -> None:
    function, inputs = VIEWS[name]
    check(function, *inputs, allow_gather=True)


COPIES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (aten.view_copy.default, ([3, 2, 4],)),
    (aten.expand_copy.default, ([2, 6, 4],)),
    (aten.slice_copy.Tensor, (0, 1, 5, 2)),
    (aten.narrow_copy.default, (0, 1, 3)),
    (aten.select_copy.int, (0, 3)),
    (aten.permute_copy.default, ([1, 0],)),
    (aten.t_copy.default, ()),
    (aten.transpose_copy.int, (0, 1)),
    (aten.unsqueeze_copy.default, (1,)),
    (aten.squeeze_copy.default, ()),
    (aten.diagonal_copy.default, ()),
    (aten.unbind_copy.int, (0,)),
    (aten.split_with_sizes_copy.default, ([1, 2, 3],)),
    (aten.unfold_copy.default, (0, 2, 2)),
]


@pytest.mark.parametrize("case", COPIES, ids=lambda case: str(case[0]))
def test_copies_of_views_share_nothing_with_their_base(
    case: tuple[Callable[..., Any], tuple[Any, ...]],
) -> None:
    function, rest = case
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (4,))
        for placement in (Shard(0), Shard(1), RaggedShard((0,), 1, (3, 0, 1, 2)), P):
            base = distribute_tensor(x, mesh, (placement,))
            copies, expected = function(base, *rest), function(x, *rest)
            base.zero_()
            pairs = (
                zip(copies, expected, strict=True)
                if isinstance(copies, list | tuple)
                else [(copies, expected)]
            )
            for ours, theirs in pairs:
                assert_same(ours, theirs, placement)


def test_tensors_cut_alike_are_put_together_without_sending() -> None:
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (4,))
        weights: list[Tensor] = [
            distribute_tensor(normal(6, 4), mesh, (Shard(0),)) for _ in range(3)
        ]
        with CommCounter() as sent:
            fused = torch.cat(weights)
            tiled = weights[0].repeat(2, 1)
            stacked = torch.stack(weights)
        assert sent.nbytes == 0
        assert fused.placements == (InterleavedShard(0, 3),)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        assert tiled.placements == (InterleavedShard(0, 2),)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        assert stacked.placements == (Shard(1),)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor


def test_caches_that_begin_as_an_empty_tensor_grow() -> None:
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (4,))
        keys = normal(2, 4, 3, 5)
        heads = distribute_tensor(keys, mesh, (Shard(1),))
        with CommCounter() as sent:
            grown = torch.cat([torch.cat([torch.tensor([]), heads], dim=-2), heads], dim=-2)
        assert sent.nbytes == 0
        assert grown.placements == (Shard(1),)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        assert_same(grown, torch.cat([keys, keys], dim=-2))


def test_new_tensors_of_the_same_shape_have_the_same_placements() -> None:
    with emulate(4), strict(), CommCounter() as sent:
        mesh = init_device_mesh("cpu", (2, 2))
        like = distribute_tensor(x, mesh, (Shard(0), P))
        for new in (like.new_zeros(6, 4), like.new_empty(6, 4), like.new_full((6, 4), 3.0)):
            assert new.placements == (Shard(0), R)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        assert like.new_ones(3).placements == (R, R)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        strided = like.new_empty_strided((6, 4), (1, 6))
        assert isinstance(strided, DTensor)
        assert strided.placements == (Shard(0), P)  # gradients are copied to these
        assert strided.to_local().of_rank(0).stride() == (1, 3)  # pyright: ignore[reportAttributeAccessIssue]: emulated
    assert sent.nbytes == 0


@pytest.mark.parametrize("placement", [Shard(0), RaggedShard((0,), 1, (1, 2, 0, 3))])
def test_gradients_of_rows_go_back_to_the_ranks_that_have_the_rows(placement: Any) -> None:
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (4,))
        base = distribute_tensor(x, mesh, (placement,)).requires_grad_()
        for take in (lambda t: t[1:6], lambda t: t[1::2], lambda t: t[5]):
            with CommCounter() as sent:
                part = take(base)
                (grad,) = torch.autograd.grad(part, base, torch.ones_like(part))
            assert sent.nbytes == 0
            plain = x.clone().requires_grad_()
            assert_same(grad, torch.autograd.grad(take(plain).sum(), plain)[0])
            if placement == Shard(0):
                assert grad.placements == (Shard(0),)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor


def test_a_tensor_cut_where_it_is_put_together_is_cut_elsewhere_first() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        placements = [(Shard(0),), (Shard(0),)]
        (joined,) = check_placed(
            lambda a, b: torch.cat([a, b]), (normal(5, 4), normal(3, 4)), placements, mesh
        )
        assert joined.placements == (Shard(1),)
