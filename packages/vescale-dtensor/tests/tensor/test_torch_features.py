"""What torch does with its own DTensor works with ours: saving, compiling, FSDP2, optimizers."""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import (
    DTensor,
    GatherWarning,
    InterleavedShard,
    RaggedShard,
    distribute_tensor,
)
from vescale_testing import World

LAYOUTS: list[tuple[Placement, ...]] = [
    (Shard(0), Shard(1)),
    (RaggedShard((0,), 1, (1, 7)), InterleavedShard(1, 3)),
    (RaggedShard((0, 1), 5, (4, 6)), Replicate()),
    (Shard(0), Shard(0)),
]


def mesh_2x2() -> DeviceMesh:
    warnings.simplefilter("ignore", GatherWarning)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _check_saving() -> None:
    mesh, full = mesh_2x2(), torch.randn(8, 6)
    for placements in LAYOUTS:
        buffer = io.BytesIO()
        with pytest.warns(UserWarning, match="this rank's shard alone"):
            torch.save(nn.Parameter(distribute_tensor(full, mesh, placements)), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert type(loaded) is DTensor
        assert isinstance(loaded, nn.Parameter)
        assert loaded.placements == placements
        assert torch.equal(loaded.full_tensor(), full)


def test_torch_save_and_load_with_weights_only(world4: World) -> None:
    world4.run(_check_saving)


def _check_dcp(folder: str) -> None:
    mesh, full = mesh_2x2(), torch.randn(8, 6)
    for number, placements in enumerate(LAYOUTS):
        path = str(Path(folder) / str(number))
        save({"w": distribute_tensor(full, mesh, placements)}, checkpoint_id=path)
        for other in LAYOUTS:
            target = distribute_tensor(torch.zeros(8, 6), mesh, other)
            load({"w": target}, checkpoint_id=path)
            assert torch.equal(target.full_tensor(), full)


@pytest.mark.slow
# DCP itself warns about its own deprecated storages and about running without a GPU.
@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_reshard(world4: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world4.run(_check_dcp, folder)


def _compiled_program(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight).sum(1) * 2


def _check_compile(backend: str) -> None:
    # Inductor's own imports.
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    mesh = mesh_2x2()
    full, weight = torch.randn(8, 6), torch.randn(6, 4)
    expected_input = full.clone().requires_grad_()
    _compiled_program(expected_input, weight).sum().backward()
    x = distribute_tensor(full, mesh, (Shard(0), Shard(1))).requires_grad_()
    w = distribute_tensor(weight, mesh, (Replicate(), Shard(0)))
    compiled = torch.compile(_compiled_program, backend=backend, fullgraph=True)
    result = compiled(x, w)
    result.sum().backward()
    assert isinstance(result, DTensor)
    assert isinstance(x.grad, DTensor)
    torch.testing.assert_close(result.full_tensor(), _compiled_program(full, weight))
    torch.testing.assert_close(x.grad.full_tensor(), expected_input.grad)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_collectives_into_the_graph(world4: World, backend: str) -> None:
    world4.run(_check_compile, backend)


@pytest.mark.nightly
def test_torch_compile_with_inductor(world4: World) -> None:
    world4.run(_check_compile, "inductor")


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def _check_fsdp() -> None:
    mesh = mesh_2x2()
    model, plain = _mlp(), _mlp()
    tp = mesh["tp"]
    for name, placement in (
        ("0.weight", Shard(0)),
        ("0.bias", Shard(0)),
        ("2.weight", Shard(1)),
        ("2.bias", Replicate()),
    ):
        layer, _, own = name.partition(".")
        parameter = model.get_parameter(name)
        made = nn.Parameter(distribute_tensor(parameter.detach(), tp, (placement,)))
        model[int(layer)].register_parameter(own, made)
    fully_shard(model, mesh=mesh["dp"])
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    for _ in range(3):
        loss: Any = model(distribute_tensor(x, tp, (Replicate(),))).pow(2).mean()
        loss.backward()
        ours.step()
        ours.zero_grad()
        expected = plain(x).pow(2).mean()
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss.full_tensor(), expected)


def test_fully_shard_takes_tensor_parallel_parameters(world4: World) -> None:
    world4.run(_check_fsdp)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


def _check_optimizers() -> None:
    mesh = mesh_2x2()
    start, other = torch.randn(8, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    for name, make in OPTIMIZERS.items():
        for placements in LAYOUTS[:2]:
            plain = [nn.Parameter(start.clone()), nn.Parameter(other.clone())]
            # The second is a plain tensor: lists of parameters may be mixed.
            parts = [
                nn.Parameter(distribute_tensor(start, mesh, placements)),
                nn.Parameter(other.clone()),
            ]
            for parameters in (plain, parts):
                optimizer = make(list(parameters))

                def closure(
                    parameters: list[nn.Parameter] = parameters,
                    optimizer: torch.optim.Optimizer = optimizer,
                ) -> Any:
                    optimizer.zero_grad()
                    loss = (parameters[0] ** 2).sum() + (parameters[1] ** 4).sum()
                    loss.backward()
                    return loss

                for _ in range(3):
                    optimizer.step(closure)
            assert isinstance(parts[0], DTensor)
            torch.testing.assert_close(
                parts[0].full_tensor(), plain[0], rtol=1e-12, atol=1e-12, msg=name
            )


@pytest.mark.slow
def test_torch_optimizers_step_as_on_one_device(world4: World) -> None:
    world4.run(_check_optimizers)


def _check_the_rest() -> None:
    mesh, full = mesh_2x2(), torch.randn(8, 6)
    for placements in LAYOUTS:
        parts = distribute_tensor(full, mesh, placements)
        assert parts.tolist() == full.tolist()
        assert len(parts) == 8
        assert float(parts.sum()) == pytest.approx(float(full.sum()), abs=1e-5)
        assert bool((parts > 100).any()) is False
        assert [tuple(row.shape) for row in parts] == [(6,)] * 8
        assert type(copy.deepcopy(parts)) is DTensor
        x = parts.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        gradient.sum().backward()
        assert isinstance(x.grad, DTensor)
        torch.testing.assert_close(x.grad.full_tensor(), 6 * full)
        again = parts.detach().requires_grad_()
        torch.manual_seed(3)
        kept: Any = checkpoint(
            lambda t: torch.dropout(t.relu(), 0.5, True), again, use_reentrant=False
        )
        kept.sum().backward()
        torch.manual_seed(3)
        mask = torch.dropout(torch.ones(8, 6), 0.5, True) * (full > 0)
        assert isinstance(again.grad, DTensor)
        assert torch.equal(again.grad.full_tensor(), mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (parts @ parts.t()).dtype == torch.bfloat16


def test_python_protocols_double_backward_checkpointing_and_autocast(world4: World) -> None:
    world4.run(_check_the_rest)


def _check_state_dict() -> None:
    mesh, full = mesh_2x2(), torch.randn(8, 6)
    source, target = nn.Linear(6, 8), nn.Linear(6, 8)
    source.weight = nn.Parameter(distribute_tensor(full, mesh, LAYOUTS[0]))
    target.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, LAYOUTS[1]))
    target.load_state_dict(source.state_dict())
    assert isinstance(target.weight, DTensor)
    assert torch.equal(target.weight.full_tensor(), full)
    target.load_state_dict({"weight": 2 * full, "bias": torch.zeros(8)})
    assert torch.equal(target.weight.full_tensor(), 2 * full)
    assert target.weight.placements == LAYOUTS[1]


def test_state_dicts_load_across_layouts_and_from_plain_tensors(world4: World) -> None:
    world4.run(_check_state_dict)


def _uneven_parts() -> tuple[object, ...]:
    rank = dist.get_rank()
    mesh = mesh_2x2()
    local = torch.full((rank % 2 + 1, 3), float(rank % 2 + 1))
    whole = DTensor.from_local(local, mesh, (Replicate(), Shard(0)))
    return tuple(whole.shape), whole.placements[1], float(whole.sum())


def test_uneven_local_parts_say_how_uneven_they_are(world4: World) -> None:
    expected = ((3, 3), RaggedShard((0,), 1, (1, 2)), 15.0)
    assert world4.run(_uneven_parts) == [expected] * 4
