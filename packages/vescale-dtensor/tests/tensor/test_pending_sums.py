"""A pending sum is reduced once, and again after a write, whoever wrote."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_dtensor import CommCounter, DTensor, distribute_tensor, emulate, strict
from vescale_testing import World


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pending(x: Tensor, weight: Tensor, mesh: DeviceMesh) -> Any:
    """Return ``x @ weight`` of which every rank of the last axis has a term."""
    rows = (Replicate(),) * (mesh.ndim - 1)
    left = distribute_tensor(x, mesh, (*(rows and (Shard(0),)), Shard(1)))
    made = left @ distribute_tensor(weight, mesh, (*rows, Shard(0)))
    assert isinstance(made, DTensor)
    assert made.placements[-1] == Partial()
    return made


def values(x: Any) -> Tensor:
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return getattr(whole, "parts", (whole,))[-1]


def same(ours: Any, plain: Tensor) -> None:
    # Sums in another order: a few roundings of float64.
    torch.testing.assert_close(values(ours), plain, rtol=1e-11, atol=1e-12)


def layers(x: Any, weights: dict[str, Any], num_layers: int) -> Any:
    """Return what a transformer's feed-forward layers do: normalize, widen, narrow, add."""
    for layer in range(num_layers):
        square = x.pow(2).mean(-1, keepdim=True)
        inner = weights[f"gain{layer}"] * (x * torch.rsqrt(square + 1e-6))
        gate, up = inner @ weights[f"gate{layer}"], inner @ weights[f"up{layer}"]
        x = x + (F.silu(gate) * up) @ weights[f"down{layer}"]
    return x


def make_weights(num_layers: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {"table": normal(12, 8, seed=99)}
    for layer in range(num_layers):
        made[f"gain{layer}"] = normal(8, seed=layer)
        made[f"gate{layer}"] = normal(8, 16, seed=10 + layer)
        made[f"up{layer}"] = normal(8, 16, seed=20 + layer)
        made[f"down{layer}"] = normal(16, 8, seed=30 + layer) / 4
    return made


CUT = {"table": Shard(0), "gate": Shard(1), "up": Shard(1), "down": Shard(0)}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_layer_reduces_once_in_each_direction(num_ranks: int) -> None:
    ids = torch.arange(10).view(2, 5)
    sent: dict[int, tuple[int, int]] = {}
    for num_layers in (2, 4):
        plain = make_weights(num_layers)
        ours: dict[str, Any] = {}
        with emulate(num_ranks), strict():
            mesh = init_device_mesh("cpu", (num_ranks,))
            for name, weight in plain.items():
                placement = CUT.get(name.rstrip("0123456789"), Replicate())
                ours[name] = distribute_tensor(weight, mesh, (placement,)).requires_grad_()
                weight.requires_grad_()
            expected = layers(F.embedding(ids, plain["table"]), plain, num_layers)
            expected.square().sum().backward()
            with CommCounter() as forward:
                result = layers(F.embedding(ids, ours["table"]), ours, num_layers)
            with CommCounter() as backward:
                result.square().sum().backward()
            sent[num_layers] = forward.num_collectives, backward.num_collectives
            same(result, expected)
            for name, weight in plain.items():
                assert weight.grad is not None
                same(ours[name].grad, weight.grad)
    # A sum of few numbers is one gather.
    assert [more - less for less, more in zip(sent[2], sent[4], strict=True)] == [2, 2]


READS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x.exp(),
    "a view": lambda x: x.reshape(-1).exp(),
    "a transposed view": lambda x: x.t().exp(),
    "a view of a view": lambda x: x.t()[1:].exp(),
    "detached": lambda x: x.detach().exp(),
    "in a list": lambda x: torch.cat([x, x]).exp(),
    "beside itself": lambda x: x * x,
}


@pytest.mark.parametrize("second", READS)
@pytest.mark.parametrize("first", READS)
def test_it_is_reduced_once(first: str, second: str) -> None:
    a, b = normal(6, 8), normal(8, 4, seed=1)
    with emulate(2):
        x = pending(a, b, init_device_mesh("cpu", (2,)))
        same(READS[first](x), READS[first](a @ b))
        with CommCounter() as sent:
            again = READS[second](x)
        # A list is joined as terms, which is a sum of its own; and the sum of some rows is not
        # that of all.
        if first != "a view of a view" and "in a list" not in (first, second):
            assert sent.num_collectives == 0
        same(again, READS[second](a @ b))
        assert x.placements == (Partial(),)
        same(x, a @ b)


