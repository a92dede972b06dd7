"""Skeletons: what a forward can see of a tensor is there, but no memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_parallel._torch_private import FakeTensor, FakeTensorMode
from vescale_parallel._trace.fake_tensors import fake_batch, skeleton
from vescale_parallel._trace.known_values import KnownValues


class _Everything(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, device=device))
        self.tied = self.weight
        self.frozen = nn.Parameter(torch.randn(4, device=device), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(2, 0, device=device, dtype=torch.bfloat16))
        self.register_buffer("table", torch.randn(6, device=device))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_skeleton_has_the_same_tensors_without_memory(device: str) -> None:
    model = _Everything(device)
    copied = skeleton(model, FakeTensorMode(), KnownValues())
    assert copied.tied is copied.weight
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(copied, kind)()), dict(getattr(model, kind)())
        assert ours.keys() == theirs.keys()
        for name, fake in ours.items():
            real = theirs[name]
            assert isinstance(fake, FakeTensor)
            assert isinstance(fake, nn.Parameter) == isinstance(real, nn.Parameter)
            assert (fake.shape, fake.dtype, fake.device.type) == (real.shape, real.dtype, "cpu")
            assert (fake.requires_grad, fake.is_leaf) == (real.requires_grad, True)


def test_gradients_reach_the_parameters_of_a_skeleton() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2).requires_grad_(False))
    fake_mode = FakeTensorMode()
    copied = skeleton(model, fake_mode, KnownValues())
    x = fake_batch(torch.randn(3, 5, requires_grad=True), fake_mode, KnownValues())
    with fake_mode:
        copied(x).sum().backward()
    assert x.grad.shape == (3, 5)
    trained, frozen = (copied.get_parameter(f"{i}.weight").grad for i in range(2))
    assert trained is not None
    assert trained.shape == (4, 5)
    assert frozen is None


def test_a_skeleton_takes_no_memory_and_leaves_the_model_alone() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
    copied = skeleton(model, FakeTensorMode(), KnownValues())
    assert copied.weight.nbytes == 1 << 42
    assert model.weight.is_meta
    assert not isinstance(model.weight, FakeTensor)
