"""Compiled programs on tensors whose sizes and placements change from call to call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import (
    DTensor,
    GatherWarning,
    InterleavedShard,
    RaggedShard,
    distribute_tensor,
)
from vescale_testing import World

SIZES = (4, 6, 7, 8, 1, 0, 3)


def _mesh() -> DeviceMesh:
    warnings.simplefilter("ignore", GatherWarning)
    # What comes after a graph break is given tensors that are no leaves, whose .grad torch reads.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    # Inductor's own imports.
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    torch._dynamo.reset()
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x.sin() * x.shape[0]


def _mlp(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight) @ weight.t()


def _views(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x.reshape(x.shape[0] * 6), x.new_zeros(x.shape[0])]) + x.numel()


def _broken(x: Tensor, weight: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    y.add_(x.shape[0])
    return y @ weight


PROGRAMS = {f.__name__: f for f in (_scaled, _mlp, _views, _broken)}


def _placements(num_rows: int) -> list[Placement]:
    ragged = [RaggedShard((0,), 1, (1, num_rows - 1))] if num_rows > 1 else []
    return [Shard(0), Shard(1), Replicate(), Partial(), InterleavedShard(1, 3), *ragged]


def _check_one(
    compiled: Callable[..., Any], program: Callable[..., Tensor], x: DTensor, full: Tensor
) -> None:
    """Compare results and gradients with those of one device."""
    mesh = x.device_mesh
    weight = torch.arange(24.0, dtype=torch.float64).reshape(6, 4) / 10
    plain, plain_weight = full.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = program(plain, plain_weight)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    own_weight = distribute_tensor(weight, mesh, (Shard(1),))
    x.requires_grad_()
    own_weight.requires_grad_()
    result = compiled(x, own_weight)
    result.backward(distribute_tensor(cotangent, mesh, (Replicate(),)))
    assert isinstance(result, DTensor)
    pairs: list[tuple[Any, Any]] = [(result, expected), (x.grad, plain.grad)]
    if plain_weight.grad is not None:
        pairs.append((own_weight.grad, plain_weight.grad))
    for actual, wanted in pairs:
        # Autograd's own zeros, of what nothing depends on, are plain tensors.
        whole = actual.full_tensor() if isinstance(actual, DTensor) else actual
        # The graph is of the same operators; only sums over ranks round anew.
        torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12)


def _check_sizes(
    program: str,
    placement: int,
    dynamic: bool | None,
    backend: str = "aot_eager",
    sizes: tuple[int, ...] = SIZES,
) -> None:
    mesh, function = _mesh(), PROGRAMS[program]
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    for num_rows in sizes:
        full = torch.randn(num_rows, 6, dtype=torch.float64)
        options = _placements(num_rows)
        x = distribute_tensor(full, mesh, (options[placement % len(options)],))
        _check_one(compiled, function, x, full)


@pytest.mark.by_day("_scaled-0-True", "_scaled-2-None", "_views-0-True")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "placement", "dynamic"),
    [
        ("_scaled", 0, None),
        ("_scaled", 0, True),
        ("_scaled", 2, None),
        ("_mlp", 0, None),
        ("_mlp", 5, True),
        ("_mlp", 3, False),
        ("_views", 0, True),
        ("_views", 4, None),
        ("_broken", 1, None),
        ("_broken", 0, None),
    ],
)
def test_a_compiled_program_is_right_for_every_size(
    world2: World, program: str, placement: int, dynamic: bool | None
) -> None:
    world2.run(_check_sizes, program, placement, dynamic)


@pytest.mark.slow
def test_inductor_compiles_anew_for_every_size(world2: World) -> None:
    world2.run(_check_sizes, "_scaled", 0, None, "inductor", (4, 6, 7))


def _check_equal_local_sizes() -> None:
    """Rank 0 has two rows of a tensor of three and of one of four."""
    mesh = _mesh()
    compiled = torch.compile(_scaled, backend="eager")
    for num_rows in (4, 3):
        full = torch.randn(num_rows, 6, dtype=torch.float64)
        _check_one(compiled, _scaled, distribute_tensor(full, mesh, (Shard(0),)), full)


@pytest.mark.slow
def test_global_sizes_count_where_local_ones_are_equal(world2: World) -> None:
    world2.run(_check_equal_local_sizes)


def _check_placements_and_strides() -> None:
    mesh = _mesh()
    compiled = torch.compile(_mlp, backend="aot_eager")
    for num_rows in (6, 4):
        for placement in _placements(num_rows):
            for step in (False, True):
                full = torch.randn(num_rows, 6, dtype=torch.float64)
                full = full.t().contiguous().t() if step else full
                _check_one(compiled, _mlp, distribute_tensor(full, mesh, (placement,)), full)


@pytest.mark.slow
def test_placements_and_strides_may_change_from_call_to_call(world2: World) -> None:
    world2.run(_check_placements_and_strides)


def _added(x: Tensor, plain: Tensor) -> Tensor:
    return x.reshape(plain.shape[0], -1) * plain.sum() + plain.new_ones(plain.shape[0], 1)


def _check_plain_sizes(dynamic: bool | None) -> None:
    mesh = _mesh()
    compiled = torch.compile(_added, backend="aot_eager", dynamic=dynamic)
    for num_rows in (2, 3, 4, 6):
        x, plain = torch.randn(4, 6, dtype=torch.float64), torch.randn(num_rows).double()
        actual: Any = compiled(distribute_tensor(x, mesh, (Shard(0),)), plain)
        torch.testing.assert_close(actual.full_tensor(), _added(x, plain), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_plain_tensors_of_changing_sizes_may_be_mixed_in(
    world2: World, dynamic: bool | None
) -> None:
    world2.run(_check_plain_sizes, dynamic)


def _check_mark_dynamic() -> None:
    mesh = _mesh()
    compiled = torch.compile(_scaled, backend="eager")
    for num_rows in (4, 6, 7):
        full = torch.randn(num_rows, 6, dtype=torch.float64)
        x = distribute_tensor(full, mesh, (Shard(0),))
        torch._dynamo.maybe_mark_dynamic(x, 0)
        _check_one(compiled, _scaled, x, full)
    torch._dynamo.reset()
    x = distribute_tensor(torch.randn(4, 6), mesh, (Shard(0),))
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(Exception, match="use maybe_mark_dynamic"):
        compiled(x, x)


@pytest.mark.slow
def test_a_size_can_be_marked_dynamic_but_not_demanded_to_be(world2: World) -> None:
    world2.run(_check_mark_dynamic)


def _check_stale_views() -> None:
    mesh = _mesh()
    x = distribute_tensor(torch.ones(4, 6), mesh, (Shard(0),))
    view = x.diagonal()
    x.add_(1)
    compiled = torch.compile(_scaled, backend="eager")
    with pytest.raises(Exception, match="had to be gathered"):
        compiled(view, view)


@pytest.mark.slow
def test_views_that_follow_their_base_are_not_compiled(world2: World) -> None:
    world2.run(_check_stale_views)


def _written(x: Tensor) -> Tensor:
    x.add_(1)
    x[1:].mul_(x.shape[0])
    return x.detach() * 2


def _check_writes() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    torch._dynamo.reset()
    compiled = torch.compile(_written, backend="aot_eager")
    # A slice of a mesh is another mesh, of which a program knows as little.
    for on in (mesh, mesh["a"]):
        for num_rows in (4, 5, 2):
            plain = torch.randn(num_rows, 6, dtype=torch.float64)
            placements = (Shard(0), Replicate())[: on.ndim]
            x = distribute_tensor(plain, on, placements)
            result = compiled(x)
            assert isinstance(result, DTensor)
            assert result.device_mesh == on
            assert torch.equal(result.full_tensor(), _written(plain))
            assert torch.equal(x.full_tensor(), plain)


@pytest.mark.slow
def test_compiled_programs_write_inputs_on_two_meshes(world2: World) -> None:
    world2.run(_check_writes)
