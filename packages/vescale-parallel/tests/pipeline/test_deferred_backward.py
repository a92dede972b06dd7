"""The loss of a pipeline: its backward hands out gradients that the schedule computed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale_dtensor import DTensor
from vescale_parallel._loss.output import Scalar
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._pipeline.outputs.deferred_backward import with_deferred_backward

pytestmark = pytest.mark.usefixtures("world_of_one")


def _param(grad: Tensor | None, *, is_here: bool = True) -> ShardedParameter:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("dp_shard",))
    local = torch.zeros(2)
    sharded = nn.Parameter(DTensor.from_local(local, mesh, (Replicate(),)))
    unsharded = nn.Parameter(local) if is_here else None
    if unsharded is not None:
        unsharded.grad = grad
    return ShardedParameter(("w",), (), sharded, unsharded, True, None, False, (0,))


def _loss(value: float = 2.0, *, is_loss: bool = True, requires_grad: bool = True) -> Scalar:
    return Scalar(value, torch.float32, is_loss, requires_grad)


def test_gradients_are_taken_away_until_backward() -> None:
    grad = torch.ones(2)
    params = [_param(grad), _param(None), _param(None, is_here=False)]
    seen: list[tuple[float, Tensor | None, Tensor | None]] = []

    def finish(scale: Tensor) -> None:
        first, second, _ = (param.unsharded for param in params)
        assert first is not None
        assert second is not None
        seen.append((float(scale), first.grad, second.grad))

    loss = with_deferred_backward(_loss(), params, finish, "cpu")
    assert params[0].unsharded is not None
    assert params[0].unsharded.grad is None
    (loss * 3).backward()
    assert seen == [(3.0, grad, None)]


def test_gradients_are_let_go_of_as_they_are_reduced() -> None:
    """Else there are all of them, and as much again of what they are written to."""
    param = _param(torch.ones(2))
    left: list[Tensor | None] = []

    def finish(scale: Tensor) -> None:
        plain = param.unsharded
        assert plain is not None
        assert plain.grad is not None
        taken, plain.grad = weakref.ref(plain.grad), None
        left.append(taken())

    with_deferred_backward(_loss(), [param], finish, "cpu").backward()
    assert left == [None]


def test_a_second_backward_through_one_step_raises() -> None:
    calls: list[Tensor] = []
    loss = with_deferred_backward(_loss(), [_param(None)], calls.append, "cpu")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time on the loss of one pipeline step"):
        loss.backward()
    assert len(calls) == 1


def test_the_scale_is_what_autograd_brings_to_the_loss() -> None:
    scales: list[Tensor] = []
    output: Any = with_deferred_backward(
        {"loss": _loss(4.0), "count": 7, "logits": None}, [], scales.append, "cpu"
    )
    assert output["count"] == 7
    assert output["logits"] is None
    assert output["loss"].item() == 4.0
    (output["loss"].pow(2) / 2 + output["loss"]).backward()
    assert [float(scale) for scale in scales] == [5.0]


def test_two_steps_add_up_in_one_backward() -> None:
    params = [_param(torch.ones(2))]
    scales: list[float] = []
    first = with_deferred_backward(_loss(), params, lambda s: scales.append(float(s)), "cpu")
    second = with_deferred_backward(_loss(), params, lambda s: scales.append(float(s)), "cpu")
    (first + 2 * second).backward()
    assert sorted(scales) == [1.0, 2.0]


def test_scalars_that_are_not_the_loss_are_not_differentiated() -> None:
    output: Any = with_deferred_backward(
        (_loss(), _loss(is_loss=False), _loss(is_loss=False, requires_grad=False)),
        [],
        lambda _: None,
        "cpu",
    )
    assert not output[2].requires_grad
    with pytest.raises(ValueError, match="differentiates the loss that forward returns, and no"):
        output[1].backward()


def test_a_loss_has_the_dtype_that_the_last_stage_computed() -> None:
    scalar = Scalar(1.5, torch.bfloat16, True, True)
    loss = with_deferred_backward(scalar, [], lambda _: None, "cpu")
    assert (loss.dtype, loss.item(), loss.requires_grad) == (torch.bfloat16, 1.5, True)
