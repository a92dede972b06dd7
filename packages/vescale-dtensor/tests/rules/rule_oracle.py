"""Compare operators on distributed tensors with the same operators on plain ones."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import (
    DTensor,
    InterleavedShard,
    RaggedShard,
    distribute_tensor,
    emulate,
    strict,
)

from .device import DEVICE

Placements = tuple[Placement, ...]

MESH_SHAPES = ((4,), (2, 2))
# Splitting a sum changes its rounding: float64 keeps more than this.
TOLERANCE = 1e-12
# Assignments of placements per mesh; `nox -s nightly` tries more.
CASES_PER_MESH = int(os.environ.get("VESCALE_RULE_CASES", "4"))


def placements_of_axis(tensor: Tensor, num_ranks: int) -> list[Placement]:
    """Every kind of placement, ragged and interleaved ones among them."""
    found: list[Placement] = [Replicate()]
    if tensor.dtype is not torch.bool:
        found.append(Partial())
    for dim, size in enumerate(tensor.shape):
        found.append(Shard(dim))
        if size >= 2:
            units = [0] * num_ranks
            units[-1], units[0] = size - 1, 1
            found.append(RaggedShard((dim,), 1, tuple(units)))
        if size and size % 2 == 0:
            found.append(InterleavedShard(dim, 2))
        if size >= 3:
            found.append(InterleavedShard(dim, (1, size - 1)))
    return found


def placements_of(tensor: Tensor, mesh_shape: Sequence[int], rng: random.Random) -> Placements:
    """Random placements that fit together: ragged ones only as a dim's outermost cut."""
    found: list[Placement] = []
    for num_ranks in mesh_shape:
        taken = {getattr(p, "dim", None) for p in found} - {None}
        options = [
            p
            for p in placements_of_axis(tensor, num_ranks)
            if type(p) is Shard or getattr(p, "dim", None) not in taken
        ]
        kinds = sorted({type(p).__name__ for p in options})
        kind = rng.choice([*kinds, "Shard"] if "Shard" in kinds else kinds)
        found.append(rng.choice([p for p in options if type(p).__name__ == kind]))
    return tuple(found)


def check(
    function: Callable[..., Any],
    *inputs: Tensor,
    mesh_shapes: Sequence[tuple[int, ...]] = MESH_SHAPES,
    allow_gather: bool = False,
    seed: int = 0,
) -> None:
    """Run ``function`` on random placements of ``inputs``, forward and backward.

    Args:
        function: Takes the inputs, returns a tensor or several.
        inputs: Plain tensors. Floating point ones get gradients.
        mesh_shapes: The meshes.
        allow_gather: Whether operators without a rule may occur.
        seed: Of the choice of placements.
    """
    rng = random.Random(seed)
    inputs = tuple(each.to(DEVICE) for each in inputs)
    for mesh_shape in mesh_shapes:
        with emulate(4), torch.device(DEVICE):
            mesh = init_device_mesh(DEVICE, mesh_shape)
            for _ in range(CASES_PER_MESH):
                placements = [placements_of(each, mesh_shape, rng) for each in inputs]
                check_placed(function, inputs, placements, mesh, allow_gather=allow_gather)


def check_placed(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    placements: Sequence[Placements],
    mesh: DeviceMesh,
    *,
    allow_gather: bool = False,
) -> list[DTensor]:
    """Compare values and gradients under given placements; return the results."""
    plain = [_leaf(each) for each in inputs]
    parts = [_leaf_of(placed(e, mesh, p), e) for e, p in zip(inputs, placements, strict=True)]
    with nullcontext() if allow_gather else strict():
        results = _tensors(function(*parts))
        expected = _tensors(function(*plain))
        for ours, theirs in zip(results, expected, strict=True):
            assert_same(ours, theirs, placements)
        with_grad = [i for i, each in enumerate(expected) if each.requires_grad]
        if with_grad:
            grads = [torch.randn_like(expected[i]) for i in with_grad]
            wanted = [each for each in plain if each.requires_grad]
            ours = torch.autograd.grad(
                [results[i] for i in with_grad],
                [each for each in parts if each.requires_grad],
                [distribute_tensor(grad, mesh, _grad_placements(grad, mesh)) for grad in grads],
                allow_unused=True,
            )
            theirs = torch.autograd.grad(
                [expected[i] for i in with_grad], wanted, grads, allow_unused=True
            )
            # Unused inputs have none.
            found = cast("tuple[Tensor | None, ...]", ours)
            for got, right in zip(found, theirs, strict=True):
                assert (got is None) == (right is None), placements
                if got is not None:
                    assert_same(got, right, placements)
    return results


def assert_same(ours: Tensor, theirs: Tensor, note: object = None) -> None:
    """Every rank sees the value that one device has."""
    assert isinstance(ours, DTensor), note
    assert ours.shape == theirs.shape, (note, ours.shape, theirs.shape)
    assert ours.dtype == theirs.dtype, note
    detached = ours.detach()
    assert isinstance(detached, DTensor)
    full = detached.full_tensor()
    for rank in range(4):
        got = full.of_rank(rank)  # pyright: ignore[reportAttributeAccessIssue]: emulated
        assert torch.allclose(
            got, theirs.detach(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
        ), (note, ours.placements, rank, got, theirs)


def placed(tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Distribute a tensor; pending sums are of parts that all differ."""
    made = distribute_tensor(tensor.detach(), mesh, placements)
    if not any(isinstance(p, Partial) for p in placements):
        return made
    noise = torch.randn_like(tensor) if tensor.is_floating_point() else torch.ones_like(tensor)
    axis = next(a for a, p in enumerate(placements) if isinstance(p, Partial))
    zero = tuple(Partial() if a == axis else Replicate() for a in range(mesh.ndim))
    # What the first rank has too much, the others lack: 3 * noise - noise - noise - noise.
    spread = distribute_tensor(noise, mesh, tuple(Replicate() for _ in zero))
    num_ranks = mesh.size(axis)
    first = distribute_tensor(noise * num_ranks, mesh, zero)
    offset = DTensor.from_local(
        first.to_local() - spread.to_local(), mesh, zero, shape=tensor.shape
    )
    pending = made + offset.redistribute(placements=placements)
    assert isinstance(pending, DTensor)
    return pending


def _grad_placements(grad: Tensor, mesh: DeviceMesh) -> Placements:
    if not grad.ndim:
        return (Replicate(),) * mesh.ndim
    return tuple(Shard(grad.ndim - 1) if a == 0 else Replicate() for a in range(mesh.ndim))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _leaf_of(tensor: DTensor, like: Tensor) -> DTensor:
    leaf = tensor.detach().requires_grad_(like.is_floating_point())
    assert isinstance(leaf, DTensor)
    return leaf


def _tensors(result: Any) -> list[Any]:
    return list(_flat(result))


def _flat(result: Any) -> Iterator[Any]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for each in result:
            yield from _flat(each)
