"""What can be done with a deferred module between construction and materialisation."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_deferred import (
    DeferredError,
    ReadError,
    deferred_init,
    is_deferred,
    materialize,
    read,
)


def _net() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32)


def _ordinary_and_deferred() -> tuple[Any, Any]:
    torch.manual_seed(5)
    ordinary = _net()
    torch.manual_seed(5)
    return ordinary, deferred_init(_net)


@pytest.mark.parametrize(
    "use",
    [
        lambda net, w: w.tolist(),
        lambda net, w: w.detach().numpy(),
        lambda net, w: w[0, 0].item(),
        lambda net, w: bool(w[0, 0]),
        lambda net, w: w.sum(),
        lambda net, w: w + 1,
        lambda net, w: torch.cat([w, w]),
        lambda net, w: w.t() @ torch.rand(32, 3),
        lambda net, w: torch.equal(w, w),
        lambda net, w: torch.zeros(32, 16).copy_(w.detach()),
        lambda net, w: f"{w[0, 0]:.3f}",
        lambda net, w: pickle.dumps(w),
        lambda net, w: torch.from_dlpack(w.detach()),
        lambda net, w: w.data_ptr(),
        lambda net, w: net.linear1.share_memory(),
        lambda net, w: w.detach().apply_(abs),
    ],
)
def test_using_a_value_says_which_tensor_is_deferred(use: Callable[[nn.Module, Tensor], Any]):
    _, net = _ordinary_and_deferred()
    with pytest.raises(ReadError, match=r"linear1\.weight.*materialize"):
        use(net, net.linear1.weight)


def test_a_forward_says_which_tensor_is_deferred():
    _, net = _ordinary_and_deferred()
    with pytest.raises(ReadError, match=r"'self_attn.in_proj_bias' is deferred"):
        net(torch.rand(2, 3, 16))


def test_what_needs_no_value_works():
    _, net = _ordinary_and_deferred()
    weight = net.linear1.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((32, 16), torch.float32, "cpu")
    assert (weight.numel(), weight.nbytes, weight.is_leaf) == (512, 2048, True)
    assert isinstance(weight, nn.Parameter)
    assert "deferred Parameter(shape=(32, 16)" in repr(weight) == f"{weight}" == str(weight)
    assert "fqn='linear1.weight'" in repr(weight)
    assert is_deferred(weight[2:5].t())
    assert weight.to("meta").is_meta
    assert len({weight: 1, net.linear1.bias: 2}) == 2


def test_tensors_like_a_deferred_one_are_real():
    _, net = _ordinary_and_deferred()
    weight = net.linear1.weight
    assert torch.equal(torch.zeros_like(weight), torch.zeros(32, 16))
    assert torch.equal(weight.new_ones(3), torch.ones(3))
    assert torch.empty_like(weight, device="meta").is_meta
    optimizer = torch.optim.AdamW(net.parameters())
    assert optimizer.param_groups[0]["params"][0] is net.self_attn.in_proj_weight


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, nn.Module.bfloat16])
def test_conversions_are_recorded(convert: Callable[[nn.Module], nn.Module]):
    ordinary, net = _ordinary_and_deferred()
    before = net.linear1.weight
    convert(ordinary)
    convert(net).requires_grad_(False)
    assert net.linear1.weight is before
    assert is_deferred(net)
    materialize(net)
    for got, expected in zip(net.parameters(), ordinary.parameters(), strict=True):
        assert got.dtype == expected.dtype
        assert not got.requires_grad
        assert torch.equal(got, expected)


def test_initialising_again_draws_as_usual():
    ordinary, net = _ordinary_and_deferred()
    torch.manual_seed(6)
    nn.init.normal_(ordinary.linear2.weight)
    end = torch.get_rng_state()
    torch.manual_seed(6)
    nn.init.normal_(net.linear2.weight)
    assert torch.equal(torch.get_rng_state(), end)
    assert torch.equal(read(net.linear2.weight), ordinary.linear2.weight)


def test_writes_in_place_are_recorded():
    ordinary, net = _ordinary_and_deferred()
    for module in (ordinary, net):
        with torch.no_grad():
            module.linear1.weight.mul_(2)
            module.linear1.weight[1].zero_()
            module.linear1.weight.data[2] = torch.arange(16.0)
    assert torch.equal(read(net.linear1.weight), ordinary.linear1.weight)


def test_a_copy_of_a_deferred_module_is_deferred_and_independent():
    ordinary, net = _ordinary_and_deferred()
    net.tied = net.linear1.weight
    copied = copy.deepcopy(net)
    assert copied.tied is copied.linear1.weight
    assert copied.tied is not net.tied
    with torch.no_grad():
        copied.linear1.weight.zero_()
    assert torch.equal(read(net.linear1.weight), ordinary.linear1.weight)
    assert not read(copied.linear1.weight).any()
    assert torch.equal(read(copied.linear2.weight), ordinary.linear2.weight)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_real_tensors_can_be_loaded(assign: bool):
    ordinary, _ = _ordinary_and_deferred()
    torch.manual_seed(9)
    net = deferred_init(_net)
    net.load_state_dict(ordinary.state_dict(), assign=assign)
    for got, expected in zip(net.parameters(), ordinary.parameters(), strict=True):
        assert is_deferred(got) is not assign
        assert torch.equal(read(got), expected)


def test_submodules_can_be_replaced_before_materialising():
    ordinary, net = _ordinary_and_deferred()
    net.linear1 = real = nn.Linear(16, 32)
    torch.manual_seed(1)
    net.linear2 = deferred_init(nn.Linear, 32, 16)
    torch.manual_seed(1)
    expected = nn.Linear(32, 16)
    weight = real.weight
    materialize(net)
    assert net.linear1.weight is weight
    assert torch.equal(net.linear2.weight, expected.weight)
    assert torch.equal(net.self_attn.in_proj_weight, ordinary.self_attn.in_proj_weight)


def test_writing_to_what_has_been_materialised_is_refused():
    _, net = _ordinary_and_deferred()
    weight = net.linear1.weight
    materialize(net)
    with pytest.raises(DeferredError, match=r"'linear1.weight' has been materialised"):
        weight.data.zero_()


def test_a_materialised_module_trains_like_an_ordinary_one():
    ordinary, net = _ordinary_and_deferred()
    materialize(net)
    batch = torch.rand(4, 3, 16)
    for module in (ordinary, net):
        module.eval()
        module(batch).square().sum().backward()
    for got, expected in zip(net.parameters(), ordinary.parameters(), strict=True):
        assert got.grad is not None
        assert torch.equal(got.grad, expected.grad)
