from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_deferred import deferred_init, is_deferred, materialize, read
from vescale_dtensor import InterleavedShard, RaggedShard, local_boxes

Check = Callable[..., Any]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _assert_same(got: Tensor, expected: Tensor, name: str) -> None:
    assert got.dtype == expected.dtype, name
    assert got.device == expected.device, name
    assert got.stride() == expected.stride(), name
    assert torch.equal(got.nan_to_num(), expected.nan_to_num()), name


@pytest.fixture
def same_as_ordinary() -> Check:
    """Construct ordinarily and deferred under one seed; compare everything there is.

    ``accelerator`` is ``torch.cuda`` or what takes its place, ``ordinarily`` the circumstances of
    ordinary construction.
    """

    def check(
        factory: Callable[[], nn.Module],
        *,
        accelerator: Any = None,
        ordinarily: AbstractContextManager[object] | None = None,
    ) -> Any:
        modules = [torch] if accelerator is None else [torch, accelerator]
        torch.manual_seed(17)
        torch.empty(5).normal_()  # leaves the generator in a block, with a spare normal
        start = _states(modules)
        with ordinarily or nullcontext():
            ordinary = factory()
        end = _states(modules)

        for module, state in zip(modules, start, strict=True):
            module.set_rng_state(state)
        deferred = deferred_init(factory)
        assert all(map(torch.equal, _states(modules), end))
        assert is_deferred(deferred)

        expected = _tensors(ordinary)
        # Any order must do, so take one that nobody would: backwards, before the rest.
        for name, tensor in reversed(list(_tensors(deferred).items())):
            assert tensor.requires_grad == expected[name].requires_grad, name
            _assert_same(read(tensor), expected[name].detach(), name)
            _assert_shards_are_parts(tensor, expected[name].detach(), name)
        assert all(map(torch.equal, _states(modules), end))

        assert materialize(deferred) is deferred
        assert not is_deferred(deferred)
        assert all(map(torch.equal, _states(modules), end))
        got = _tensors(deferred)
        assert list(got) == list(expected)
        assert list(deferred.state_dict()) == list(ordinary.state_dict())
        for name, tensor in got.items():
            assert type(tensor) is type(expected[name]), name
            assert tensor.requires_grad == expected[name].requires_grad, name
            _assert_same(tensor.detach(), expected[name].detach(), name)
        assert _ties(got) == _ties(expected)
        assert _aliases(got) == _aliases(expected)
        return deferred

    return check


def _states(modules: list[Any]) -> list[Tensor]:
    return [module.get_rng_state() for module in modules]


_NUM_RANKS = 3


def _assert_shards_are_parts(tensor: Tensor, expected: Tensor, name: str) -> None:
    """Read what each of three ranks would hold under every kind of placement."""
    for placement in _placements(tensor):
        for rank in range(_NUM_RANKS):
            for held in local_boxes(tensor.shape, (_NUM_RANKS,), (rank,), (placement,)):
                got, part = read(tensor, held.box), expected[held.box.slices]
                where = f"{name} {placement} {rank}"
                assert torch.equal(got.nan_to_num(), part.nan_to_num()), where


def _placements(tensor: Tensor) -> Iterator[Placement]:
    yield Replicate()
    yield from (Shard(dim) for dim in range(min(tensor.dim(), 2)))
    if not tensor.dim() or not tensor.numel():
        return
    all_dims = tuple(range(tensor.dim()))
    for dims, num_units in (((0,), len(tensor)), (all_dims, tensor.numel())):
        few = num_units // 5
        yield RaggedShard(dims, 1, (few, 0, num_units - few))
    if len(tensor) % 2 == 0:
        yield InterleavedShard(0, 2)


def _ties(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    return _groups(tensors, id)


def _aliases(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of the tensors on each storage that has several."""
    return _groups(tensors, lambda tensor: tensor.untyped_storage().data_ptr())


def _groups(tensors: dict[str, Tensor], key: Callable[[Tensor], int]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            groups.setdefault(key(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
