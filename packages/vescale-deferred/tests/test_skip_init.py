"""Modules whose values are left to a checkpoint."""

from typing import Any

import pytest
import torch
from torch import nn

from vescale_deferred import deferred_init, is_deferred, materialize, read, skip_init
from vescale_dtensor import Box


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16, padding_idx=0)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(16.0).sin(), persistent=False)
        self.register_buffer("scaled", self.head.weight.detach() * 2, persistent=False)
        self.kept = torch.rand(3)


def _ordinary_and_skipped() -> tuple[Any, Any]:
    torch.manual_seed(5)
    ordinary = _Net()
    torch.manual_seed(5)
    return ordinary, skip_init(deferred_init(_Net))


def test_what_a_checkpoint_holds_is_nan_and_the_rest_as_usual():
    ordinary, net = _ordinary_and_skipped()
    assert is_deferred(net)
    materialize(net)
    for name in ("embedding.weight", "norm.weight", "norm.bias", "norm.running_var"):
        assert net.state_dict()[name].isnan().all(), name
    assert net.norm.num_batches_tracked == 0
    assert net.head.weight is net.embedding.weight
    for name in ("table", "scaled", "kept"):
        assert torch.equal(getattr(net, name), getattr(ordinary, name)), name


def test_a_state_dict_fills_all_that_was_skipped():
    ordinary, net = _ordinary_and_skipped()
    materialize(net).load_state_dict(ordinary.state_dict())
    expected = {**dict(ordinary.named_parameters()), **dict(ordinary.named_buffers())}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        assert torch.equal(tensor, expected[name]), name


def test_parts_are_nan_and_draw_nothing():
    _, net = _ordinary_and_skipped()
    state = torch.get_rng_state()
    part = read(net.head.weight, Box((3, 4), (2, 5)))
    assert part.shape == (2, 5)
    assert part.isnan().all()
    assert torch.equal(torch.get_rng_state(), state)


def test_tensors_that_the_checkpoint_lacks_are_constructed():
    torch.manual_seed(5)
    ordinary = _Net()
    torch.manual_seed(5)
    net = materialize(skip_init(deferred_init(_Net), fqns=["norm.weight", "norm.bias"]))
    assert net.norm.weight.isnan().all()
    assert torch.equal(net.head.weight, ordinary.head.weight)


def test_a_name_that_the_module_lacks_is_an_error():
    net = deferred_init(_Net)
    with pytest.raises(ValueError, match=r"_Net\.state_dict\(\), got 'neck' and 1 more"):
        skip_init(net, fqns=["neck", "norm.weight", "tail"])
    assert not read(net.norm.weight).isnan().any()


def test_a_module_that_is_materialised_keeps_its_values():
    net = materialize(deferred_init(_Net))
    weight = net.norm.weight
    assert skip_init(net).norm.weight is weight
    assert torch.equal(weight, torch.ones(16))
