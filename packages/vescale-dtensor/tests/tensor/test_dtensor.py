"""Distributed tensors against plain ones, on a 2x2 mesh of ranks."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed.tensor as torch_dtensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import (
    CommCounter,
    DTensor,
    GatherWarning,
    InterleavedShard,
    RaggedShard,
    RankTensor,
    distribute_tensor,
    emulate,
)
from vescale_testing import World

# Shape and placements on the axes (pp, tp); the first two share a shape, not a layout.
LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((8, 6), (RaggedShard((0,), 8, (1, 0)), Shard(1))),
    ((8, 6), (Replicate(), Shard(0))),
    ((7,), (Replicate(), Shard(0))),
    ((), (RaggedShard((0,), 1, (0, 1)), Replicate())),
    ((4, 12), (RaggedShard((0,), 1, (1, 3)), InterleavedShard(1, 3))),
    ((3, 2), (Shard(0), Shard(0))),
    ((8, 4), (Shard(1), InterleavedShard(0, (4, 2, 2)))),
    ((8, 4), (RaggedShard((0,), 8, (0, 1)), InterleavedShard(0, (4, 2, 2)))),
]


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def tensors_and_parts(mesh: DeviceMesh) -> list[tuple[Tensor, DTensor]]:
    full = [torch.randn(shape) for shape, _ in LAYOUTS]
    return [(x, distribute_tensor(x, mesh, p)) for x, (_, p) in zip(full, LAYOUTS, strict=True)]


def _check_round_trip() -> None:
    for full, parts in tensors_and_parts(mesh_2x2()):
        assert isinstance(parts, DTensor)
        assert parts.shape == full.shape
        assert parts.numel() == full.numel()
        assert torch.equal(parts.full_tensor(), full)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's class cannot be a base there")
def test_the_class_is_a_subclass_of_torchs() -> None:
    assert issubclass(DTensor, torch_dtensor.DTensor)


def test_full_tensor_puts_together_what_was_distributed(world4: World) -> None:
    world4.run(_check_round_trip)


POINTWISE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 2 + 1,
    lambda x: x + x.relu() / 3,
    lambda x: torch.where(x > 0, x, -x),
    lambda x: x.clone().mul_(3).add_(x, alpha=0.5),
    lambda x: torch.zeros_like(x).copy_(x),
    lambda x: x.to(torch.float64).lerp(torch.ones_like(x, dtype=torch.float64), 0.25),
]


def _check_pointwise() -> None:
    for full, parts in tensors_and_parts(mesh_2x2()):
        for function in POINTWISE:
            result = function(parts)
            assert isinstance(result, DTensor)
            assert torch.equal(result.full_tensor(), function(full))


def test_pointwise_operators_run_on_the_parts(world4: World) -> None:
    world4.run(_check_pointwise)


def _check_from_local() -> None:
    mesh = init_device_mesh("cpu", (4,))
    local = torch.randn(2, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of a computed tensor: even without autograd a view of it says that it needs a gradient.
        made = DTensor.from_local(local * 2, mesh, (Shard(0),), shape=(8, 3))
    (made * 3).sum().backward()
    assert local.grad is not None
    assert torch.equal(local.grad, torch.full((2, 3), 6.0))


def test_a_computed_part_can_be_wrapped_and_gets_its_gradient(world4: World) -> None:
    world4.run(_check_from_local)


def _check_clipping() -> None:
    mesh = mesh_2x2()
    pairs = tensors_and_parts(mesh)
    plain = [nn.Parameter(x.clone()) for x, _ in pairs]
    parts = [nn.Parameter(x) for _, x in pairs]
    for (x, _), p, q in zip(pairs, plain, parts, strict=True):
        p.grad, q.grad = 3 * x, distribute_tensor(3 * x, mesh, q.placements)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
    for order in (2.0, 1.0, float("inf")):
        expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, order)
        norm = torch.nn.utils.clip_grad_norm_(parts, 1.0, order)
        # float32 norms of plain tensors are themselves rounded.
        assert isinstance(norm, DTensor)
        torch.testing.assert_close(norm.full_tensor(), expected)
        assert f"{norm:.2f}" == f"{expected:.2f}"
        for p, q in zip(plain, parts, strict=True):
            assert isinstance(q.grad, DTensor)
            assert p.grad is not None
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def test_clipping_is_right_over_mixed_placements(world4: World) -> None:
    world4.run(_check_clipping)


CUTS: list[Placement] = [Replicate(), Shard(0), Shard(1), RaggedShard((0,), 1, (3, 290, 0, 7))]


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
def test_norms_of_small_and_large_tensors_do_not_depend_on_the_cut(order: float) -> None:
    values = [torch.randn(300, 300), torch.randn(300, 2), torch.zeros(300, 1)]
    exact = torch.stack([torch.linalg.vector_norm(x.double(), order) for x in values])
    totals: list[float] = []
    for cut in CUTS:
        with emulate(4):
            mesh = init_device_mesh("cpu", (4,))
            parts = [distribute_tensor(x, mesh, (cut,)) for x in values]
            norms = torch.ops.aten._foreach_norm.Scalar(parts, order, torch.float64)
            found = [cast(RankTensor, norm.to_local()) for norm in norms]
            totals.append(torch.nn.utils.get_total_norm(parts, order).item())
        assert all(torch.equal(norm.of_rank(0), norm.of_rank(3)) for norm in found)
        # 90,000 numbers of float64 added up in another order; measured 5e-15.
        mine = torch.stack([norm.of_rank(0) for norm in found])
        torch.testing.assert_close(mine, exact, rtol=1e-13, atol=0)
    assert len(set(totals)) == 1


def _count_gathers() -> int:
    parts = [part for _, part in tensors_and_parts(mesh_2x2())]
    with CommCounter() as counter:
        torch.nn.utils.get_total_norm(parts)
    return counter.num_collectives


def test_norms_of_a_list_cost_one_collective(world4: World) -> None:
    assert world4.run(_count_gathers) == [1, 1, 1, 1]


def _check_optimizer(foreach: bool) -> None:
    pairs = tensors_and_parts(mesh_2x2())
    plain = [nn.Parameter(x.clone()) for x, _ in pairs]
    parts = [nn.Parameter(x) for _, x in pairs]
    for optimizer, parameters in (
        (torch.optim.AdamW(plain, lr=0.1, foreach=foreach), plain),
        (torch.optim.AdamW(parts, lr=0.1, foreach=foreach), parts),
    ):
        for _ in range(3):
            for p in parameters:
                p.grad = (p.detach() * 2).clone()
            optimizer.step()
    for p, q in zip(plain, parts, strict=True):
        assert isinstance(q, DTensor)
        assert torch.equal(q.full_tensor(), p)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_torch_optimizer_steps_as_on_plain_tensors(world4: World, foreach: bool) -> None:
    world4.run(_check_optimizer, foreach)


READS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sum(),
    lambda x: x.mean(),
    lambda x: x.cumsum(0) if x.ndim else x.sum(),
    lambda x: torch.tensor(x.sum().item()),
    lambda x: x.max(),
]


def _check_reads() -> None:
    warnings.simplefilter("ignore", GatherWarning)
    for full, parts in tensors_and_parts(mesh_2x2()):
        for function in READS:
            result = function(parts)
            # A sum in another order differs in the last bits; the same elements do not.
            torch.testing.assert_close(
                result.full_tensor() if isinstance(result, DTensor) else result, function(full)
            )
        assert (parts.sum() > 0).item() == (full.sum() > 0).item()


def test_what_only_reads_gives_the_values_of_one_device(world4: World) -> None:
    world4.run(_check_reads)


def _check_writes() -> None:
    warnings.simplefilter("ignore", GatherWarning)
    for full, parts in tensors_and_parts(mesh_2x2()):
        torch.manual_seed(5)
        full.normal_().mul_(2)
        torch.manual_seed(5)
        parts.normal_().mul_(2)
        assert torch.equal(parts.full_tensor(), full)
        other = torch.randn(full.shape)
        parts.copy_(other)
        assert torch.equal(parts.full_tensor(), other)
        assert torch.equal(torch.empty_like(other).copy_(parts), other)


def test_what_writes_leaves_the_values_of_one_device(world4: World) -> None:
    world4.run(_check_writes)


VIEW_WRITES: list[Callable[[Tensor], object]] = [
    lambda x: x[2].zero_(),
    lambda x: x.narrow(0, 1, 2).mul_(3),
    lambda x: x.diagonal().fill_(7),
    lambda x: x.diagonal()[2:].fill_(9),
    lambda x: x.chunk(2, 1)[1].add_(1),
    lambda x: x.split([3, 5])[0].mul_(2),
    lambda x: x.view(-1)[5:9].fill_(3),
    lambda x: x.t()[3].zero_(),
    lambda x: x.unbind(0)[3].fill_(2),
    lambda x: x[2, 3].fill_(1),
    lambda x: x.__setitem__((0, 0), 5.0),
    lambda x: x.__setitem__((slice(None), 0), 5.0),
    lambda x: x[1:3].copy_(torch.ones(2, 6)),
]
VIEW_LAYOUTS: list[tuple[Placement, ...]] = [
    (RaggedShard((0,), 8, (1, 0)), Shard(1)),
    (RaggedShard((0,), 1, (1, 7)), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Replicate(), Partial()),
]


def _check_view_writes() -> None:
    warnings.simplefilter("ignore", GatherWarning)
    mesh = mesh_2x2()
    for placements in VIEW_LAYOUTS:
        for write in VIEW_WRITES:
            full = torch.randn(8, 6)
            parts = distribute_tensor(full, mesh, placements)
            earlier, row = parts.diagonal(), parts[1]
            write(full)
            write(parts)
            assert torch.equal(parts.full_tensor(), full)
            assert torch.equal(earlier.full_tensor(), full.diagonal())  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
            assert torch.equal(row.full_tensor(), full[1])  # pyright: ignore[reportAttributeAccessIssue]: a DTensor


def test_writes_through_views_reach_the_tensor_and_its_other_views(world4: World) -> None:
    world4.run(_check_view_writes)


def _check_gradients_through_view_writes() -> None:
    warnings.simplefilter("ignore", GatherWarning)
    mesh = mesh_2x2()

    def loss(x: Tensor) -> Tensor:
        y = x * 2
        y[1:3] = y[1:3] * 3
        y.diagonal().mul_(2)
        y[2:].view(-1)[3:8].mul_(5)
        return (y.relu() * x).sum()

    for placements in VIEW_LAYOUTS:
        full = torch.randn(8, 6, dtype=torch.float64).requires_grad_()
        parts = distribute_tensor(full, mesh, placements)
        loss(full).backward()
        loss(parts).backward()
        assert isinstance(parts.grad, DTensor)
        assert full.grad is not None
        assert torch.equal(parts.grad.full_tensor(), full.grad)


def test_gradients_flow_through_writes_to_views(world4: World) -> None:
    world4.run(_check_gradients_through_view_writes)


def _check_autograd() -> None:
    warnings.simplefilter("ignore", GatherWarning)
    for full, parts in tensors_and_parts(mesh_2x2()):
        plain, part = nn.Parameter(full), nn.Parameter(parts)
        (plain.pow(2).sum() + plain.mul(3).sum()).backward()
        (part.pow(2).sum() + part.mul(3).sum()).backward()
        assert isinstance(part.grad, DTensor)
        assert plain.grad is not None
        torch.testing.assert_close(part.grad.full_tensor(), plain.grad)
        part.grad = None
        assert isinstance(part, DTensor)
        part.full_tensor().pow(3).sum().backward()
        grad: Tensor | None = part.grad
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.full_tensor(), 3 * full.pow(2))


def test_gradients_flow_into_distributed_parameters(world4: World) -> None:
    world4.run(_check_autograd)


def _check_deepcopy() -> None:
    for full, parts in tensors_and_parts(mesh_2x2()):
        parameter = nn.Parameter(parts)
        copied = copy.deepcopy(parameter)
        assert isinstance(copied, nn.Parameter)
        assert isinstance(copied, DTensor)
        with torch.no_grad():
            copied.zero_()
        assert torch.equal(parts.full_tensor(), full)


def test_a_deep_copy_is_a_parameter_of_its_own(world4: World) -> None:
    world4.run(_check_deepcopy)


def _wrong_local_shape() -> None:
    with pytest.raises(ValueError, match="expected a local tensor of shape"):
        DTensor.from_local(torch.ones(3), mesh_2x2(), (Shard(0), Replicate()), shape=(8,))


def _check_with_local() -> None:
    for full, parts in tensors_and_parts(mesh_2x2()):
        local = parts.to_local()
        for dtype in (full.dtype, torch.float64):
            made = parts.with_local((2 * local).to(dtype))
            assert type(made) is DTensor
            assert made.dtype == dtype
            assert made.placements == parts.placements
            assert not made.requires_grad
            assert torch.equal(made.full_tensor(), (2 * full).to(dtype))
        assert not parts.with_local(local.clone().requires_grad_()).requires_grad
        with pytest.raises(ValueError, match="local"):
            parts.with_local(torch.zeros(9, 9))


def test_another_part_makes_a_tensor_that_is_cut_the_same(world4: World) -> None:
    world4.run(_check_with_local)


def test_a_local_part_of_the_wrong_shape_is_refused(world4: World) -> None:
    world4.run(_wrong_local_shape)


def _check_nothing_is_kept() -> None:
    mesh = mesh_2x2()
    for operate in (
        lambda x: x.view(12, 4),
        lambda x: x[:, 1:3],
        lambda x: torch.cat([x, x], 1),
        lambda x: x @ x.t(),
        lambda x: torch.softmax(x, 0),
        lambda x: x.expand(2, 8, 6),
        lambda x: x.mean(0),
    ):
        x = distribute_tensor(torch.randn(8, 6), mesh, (Shard(0), Shard(1)))
        local = weakref.ref(x._local_tensor)
        operate(x)
        del x
        gc.collect()
        assert local() is None


def test_what_is_remembered_of_a_call_keeps_no_tensor_alive(world4: World) -> None:
    world4.run(_check_nothing_is_kept)