WRITES: dict[str, Callable[[Any], object]] = {
    "itself": lambda x: x.mul_(2),
    "a view": lambda x: x[1:3].mul_(3),
    "a column": lambda x: x.t()[1].zero_(),
    "from itself": lambda x: x.add_(x.view(6, 4)),
    "a list": lambda x: torch._foreach_mul_([x], 2),  # pyright: ignore[reportPrivateImportUsage]
    "detached": lambda x: x.detach().mul_(2),
    "data": lambda x: x.data.mul_(2),
    "data of a view": lambda x: x.view(-1).data.mul_(2),
    "whole": lambda x: x.copy_(x.exp()),
    "gathered": lambda x: x.diagonal().fill_(3.0),
    "turned": lambda x: x.t_(),
    "squeezed": lambda x: x.unsqueeze_(0),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:.*gathered")
def test_a_write_is_seen(write: str, read: str) -> None:
    a, b = normal(6, 8), normal(8, 4, seed=1)
    plain = a @ b
    with emulate(2):
        x = pending(a, b, init_device_mesh("cpu", (2,)))
        for tensor in (x, plain):
            views = (tensor.view(-1), tensor.t())  # these live on
            READS[read](tensor)
            WRITES[write](tensor)
            tensor.squeeze_()
            same(views[0].exp(), values(views[0]).exp())
        same(READS[read](x), READS[read](plain))
        same(x.exp(), plain.exp())


def write_parts(given: Tensor | None = None) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    given = normal(4, 4, seed=dist.get_rank()) if given is None else given
    x: Any = DTensor.from_local(given, mesh, (Partial(),), shape=(4, 4))
    view = x.view(-1)
    sums = normal(4, 4, seed=0) + normal(4, 4, seed=1)
    seen = [torch.equal(values(x.exp()), sums.exp())]
    for part in (given, view.to_local(), x.to_local(), x.detach().to_local()):
        part.mul_(2)  # a power of two, so nothing is rounded
        sums = sums * 2
        seen += [torch.equal(values(read.exp().view(4, 4)), sums.exp()) for read in (view, x)]
    return seen


def test_what_is_written_to_a_rank_s_part_is_seen(world2: World) -> None:
    for seen in world2.run(write_parts):
        assert seen == [True] * 9


def test_what_is_written_to_emulated_parts_is_seen() -> None:
    with emulate(2) as world:
        assert write_parts(world.per_rank(lambda rank: normal(4, 4, seed=rank))) == [True] * 9


def test_inference_tensors_are_reduced_each_time() -> None:
    a, b = normal(6, 8), normal(8, 4, seed=1)
    with emulate(2), torch.inference_mode():
        x = pending(a, b, init_device_mesh("cpu", (2,)))
        same(x.exp(), (a @ b).exp())
        x.mul_(2)
        same(x.exp(), (a @ b * 2).exp())


def test_results_are_no_views_of_the_sum() -> None:
    """What an operator made of a sum is written; the sum, and what is pending, stays."""
    a, b = normal(6, 8), normal(8, 4, seed=1)
    with emulate(2):
        x = pending(a, b, init_device_mesh("cpu", (2,)))
        for copy in (x.exp(), x.clone(), x.contiguous().clone(), x.to(torch.float32), x + 0.0):
            copy.zero_()
            same(x.exp(), (a @ b).exp())


STEPS: tuple[Callable[[list[Any], Any], Any], ...] = (
    lambda pool, pick: pool.append(pool[pick].view(-1)) if pool[pick].is_contiguous() else None,
    lambda pool, pick: pool.append(pool[pick].t()) if pool[pick].ndim == 2 else None,
    lambda pool, pick: pool.append(pool[pick][1:]),
    lambda pool, pick: pool.append(pool[pick].detach()),
    lambda pool, pick: pool[pick].sin(),
    lambda pool, pick: pool[pick].pow(2).mean(),
    lambda pool, pick: pool[pick].mul_(0.5),
    lambda pool, pick: pool[pick][:1].add_(1.0),
    lambda pool, pick: pool[pick].data.mul_(1.5),
    lambda pool, pick: pool[pick].copy_(pool[pick].sin()),
    lambda pool, pick: pool.append(pool[pick] * 2 + pool[pick]),
    lambda pool, pick: pool[pick].sub_(pool[pick].detach().sin()),
)


@pytest.mark.filterwarnings("ignore:.*gathered")
@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_reads_views_and_writes(seed: int) -> None:
    """The oracle is the same program on one device."""
    chance = random.Random(seed)
    a, b = normal(6, 8), normal(8, 4, seed=1)
    with emulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        ours, plain = [pending(a, b, mesh)], [a @ b]
        for _ in range(25):
            step = chance.choice(STEPS)
            pick = chance.randrange(len(plain))
            if plain[pick].numel() < 4:
                continue
            results = [step(pool, pick) for pool in (ours, plain)]
            if isinstance(results[1], Tensor):
                same(*results)
        for mine, theirs in zip(ours, plain, strict=True):
            same(mine.sin(), theirs.sin())


@pytest.mark.parametrize("reads_before", [False, True])
def test_it_is_reduced_again_after_statistics_were_kept_in_it(*, reads_before: bool) -> None:
    x, mean, variance = normal(6, 4, 3), normal(4, seed=1), normal(4, seed=2).exp()
    with emulate(2) as world:
        mesh = init_device_mesh("cpu", (2,))
        ours = [
            DTensor.from_local(
                world.per_rank(lambda rank, whole=whole: whole + (1 - 2 * rank) - whole * rank),
                mesh,
                (Partial(),),
                shape=whole.shape,
            )
            for whole in (mean, variance)
        ]
        if reads_before:
            assert all((each.abs() > -1).all() for each in ours)
        for each, whole in zip(ours, (mean, variance), strict=True):
            same(each, whole)
        result = F.batch_norm(distribute_tensor(x, mesh, (Replicate(),)), *ours, training=True)
        same(result, F.batch_norm(x, mean, variance, training=True))
        for each, whole in zip(ours, (mean, variance), strict=True):
            same(each, whole)
            same(each.abs(), whole.abs())
