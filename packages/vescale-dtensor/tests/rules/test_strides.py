"""A distributed tensor has the strides that the tensor has on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import (
    DTensor,
    InterleavedShard,
    RaggedShard,
    RankTensor,
    distribute_tensor,
    emulate,
)
from vescale_testing import World

from . import sweep, sweep_verdicts
from .sweep_cases import OPERATORS, UNDISPATCHED, UNINITIALIZED, Sample, dtypes_of, samples_of

PLACEMENTS: list[Placement] = [
    Replicate(), Shard(0), Shard(1), Partial(), InterleavedShard(1, 2),
    RaggedShard((0,), 1, (3, 0, 0, 1)), RaggedShard((0, 1), 3, (0, 2, 1, 5)),
]  # fmt: skip
_BASE = torch.arange(4.0 * 6 * 6 * 2, dtype=torch.float64).reshape(4, 6, 6, 2)
INPUTS: dict[str, Tensor] = {
    "transposed": _BASE[:, :, :, 0].contiguous().transpose(1, 2),
    "permuted": _BASE[:, :, :4, 0].contiguous().permute(2, 1, 0),
    "of a slice": _BASE[:, :, ::2, 0],
    "every other row": torch.cat([_BASE, _BASE])[::2, :, :, 0],
    "expanded": _BASE[:1, :, :, 0].expand(4, 6, 6),
    "channels last": _BASE.contiguous(memory_format=torch.channels_last),
    "flipped": _BASE[..., 0].flip(1),
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with emulate(4):
        yield init_device_mesh("cpu", (4,))


def _whole(tensor: Any) -> Tensor:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.full_tensor()
    if not isinstance(tensor, RankTensor):
        return tensor
    assert all(torch.equal(part, tensor.parts[0]) for part in tensor.parts)
    return tensor.parts[0]


def _same(actual: Any, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    steps = list(zip(expected.shape, actual.stride(), expected.stride(), strict=True))
    assert all(ours == theirs for size, ours, theirs in steps if size > 1), steps
    torch.testing.assert_close(_whole(actual), expected, rtol=1e-12, atol=1e-12)


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 2,
    lambda x: x.clone(),
    lambda x: x.clone(memory_format=torch.contiguous_format),
    lambda x: x.contiguous(),
    lambda x: torch.empty_like(x).fill_(1),
    lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format),
    lambda x: x.new_zeros(3, 2),
    lambda x: x.reshape(-1, 6),
    lambda x: x.flatten(),
    lambda x: x.transpose(0, 1),
    lambda x: x.T if x.ndim == 2 else x.mT,
    lambda x: x.float(),
    lambda x: x.to(torch.float32, memory_format=torch.contiguous_format),
    lambda x: x.as_strided((2, 3), (1, 2)),
    lambda x: x.as_strided((3, 2), x.stride()[:2]),
    lambda x: nn.functional.linear(x, torch.ones(5, x.shape[-1], dtype=x.dtype)),
    lambda x: x @ x.mT,
    lambda x: x.sum(1),
    lambda x: x.narrow(1, 1, 2),
    lambda x: x[1],
    lambda x: x.expand(2, *x.shape),
    lambda x: x.unsqueeze(1),
]


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_distributed_copies_have_the_strides_of_a_copy(
    mesh: DeviceMesh, name: str, placement: Placement
) -> None:
    plain = INPUTS[name].clone()
    part = distribute_tensor(INPUTS[name], mesh, (placement,))
    _same(part, plain)
    for function in FUNCTIONS:
        _same(function(part), function(plain))


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("name", [n for n in INPUTS if n != "channels last"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=str)
def test_views_are_possible_exactly_where_they_are_on_one_device(
    mesh: DeviceMesh, name: str, placement: Placement
) -> None:
    plain = INPUTS[name].clone()
    part = distribute_tensor(INPUTS[name], mesh, (placement,))
    for shape in ((-1,), (plain.shape[0], -1), (-1, plain.shape[2])):
        try:
            expected = plain.view(shape)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="view"):
                part.view(shape)
        else:
            _same(part.view(shape), expected)


def _check_from_local() -> None:
    """Parts are shared, and say how the whole would lie in memory."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    for whole in (
        _BASE[..., 0].transpose(1, 2),
        _BASE[..., 0].permute(2, 1, 0),
        _BASE.contiguous(memory_format=torch.channels_last),
        _BASE[..., 0].contiguous(),
    ):
        for dim in range(whole.ndim):
            # What one rank of a program that never saw the whole has: dense, in the same order.
            local = whole.chunk(2, dim)[rank].clone()
            made = DTensor.from_local(local, mesh, (Shard(dim),))
            _same(made, whole.clone())
            made.mul_(2)
            assert torch.equal(local, 2 * whole.chunk(2, dim)[rank])
    # Neither is that which is apart copied, the rest of a fused projection for example.
    fused = torch.randn(4, 9, dtype=torch.float64)
    local = fused.chunk(2, 0)[rank].chunk(3, 1)[1]
    made = DTensor.from_local(local, mesh, (Shard(0),), shape=(4, 3))
    _same(made, fused.chunk(3, 1)[1])
    made.view(2, 2, 3)
    made.zero_()
    assert not local.any()
    # A dim that is expanded here and cut holds other values there.
    own = torch.tensor([float(rank)], dtype=torch.float64).expand(3)
    _same(DTensor.from_local(own, mesh, (Shard(0),)), torch.tensor([0.0, 0, 0, 1, 1, 1]).double())
    _same(DTensor.from_local(own * 0 + 1, mesh), torch.ones(3, dtype=torch.float64))
    expanded = DTensor.from_local(torch.ones(1, 3).double().expand(2, 3), mesh)
    _same(expanded, torch.ones(1, 3).double().expand(2, 3))
    with pytest.raises(RuntimeError, match="single memory location"):
        expanded.add_(1)


