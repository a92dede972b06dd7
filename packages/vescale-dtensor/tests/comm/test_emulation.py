"""One process that runs all ranks has the bits of as many processes."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import (
    DTensor,
    GatherWarning,
    RaggedShard,
    RankTensor,
    distribute_tensor,
    emulate,
)
from vescale_testing import World


def program() -> list[Tensor]:
    """Train an uneven MLP for two steps; return all local tensors that matter."""
    warnings.simplefilter("ignore", GatherWarning)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, 5))
    layouts = [
        (Replicate(), Shard(0)),
        (Replicate(), Shard(0)),
        (RaggedShard((0,), 1, (2, 3)), Shard(1)),
        (Replicate(), Replicate()),
    ]
    modules = [model[0], model[0], model[3], model[3]]
    names = ["weight", "bias", "weight", "bias"]
    for module, name, placements in zip(modules, names, layouts, strict=True):
        full = getattr(module, name).detach()
        made = nn.Parameter(distribute_tensor(full, mesh, placements))
        module.register_parameter(name, made)
    x = distribute_tensor(torch.randn(5, 7), mesh, (Shard(0), Replicate()))
    y = distribute_tensor(torch.tensor([0, 1, -100, 3, 4]), mesh, (Shard(0), Replicate()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept: list[Tensor] = []
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        kept += [loss, norm, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    kept += list(model.parameters())
    detached = [t.detach() for t in kept]
    return [t.to_local() if isinstance(t, DTensor) else t for t in detached]


def test_the_bits_are_those_of_processes(world4: World) -> None:
    of_processes = world4.run(program)
    with emulate(4, rank=2):
        emulated = program()
    for number, tensor in enumerate(emulated):
        assert isinstance(tensor, RankTensor)
        for rank in range(4):
            assert torch.equal(tensor.of_rank(rank), of_processes[rank][number])


def test_python_sees_the_rank_it_looks_through() -> None:
    for rank in range(3):
        with emulate(3, rank=rank):
            mesh = init_device_mesh("cpu", (3,))
            local = distribute_tensor(torch.arange(7.0), mesh, (Shard(0),)).to_local()
            assert mesh.get_coordinate() == (rank,)
            assert dist.get_rank() == rank
            assert tuple(local.shape) == ((3,), (3,), (1,))[rank]


def test_slices_of_a_mesh_are_emulated() -> None:
    with emulate(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        full = torch.arange(10.0)
        x = distribute_tensor(full, mesh["tp"], (Shard(0),))
        assert [part.numel() for part in x.to_local().parts] == [3, 3, 3, 1] * 2  # pyright: ignore[reportAttributeAccessIssue]: emulated
        for rank in range(8):
            assert torch.equal(x.full_tensor().of_rank(rank), full)  # pyright: ignore[reportAttributeAccessIssue]: emulated


def test_what_ranks_make_themselves() -> None:
    with emulate(4) as world:
        mesh = init_device_mesh("cpu", (4,))
        local = world.per_rank(lambda rank: torch.full((rank,), float(rank)))
        x = DTensor.from_local(local, mesh, (Shard(0),))
        assert x.placements == (RaggedShard((0,), 1, (0, 1, 2, 3)),)
        assert x.sum().item() == 1 + 4 + 9


def test_a_value_on_which_ranks_disagree_is_not_a_value() -> None:
    with emulate(2) as world:
        local = world.per_rank(lambda rank: torch.tensor(float(rank)))
        with pytest.raises(RuntimeError, match="emulated ranks disagree"):
            local.item()


def test_emulation_needs_a_process_without_a_group(world1: World) -> None:
    world1.run(_emulate_beside_a_group)


def _emulate_beside_a_group() -> None:
    with pytest.raises(RuntimeError, match="emulated ranks bring their own"), emulate(2):
        pass


def test_tensors_of_emulated_ranks_are_not_compiled() -> None:
    with emulate(2):
        x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), (Shard(0),))
        with pytest.raises(Exception, match="cannot be given tensors of emulated ranks"):
            torch.compile(lambda x: x * 2, backend="eager")(x)
    torch._dynamo.reset()


def test_what_shows_errors_is_as_it_was() -> None:
    before = sys.excepthook
    for _ in range(2):
        with emulate(2):
            assert sys.excepthook is before
    assert sys.excepthook is before


def test_parts_are_put_together_under_a_default_device() -> None:
    with emulate(2) as world:
        mesh = init_device_mesh("cpu", (2,))
        local = world.per_rank(lambda rank: torch.full((rank + 1, 2), float(rank)))
        with torch.device("meta"):
            x = DTensor.from_local(local, mesh, (Shard(0),))
        assert x.shape == (3, 2)
        assert x.sum().item() == 4


def test_a_rank_that_is_not_in_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a rank in 0\.\.1, got 2"), emulate(2, rank=2):
        pass
