"""One parameter, sharded and unsharded: which of the two hangs on the modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale_dtensor import DTensor
from vescale_parallel import ParallelPlan
from vescale_parallel._mesh.mesh import build_mesh
from vescale_parallel._parameters.shard_model import move_buffers, read_real, shard_parameters
from vescale_parallel._parameters.sharded_parameter import ShardedParameter, placements_of
from vescale_parallel._pipeline.cuts.placeholders import placeholder
from vescale_parallel._tensor_parallel.tensor_sharding import shard

pytestmark = pytest.mark.usefixtures("world_of_one")


def mesh_of_one() -> DeviceMesh:
    return build_mesh(ParallelPlan())


def sharded(model: nn.Module, plan: ParallelPlan | None = None) -> list[ShardedParameter]:
    return shard_parameters(
        plan or ParallelPlan(),
        model,
        mesh_of_one(),
        shard({}, model, 1),
        (),
        lambda fqns: (0,),
        placeholder,
        read_real,
    )


def test_every_axis_of_the_mesh_has_a_placement() -> None:
    def placed(**kwargs: Any) -> tuple[Placement, ...]:
        return placements_of(mesh_of_one(), torch.Size([4, 6]), owner=0, **kwargs)

    assert placed(tp=Replicate(), place=None) == (Replicate(),)


def test_values_and_names_stay_and_the_unsharded_one_is_the_same_memory() -> None:
    model = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    params = sharded(model)
    assert [param.fqns for param in params] == [("weight",), ("bias",)]
    for param in params:
        held: Any = model.get_parameter(param.fqns[0])
        assert held is param.sharded
        assert isinstance(held, DTensor)
        assert torch.equal(held.full_tensor(), before[param.fqns[0]])
        assert param.shares_storage
        assert param.unsharded is not None
        assert param.unsharded.data_ptr() == param.local.data_ptr()


def test_tied_parameters_are_one_and_change_together() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    a, b = model["a"], model["b"]
    b.weight = a.weight
    (param,) = sharded(model)
    assert param.fqns == ("a.weight", "b.weight")
    assert a.weight is b.weight is param.sharded
    param.show_unsharded()
    assert a.weight is b.weight is param.unsharded
    param.show_sharded()
    assert a.weight is b.weight is param.sharded


def test_compute_in_another_dtype_has_memory_of_its_own_only_once_gathered() -> None:
    plan = ParallelPlan.from_json('{"precision": {"param": "bfloat16"}}')
    weight, _ = sharded(nn.Linear(3, 2), plan)
    assert weight.sharded.dtype == torch.float32
    assert not weight.shares_storage
    assert weight.unsharded is not None
    assert weight.unsharded.dtype == torch.bfloat16
    assert weight.unsharded.shape == (2, 3)
    assert weight.unsharded.untyped_storage().size() == 0


def test_integers_keep_their_dtype_whatever_floating_point_ones_compute_in() -> None:
    model = nn.Linear(3, 2)
    model.steps = nn.Parameter(torch.arange(3), requires_grad=False)
    plan = ParallelPlan.from_json('{"precision": {"param": "bfloat16"}}')
    by_name = {param.fqns[0]: param for param in sharded(model, plan)}
    unsharded = by_name["steps"].unsharded
    assert unsharded is not None
    assert unsharded.dtype == torch.int64


def test_whether_a_parameter_trains_is_asked_each_time_it_is_shown() -> None:
    model = nn.Linear(3, 2)
    weight, bias = sharded(model)
    weight.sharded.requires_grad_(False)
    for param in (weight, bias):
        param.show_unsharded()
    assert not model.weight.requires_grad
    assert model.bias.requires_grad


def test_what_hangs_on_a_parameter_stays_on_it() -> None:
    model = nn.Linear(3, 2)
    calls: list[str] = []
    model.weight.no_decay = True  # pyright: ignore[reportAttributeAccessIssue]: of the user's
    model.weight.register_hook(lambda _: calls.append("hook"))
    weight, _ = sharded(model)
    assert weight.sharded.no_decay  # pyright: ignore[reportAttributeAccessIssue]
    (hook,) = (weight.sharded._backward_hooks or {}).values()
    hook(torch.ones(2, 3))
    assert calls == ["hook"]


def test_the_parameter_from_before_says_that_it_was_replaced() -> None:
    model = nn.Linear(3, 2)
    before = model.weight
    sharded(model)
    assert before.shape == (2, 3)
    with pytest.raises(ValueError, match="uses the tensor that 'weight' was before"):
        before.sum()
    optimizer = torch.optim.SGD([before], lr=1.0)
    with pytest.raises(ValueError, match="this SGD holds 1 parameters that parallelize has repl"):
        optimizer.step()


def _other_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.ones(2, 3))


def _other_memory(model: nn.Linear) -> None:
    weight: Any = model.weight
    weight._local_tensor = torch.ones(2, 3)


@pytest.mark.parametrize("replace", [_other_parameter, _other_memory])
def test_a_parameter_that_was_replaced_is_noticed(replace: Any) -> None:
    model = nn.Linear(3, 2)
    weight, bias = sharded(model)
    weight.check_in_place()
    replace(model)
    with pytest.raises(ValueError, match="'weight' was replaced after parallelize"):
        weight.check_in_place()
    bias.check_in_place()


def test_values_changed_in_place_are_those_that_compute() -> None:
    model = nn.Linear(3, 2)
    weight, _ = sharded(model)
    with torch.no_grad():
        model.weight.fill_(7)
    weight.check_in_place()
    assert weight.unsharded is not None
    assert torch.equal(weight.unsharded, torch.full((2, 3), 7.0))


def test_buffers_that_are_shared_stay_shared_and_none_stays_none() -> None:
    model = nn.ModuleList([nn.Module(), nn.Module()])
    shared = torch.arange(3.0)
    for module in model:
        module.register_buffer("table", shared)
        module.register_buffer("absent", None)
    move_buffers(model, read_real)
    first, second = model[0], model[1]
    assert first.table is second.table
    assert first.absent is None
    assert torch.equal(first.get_buffer("table"), torch.arange(3.0))