def test_local_parts_are_shared_and_tell_the_strides_of_the_whole(world2: World) -> None:
    world2.run(_check_from_local)


def _strides_of_uneven_parts() -> list[tuple[int, ...]]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    found: list[tuple[int, ...]] = []
    for cut in (1, 2):
        whole = torch.arange(15.0).reshape(3, 5).t()
        local = (whole[:, :cut], whole[:, cut:])[rank]
        placement = RaggedShard((1,), 1, (cut, 3 - cut))
        made = DTensor.from_local(local.clone(), mesh, (placement,), shape=(5, 3))
        assert torch.equal(made.full_tensor(), whole)
        assert torch.equal(_whole(made.view(-1)), whole.reshape(-1))
        found.append(made.stride())
    return found


def test_ranks_agree_on_the_strides_of_uneven_parts(world2: World) -> None:
    first, second = world2.run(_strides_of_uneven_parts)
    assert first == second


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_gradients_through_plain_tensors_have_strides_of_their_own(
    mesh: DeviceMesh, placement: Placement
) -> None:
    for read in (lambda x: x.to_local(), lambda x: x.full_tensor()):  # pyright: ignore[reportUnknownLambdaType]
        part = distribute_tensor(torch.randn(4, 4).t(), mesh, (placement,)).requires_grad_()
        local: Any = read(part * 1)
        local.backward(torch.ones(1).expand(local.shape))
        assert isinstance(part.grad, DTensor)
        assert torch.equal(_whole(part.grad.reshape(-1)), torch.ones(16))


# A name says why: torch writes a result of other strides wrongly, with plain tensors, too.
_WRONG_IN_TORCH = {("native_batch_norm", "out")}
# Its own rule writes statistics, and says what the meta kernel does.
_META_ORDER = frozenset({"_native_batch_norm_legit"})


def _restrided(tensor: Tensor, rng: random.Random) -> Tensor:
    """Return the values of ``tensor``, not contiguous where it has two elements or more."""
    if tensor.numel() < 2:
        return tensor
    kind = rng.choice(["permuted", "stepped", "channels last"])
    if kind == "channels last" and tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if kind == "stepped" or tensor.ndim == 1:
        dim = rng.randrange(tensor.ndim)
        twice = tensor.repeat_interleave(2, dim)
        return twice[(slice(None),) * dim + (slice(None, None, 2),)]
    order = list(range(tensor.ndim))
    rng.shuffle(order)
    back = sorted(order, key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


@pytest.mark.by_day("0-16")
@pytest.mark.slow
@pytest.mark.parametrize(("part", "of"), [(0, 16), *((part, 4) for part in range(4))])
def test_operators_take_inputs_that_are_not_contiguous(
    mesh: DeviceMesh, part: int, of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_order: list[str] = []
    monkeypatch.setattr(sweep_verdicts, "_compare_metadata", _ordered(out_of_order))
    wrong: list[Any] = []
    restrided = total = 0
    for op in OPERATORS[part::of]:
        if op.name in UNINITIALIZED | UNDISPATCHED | _META_ORDER:
            continue
        rng = random.Random(op.formatted_name)
        record = sweep._Record(op.formatted_name)
        for sample in [s for dtype in dtypes_of(op, 0)[:1] for s in samples_of(op, dtype, 1)]:
            tensors = tuple(_restrided(tensor, rng) for tensor in sample.tensors)
            own: Sample = replace(sample, tensors=tensors)
            sweep._sweep_sample(op, own, [mesh], rng, 2, record, "")
        wrong += [
            (op.formatted_name, each)
            for each in record.not_right
            if each["kind"] != "refused"
            and (op.formatted_name, each["variant"]) not in _WRONG_IN_TORCH
        ]
        total += record.total
        restrided += sum(counts["restrided"] for counts in record.counts.values())
    assert not wrong, "\n".join(map(str, wrong))
    assert not out_of_order, "\n".join(out_of_order)
    # torch's meta kernels, which tell layouts, and those that compute differ for some.
    assert restrided < total / 50, (restrided, total)


def _ordered(found: list[str]) -> Callable[..., None]:
    """Return a comparison that also looks at the order of dims in memory of local tensors."""
    compare = sweep_verdicts._compare_metadata

    def check(expected: Tensor, actual: DTensor, what: str) -> None:
        compare(expected, actual, what)
        local: Any = actual._local_tensor
        for rank, part in enumerate(local.parts):
            if part.ndim != actual.ndim or not part.numel():
                continue
            dims = sorted(range(part.ndim), key=lambda d: -actual.stride(d))
            steps = [part.stride(d) for d in dims if part.shape[d] > 1]
            if steps != sorted(steps, reverse=True):
                found.append(f"{what}, {actual}: rank {rank} has strides {part.stride()}")

    return check
