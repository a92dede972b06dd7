"""Run a function on distributed tensors of many placements, and on plain ones.

Call everything here inside ``emulate(4)``.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from vescale_dtensor import (
    DTensor,
    GatherWarning,
    InterleavedShard,
    RaggedShard,
    distribute_tensor,
    emulate,
    is_sharded,
    strict,
)
from vescale_dtensor._comm.emulation import per_rank
from vescale_dtensor._debug.comm_counter import CommCounter

from .device import DEVICE

Placements = tuple[Placement, ...]
MESH_SHAPES = ((4,), (2, 2))
# Of all placements of the first tensor; `nox -s nightly` takes more.
CASES_PER_MESH = int(os.environ.get("VESCALE_RULE_CASES", "4"))


def placements_of(shape: Sequence[int], mesh_shape: Sequence[int]) -> Iterator[Placements]:
    """Yield placements of a tensor: whole, cut in all ways, pending."""
    whole: Placements = (Replicate(),) * len(mesh_shape)
    yield whole
    yield (Partial(), *whole[1:])
    single: list[Placement] = [Shard(dim) for dim in range(len(shape))]
    for dim, size in enumerate(shape):
        if len(mesh_shape) == 1:
            yield (single[dim],)
            units = (1, 0, size, 1)
        else:
            units = (0, size) if dim % 2 else (1, size)
        yield (RaggedShard((dim,), 1, units), *whole[1:])
        if size % 2 == 0:
            yield (InterleavedShard(dim, 2), *whole[1:])
        if size >= 3:
            yield (InterleavedShard(dim, (size - 1, 1)), *whole[1:])
    if len(mesh_shape) == 2:
        for first in (*single, Replicate(), Partial()):
            for second in single:
                yield (first, second)
        if single:
            yield (single[-1], Partial())


def spread(tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Distribute a tensor; what is pending is pending on every rank, not only on the first."""
    requires_grad = tensor.requires_grad
    made = distribute_tensor(tensor.detach(), mesh, placements)
    pending = [a for a, p in enumerate(placements) if isinstance(p, Partial)]
    if pending and tensor.dtype.is_floating_point:

        def shifted(coordinate: tuple[int, ...], local: Tensor) -> Tensor:
            place = coordinate[pending[0]]
            last = mesh.size(pending[0]) - 1
            # Whole numbers, so that nothing is rounded away where they cancel.
            shift = -last if place == last else 1
            return local + shift if len(pending) == 1 else local

        local = per_rank(shifted, mesh, made.to_local())
        made = DTensor.from_local(local, mesh, placements, shape=tensor.shape)
    leaf = made.detach().requires_grad_(requires_grad)
    assert isinstance(leaf, DTensor)
    return leaf


def check(
    function: Callable[..., Any],
    *tensors: Tensor,
    exact: bool = False,
    only: Callable[[Placements], bool] | None = None,
    gathers: bool = False,
    seed: int = 0,
) -> int:
    """Compare results and gradients of ``function`` over placements of the tensors, drawn.

    Returns how many cases there were.

    Args:
        function: Takes the tensors, returns a tensor or a tuple of them.
        tensors: Its arguments. Those that require a gradient get one.
        exact: Whether results and gradients must have the same bits where nothing is pending
            and no dim is cut that the function may reduce; given by ``only``.
        only: Leaves out placements of the first tensor.
        gathers: Whether the fallback may gather.
        seed: For the placements of other tensors.
    """
    tensors = tuple(t.detach().to(DEVICE).requires_grad_(t.requires_grad) for t in tensors)
    plain = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    expected = pytree.tree_leaves(function(*plain))
    cotangents = [torch.randn_like(t) if t.requires_grad else None for t in expected]
    expected_grads = _gradients(expected, plain, cotangents)
    rng = random.Random(seed)
    count = 0
    for mesh_shape in MESH_SHAPES:
        mesh = init_device_mesh(DEVICE, mesh_shape)
        found = [p for p in placements_of(tensors[0].shape, mesh_shape) if not only or only(p)]
        for first in rng.sample(found, min(len(found), CASES_PER_MESH)):
            others = [rng.choice([*placements_of(t.shape, mesh_shape)]) for t in tensors[1:]]
            case = [first, *others]
            count += 1
            parts = [spread(t, mesh, p) for t, p in zip(tensors, case, strict=True)]
            try:
                with nullcontext() if gathers else strict(), warnings.catch_warnings():
                    warnings.simplefilter("ignore", GatherWarning)
                    results = pytree.tree_leaves(function(*parts))
                    spread_cotangents = [
                        None if c is None else distribute_tensor(c, mesh, _any(c, mesh, rng))
                        for c in cotangents
                    ]
                    grads = _gradients(results, parts, spread_cotangents)
                bitwise = exact and not any(isinstance(p, Partial) for each in case for p in each)
                for got, wanted in zip(results, expected, strict=True):
                    _compare(got, wanted, bitwise=bitwise)
                # Kernels of GPUs may add up gradients in any order, another one each time.
                bitwise = bitwise and DEVICE == "cpu"
                for got, wanted in zip(grads, expected_grads, strict=True):
                    _compare(got, wanted, bitwise=bitwise)
            except Exception as error:
                error.add_note(f"mesh {mesh_shape}, placements {case}")
                raise
    return count


def _any(tensor: Tensor, mesh: DeviceMesh, rng: random.Random) -> Placements:
    found = [*placements_of(tensor.shape, tuple(mesh.shape))]
    return rng.choice([p for p in found if not any(isinstance(each, Partial) for each in p)])


def _gradients(results: Sequence[Any], leaves: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    wanted = [t for t in leaves if t.requires_grad]
    given = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None]
    if not wanted or not given:
        return []
    outs, grads = zip(*given, strict=True)
    return torch.autograd.grad(outs, wanted, grads, allow_unused=True)


def _compare(got: Any, wanted: Any, *, bitwise: bool) -> None:
    if wanted is None or got is None:
        assert got is wanted, (got, wanted)
        return
    assert isinstance(got, DTensor)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert got.dtype == wanted.dtype, (got.dtype, wanted.dtype)
    detached = got.detach()
    assert isinstance(detached, DTensor)
    full = detached.full_tensor()
    for rank in range(4):
        mine = full.of_rank(rank)  # pyright: ignore[reportAttributeAccessIssue]: emulated
        rounds = wanted.dtype.is_floating_point or wanted.dtype.is_complex
        if bitwise or not rounds:
            assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(wanted)), (mine, wanted)
        # Float64 sums in another order differ in the last bits only.
        torch.testing.assert_close(mine, wanted.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)


def sent_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Return what rank 0 sends while ``function`` runs, without falling back."""
    with CommCounter() as counter, strict():
        function(*args)
    return counter.nbytes


__all__ = ["check", "emulate", "is_sharded", "placements_of", "sent_bytes", "spread"]
