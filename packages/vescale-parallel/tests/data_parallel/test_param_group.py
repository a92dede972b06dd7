"""Which parameters travel together, and what becomes of their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale_dtensor import DTensor
from vescale_parallel._data_parallel.param_group import _by_dtype
from vescale_parallel._data_parallel.planned import group_parameters
from vescale_parallel._data_parallel.public_gradients import accumulate
from vescale_parallel._parameters.sharded_parameter import ShardedParameter

pytestmark = pytest.mark.usefixtures("world_of_one")


def _mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0], mesh_dim_names=("dp_shard",))


def _param(
    *fqns: str,
    tensor: Tensor | None = None,
    stages: tuple[int, ...] = (0,),
    requires_grad: bool = True,
) -> ShardedParameter:
    local = torch.zeros(2, 3) if tensor is None else tensor
    sharded = nn.Parameter(
        DTensor.from_local(local, _mesh(), (Replicate(),)), requires_grad=requires_grad
    )
    unsharded = nn.Parameter(local, requires_grad=requires_grad)
    return ShardedParameter(fqns, (), sharded, unsharded, True, None, False, stages)


def test_parameters_of_one_dtype_travel_together() -> None:
    single, double = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    params = [_param("a", tensor=single), _param("b", tensor=double), _param("c", tensor=single)]
    groups = _by_dtype(params)
    assert [[param.fqns[0] for param in group] for group in groups] == [["a", "c"], ["b"]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 2, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))


def _groups(params: list[ShardedParameter]) -> tuple[list[str], dict[int, list[str]]]:
    model = Tied()
    blocks = [f"blocks.{index}" for index in range(3)]
    root, of_blocks = group_parameters(
        model, _mesh(), params, blocks, param_dtype=None, reduce_dtype=None
    )
    modules = list(model.blocks)
    return [p.fqns[0] for p in root.params], {
        modules.index(module): [p.fqns[0] for p in group.params] for module, group in of_blocks
    }


def test_a_group_is_a_block_and_the_rest_is_the_root() -> None:
    params = [_param("embed.weight"), _param("blocks.0.weight"), _param("blocks.0.bias")]
    params += [_param("blocks.2.weight")]
    assert _groups(params) == (
        ["embed.weight"],
        {0: ["blocks.0.weight", "blocks.0.bias"], 2: ["blocks.2.weight"]},
    )


def test_what_two_blocks_or_a_block_and_the_rest_share_is_in_the_root() -> None:
    params = [_param("embed.weight", "blocks.0.weight"), _param("blocks.1.bias", "blocks.2.bias")]
    assert _groups(params) == (["embed.weight", "blocks.1.bias"], {})


def test_groups_of_ranks_that_hold_other_blocks_have_the_same_numbers() -> None:
    model, blocks = Tied(), [f"blocks.{index}" for index in range(3)]

    def numbers(*fqns: str) -> list[int]:
        params = [_param(fqn) for fqn in fqns]
        root, groups = group_parameters(
            model, _mesh(), params, blocks, param_dtype=None, reduce_dtype=None
        )
        return [root.number, *(group.number for _, group in groups)]

    assert numbers("blocks.0.bias", "blocks.1.bias", "blocks.2.bias") == [0, 1, 2, 3]
    assert numbers("blocks.2.bias") == [0, 3]


def _grad(param: ShardedParameter) -> Tensor:
    assert isinstance(param.sharded.grad, DTensor)
    return param.sharded.grad.to_local()


def test_a_gradient_is_added_to_what_is_there_in_place_scaled() -> None:
    param = _param("a")
    accumulate(param, torch.ones(2, 3), None)
    first = _grad(param)
    accumulate(param, torch.ones(2, 3), torch.tensor(0.5))
    assert torch.equal(_grad(param), torch.full((2, 3), 1.5))
    assert _grad(param).data_ptr() == first.data_ptr()


def test_a_scale_of_another_dtype_does_not_change_that_of_the_gradient() -> None:
    param = _param("a", tensor=torch.zeros(2, dtype=torch.bfloat16))
    accumulate(param, torch.ones(2, dtype=torch.bfloat16), torch.tensor(0.5))
    assert _grad(param).dtype == torch.bfloat16


def test_hooks_see_each_gradient_and_then_the_sum() -> None:
    param = _param("a")
    seen: list[float] = []
    param.sharded.register_hook(lambda grad: grad * 2)
    param.sharded.register_hook(lambda grad: seen.append(float(grad.to_local()[0, 0])))
    param.sharded.register_post_accumulate_grad_hook(
        lambda _: seen.append(float(_grad(param)[0, 0]))
    )
    for _ in range(2):
        accumulate(param, torch.ones(2, 3), None)
    assert seen == [2, 2, 2, 4]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_only_parameters_that_train_are_reduced(requires_grad: bool) -> None:
    model, param = Tied(), _param("embed.weight", requires_grad=requires_grad)
    root, _ = group_parameters(
        model, _mesh(), [param], (), param_dtype=None, reduce_dtype=torch.float64
    )
    assert param.unsharded is not None
    if requires_grad:
        param.unsharded.grad = torch.ones(2, 3)
    root.reduce()
    taken = root.take()
    assert list(taken) == ([param] if requires_grad else [])
    assert root.take() == {}
    assert root.take_used() == ({param} if requires_grad else set())
    root.reduce()
    assert root.take_used() == set()


def test_reductions_before_a_take_add_up_and_forgotten_ones_do_not() -> None:
    param = _param("embed.weight")
    root, _ = group_parameters(Tied(), _mesh(), [param], (), param_dtype=None, reduce_dtype=None)
    assert param.unsharded is not None
    for _ in range(2):
        param.unsharded.grad = torch.ones(2, 3)
        root.reduce()
        assert param.unsharded.grad is None
    assert root.take_used() == {param}
    assert torch.equal(root.take()[param], torch.full((2, 3), 2.0))
    param.unsharded.grad = torch.ones(2, 3)
    root.reduce()
    root.forget()
    assert root.take() == {}
