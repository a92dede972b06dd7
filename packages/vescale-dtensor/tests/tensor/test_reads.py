"""Which reads of a distributed tensor communicate, and which a rank can do alone."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import CommCounter, DTensor, Unsupported, distribute_tensor, emulate
from vescale_testing import World


def _saved(x: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a distributed tensor was pickled")  # see test_pickled
        torch.save(x, io.BytesIO())


# What one rank can ask alone, of any tensor.
LOCAL_READS: dict[str, Callable[[Any], Any]] = {
    "to_local": lambda x: x.to_local(),
    "repr": repr,
    "str": str,
    "shape": lambda x: (x.shape, x.stride(), x.dtype, x.device, len(x), x.numel()),
    "hash": hash,
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "save": lambda x: _saved(x),
    "boxes": lambda x: x.local_boxes(),
    "is_pinned": lambda x: (x.is_pinned(), x.is_shared()),
    "is_first_replica": lambda x: x.is_first_replica,
    "requires_grad": lambda x: (x.requires_grad, x.grad, x.is_leaf, x.grad_fn),
    "view": lambda x: x.view(-1) if x.is_contiguous() else x,
}
# What needs the values of the whole. They are there where every rank has them.
GLOBAL_READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.item(),
    "bool": bool,
    "float": float,
    "format": lambda x: f"{x:.3f}",
    "tolist": lambda x: x.tolist(),
    "full_tensor": lambda x: x.full_tensor(),
    "equal": lambda x: torch.equal(x, x),
}


def _check_alone(placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(4.0), mesh, (placement,))
    if dist.get_rank() == 0:
        with CommCounter() as counter:
            for read in LOCAL_READS.values():
                read(x)
        assert not counter.num_collectives
    dist.barrier()
    assert x.sum().item() == 6.0


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=str)
def test_a_rank_reads_its_own_part_alone(world2: World, placement: Placement) -> None:
    world2.run(_check_alone, placement)


def _check_replicated() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.tensor(3.0), mesh)
    if dist.get_rank() == 0:
        with CommCounter() as counter:
            for read in GLOBAL_READS.values():
                read(x)
        assert not counter.num_collectives
    dist.barrier()


def test_a_rank_that_has_the_whole_reads_it_alone(world2: World) -> None:
    world2.run(_check_replicated)


def _check_stale() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, (Shard(0),))
    view: Any = x.diagonal()
    assert torch.equal(view.to_local(), torch.tensor([0.0, 5, 10, 15]))
    x.add_(1)
    if dist.get_rank() == 0:
        # The others are not there.
        for read in (lambda: view.to_local(), lambda: pickle.dumps(view)):
            with pytest.raises(Unsupported, match="which a rank cannot do alone"):
                read()
        with pytest.raises(Unsupported, match=r"view.clone\(\)"):
            copy.deepcopy(view)
        assert "stale" in repr(view)
    dist.barrier()
    assert torch.equal(view.clone().to_local(), torch.tensor([1.0, 6, 11, 16]))
    assert torch.equal(view.to_local(), torch.tensor([1.0, 6, 11, 16]))
    # Where nothing has to move a view is made again on the spot.
    whole = distribute_tensor(torch.arange(2.0) * 1j, mesh, (Shard(0),))
    conjugate: Any = whole.conj()
    whole.mul_(2)
    if dist.get_rank() == 1:
        assert torch.equal(conjugate.to_local(), torch.tensor([-2j]))
    dist.barrier()


@pytest.mark.filterwarnings("ignore:.*were gathered")
def test_a_stale_part_of_a_gathered_view_is_refused_to_one_rank(world2: World) -> None:
    world2.run(_ignoring_gathers)


def _ignoring_gathers() -> None:
    import warnings

    warnings.filterwarnings("ignore", ".*were gathered")
    _check_stale()


@pytest.mark.filterwarnings("ignore:.*were gathered")
def test_gathered_views_see_writes_to_local_parts_and_to_data() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, (Shard(0),))
        view = x.diagonal()
        x.to_local().mul_(2)
        assert view.tolist() == [0, 10, 20, 30]
        x.data.add_(1)
        assert view.tolist() == [1, 11, 21, 31]
        x.data[0].zero_()
        assert view.tolist() == [0, 11, 21, 31]
        view.data.fill_(7)
        assert x.diagonal().tolist() == [7] * 4
        expected = torch.arange(16.0).reshape(4, 4) * 2 + 1
        expected[0] = 0
        assert x.tolist() == expected.fill_diagonal_(7).tolist()


def test_writes_to_data_are_not_seen_by_autograd_and_writes_to_views_are() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Replicate(), Shard(0), Shard(1)):
            plain = torch.arange(6.0).reshape(2, 3).requires_grad_()
            part = distribute_tensor(plain.detach(), mesh, (placement,)).requires_grad_()
            losses = (plain**2).sum(), (part**2).sum()
            plain.data.mul_(3)
            part.data.mul_(3)
            for loss in losses:
                loss.backward()
            assert isinstance(part.grad, DTensor)
            assert part.grad.tolist() == plain.grad.tolist()  # pyright: ignore[reportOptionalMemberAccess]: it has one
            assert part.tolist() == plain.tolist()
            loss = (part**2).sum()
            part.detach().mul_(3)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("read", [np.asarray, np.exp, lambda x: x.numpy()])
def test_an_array_is_refused_with_what_to_ask_for(read: Callable[[Any], Any]) -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(4.0), mesh, (Shard(0),))
        with pytest.raises(TypeError, match=r"full_tensor\(\)\.detach\(\)\.numpy\(\).*every rank"):
            read(x)


# What torch's C++ would do at address zero, without asking the tensor's class.
MEMORY_READS: dict[str, Callable[[Any], Any]] = {
    "torch.from_dlpack": torch.from_dlpack,
    "numpy.from_dlpack": np.from_dlpack,
    "share_memory_": lambda x: x.share_memory_(),
    "module.share_memory": lambda x: torch.nn.ParameterList([x]).share_memory(),
    "apply_": lambda x: x.apply_(lambda element: element + 1),
}


@pytest.mark.parametrize("read", MEMORY_READS.values(), ids=MEMORY_READS)
def test_whatever_reaches_for_the_memory_is_refused(read: Callable[[Any], Any]) -> None:
    with emulate(2):
        x: Any = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), (Shard(0),))
        with pytest.raises(TypeError, match=r"no memory of its own.*take x.full_tensor\(\)"):
            read(x)
        with pytest.raises(TypeError, match=r"no memory of its own.*take x.of_rank\(rank\)"):
            read(x.to_local())
