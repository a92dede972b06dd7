"""Scaled dot product attention against plain tensors, and what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.nn.functional import scaled_dot_product_attention as attend

from vescale_dtensor import DTensor, distribute_tensor, emulate, strict
from vescale_dtensor._debug.comm_counter import CommCounter
from vescale_dtensor._rules import rule_of
from vescale_dtensor._rules.attention import aligned_rows
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._sharding.signature import Signature, choose

from .rule_oracle import check, check_placed

aten = torch.ops.aten
R, P = Replicate(), Partial()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def heads(num_heads: int, num_key_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of two sequences."""
    num_keys = num_heads if num_key_heads is None else num_key_heads
    return normal(2, num_heads, 4, 2), normal(2, num_keys, 6, 2), normal(2, num_keys, 6, 2)


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value, enable_gqa=True)


def hidden(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return attend(query, key, value, attn_mask=mask)


def biased(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return attend(query, key, value, attn_mask=mask.detach())


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value, is_causal=True, scale=0.3)


ATTENTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "full": (attend, heads(4)),
    "causal": (causal, heads(4)),
    "of fewer heads than ranks": (attend, heads(3)),
    "grouped": (grouped, heads(8, 4)),
    "grouped, fewer groups than ranks": (grouped, heads(6, 2)),
    "masked": (hidden, (*heads(4), torch.ones(4, 6).tril().bool())),
    "masked by sequence": (hidden, (*heads(4), torch.ones(2, 1, 4, 6).tril().bool())),
    "biased by head": (biased, (*heads(4), normal(4, 4, 6))),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_has_the_values_and_gradients_of_one_device(name: str) -> None:
    function, inputs = ATTENTIONS[name]
    check(function, *inputs)


@pytest.mark.filterwarnings("ignore::vescale_dtensor.GatherWarning")
def test_a_learned_bias_gets_its_gradient() -> None:
    check(hidden, *heads(4), normal(1, 4, 4, 6), allow_gather=True)


@pytest.mark.parametrize("groups", [4, 2])
def test_heads_on_ranks_of_their_own_send_nothing(groups: int) -> None:
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (2, 2))
        parts = [
            distribute_tensor(each, mesh, (Shard(0), Shard(1))).requires_grad_()
            for each in heads(4, groups)
        ]
        with CommCounter() as sent:
            result = grouped(parts[0], parts[1], parts[2])
            result.backward(torch.ones_like(result))
        assert sent.nbytes == 0
        for each in (result, *(part.grad for part in parts)):
            assert isinstance(each, DTensor)
            assert each.placements == (Shard(0), Shard(1))


def test_keys_that_are_whole_serve_the_queries_of_more_ranks_than_groups() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        with CommCounter() as sent:
            parts = [
                distribute_tensor(each, mesh, (placement,)).requires_grad_()
                for each, placement in zip(heads(8, 2), (Shard(1), R, R), strict=True)
            ]
            result = grouped(parts[0], parts[1], parts[2])
            result.backward(torch.ones_like(result))
        assert sent.nbytes == 0
        grads: list[Any] = [part.grad for part in parts]
        placements = [grad.placements for grad in grads]
        assert placements == [(Shard(1),), (P,), (P,)]
        check_placed(grouped, heads(8, 2), [(Shard(1),), (R,), (R,)], mesh)


def test_sequences_in_parts_become_heads_in_parts() -> None:
    inputs = heads(4)
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        (result,) = check_placed(attend, (inputs[1], *inputs[1:]), [(Shard(2),)] * 3, mesh)
        assert result.placements == (Shard(1),)


class Block(nn.Module):
    """Attention as a model has it: projections around it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (4, 2)).transpose(1, 2) for project in self.qkv
        )
        return self.out(causal(query, key, value).transpose(1, 2).flatten(2))


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = R if name == "bias" else placement
        module.register_parameter(
            name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, (R, part)))
        )


def test_attention_trains_on_a_mesh_of_data_and_tensor_parallel_ranks() -> None:
    torch.manual_seed(0)
    plain = Block().double()
    x = normal(4, 6, 8)
    with emulate(4), strict():
        mesh = init_device_mesh("cpu", (2, 2))
        block = Block().double()
        block.load_state_dict(plain.state_dict())
        for project in block.qkv:
            _distribute(project, mesh, Shard(0))
        _distribute(block.out, mesh, Shard(1))
        with CommCounter() as sent:
            result = block(distribute_tensor(x, mesh, (Shard(0), R)))
            result.backward(distribute_tensor(torch.ones_like(x), mesh, (Shard(0), R)))
        assert result.placements == (Shard(0), P)
        assert sent.nbytes == 0
        plain(x).backward(torch.ones_like(x))
        for ours, theirs in zip(block.parameters(), plain.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(
                ours.grad.full_tensor().of_rank(3),  # pyright: ignore[reportAttributeAccessIssue]: emulated
                theirs.grad,
                rtol=1e-12,
                atol=1e-12,
            )


def _kernel_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Calls of CUDA kernels, for what their rules say; they cannot run here."""
    q, k, v = (torch.empty(2, 4, 8, 16, dtype=torch.bfloat16, device="meta") for _ in range(3))
    return {
        "flash": (aten._scaled_dot_product_flash_attention.default, (q, k, v)),
        "efficient": (
            aten._scaled_dot_product_efficient_attention.default,
            (q, k, v, None, True),
        ),
        "cudnn": (aten._scaled_dot_product_cudnn_attention.default, (q, k, v, None, True)),
    }


@pytest.mark.parametrize("name", _kernel_cases())
def test_kernels_for_cuda_are_run_on_heads(name: str) -> None:
    func, args = _kernel_cases()[name]
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        given = [
            distribute_tensor(torch.zeros(each.shape, dtype=each.dtype), mesh, (Shard(1),))
            if isinstance(each, Tensor)
            else each
            for each in args
        ]
        call = OpCall(func, tuple(given), {})
        rule = rule_of(func)
        assert rule is not None
        signature = rule(call)
        assert isinstance(signature, Signature)
        op_spec = choose(call, signature)
        assert op_spec is not None
        assert [made.placements for made in op_spec.inputs] == [(Shard(1),)] * 3
        assert op_spec.outputs[0].placements == (Shard(1),)
        assert op_spec.outputs[1].placements == (Shard(1),)
        assert all(made.placements == (R,) for made in op_spec.outputs[2:])
        dropped = OpCall(func, (*given[:3], 0.5) if name == "flash" else (*given, 0.5), {})
        assert rule(dropped) is None


def test_rows_of_a_bias_are_aligned_for_kernels_for_cuda() -> None:
    bias = normal(2, 1, 3, 10)
    rows = aligned_rows(bias)
    assert torch.equal(rows, bias)
    assert rows.stride() == (48, 48, 16, 1)
    assert aligned_rows(rows) is rows
