"""Idioms of libraries nobody tuned for, against ordinary construction."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from vescale_deferred import DeferredWarning, deferred_init

Check = Callable[[Callable[[], nn.Module]], Any]


class _Symmetric(nn.Module):
    def forward(self, upper: Tensor) -> Tensor:
        return upper.triu() + upper.triu(1).T

    def right_inverse(self, symmetric: Tensor) -> Tensor:
        return symmetric.triu()


def _parametrized() -> nn.Module:
    layer = nn.Linear(5, 5)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    maps = ("householder", "matrix_exp", "cayley")
    orthogonal = [parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map=m) for m in maps]
    return nn.Sequential(layer, *orthogonal, parametrizations.weight_norm(nn.Conv1d(3, 4, 2)))


def _copied_layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layers: Any = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])
    for copied in layers:
        nn.init.orthogonal_(copied.linear1.weight)
    layers[1].linear1 = layers[0].linear1
    return copy.deepcopy(layers)


def _converted() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5).to(torch.bfloat16).float().double(),
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
        nn.Linear(3, 3).type(torch.float16),
    )


def _written() -> nn.Module:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        vector_to_parameters(torch.rand(20), layer.parameters())
        layer.weight[1:3, 2] = 7
        layer.weight.mul_(torch.rand(4, 4)).clamp_(min=-0.1)
        layer.bias.index_fill_(0, torch.tensor([1]), 5.0)
        layer.bias[torch.randperm(4)[:2]] = 1.0
    return layer


def _pruned() -> nn.Module:
    layers = nn.Linear(8, 8), nn.Linear(8, 8)
    prune.l1_unstructured(layers[0], "weight", 0.3)
    prune.random_unstructured(layers[1], "bias", 2)
    return nn.Sequential(*layers)


def _called_in_the_constructor() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("result", layer(torch.rand(2, 4)).detach())
    return layer


def _fused() -> nn.Module:
    return nn.utils.fuse_conv_bn_eval(nn.Conv2d(3, 4, 3).eval(), nn.BatchNorm2d(4).eval())


def _relative_positions() -> nn.Module:
    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
    relative = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += 3
    relative[:, :, 0] *= 7
    layer = nn.Linear(2, 2)
    layer.register_buffer("index", relative.sum(-1))
    layer.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))
    return layer


def _decomposed() -> nn.Module:
    layer = nn.Linear(3, 3)
    permutation, lower, _ = torch.linalg.lu(nn.init.orthogonal_(torch.empty(4, 4), gain=2.0))
    layer.register_buffer("permutation", permutation)
    layer.register_buffer("lower", lower)
    layer.register_buffer("inverse", torch.inverse(torch.rand(3, 3) + torch.eye(3)))
    layer.register_buffer("spectrum", torch.fft.rfft(torch.rand(8)).abs())
    return layer


@pytest.mark.parametrize(
    "factory",
    [
        _parametrized,
        _copied_layers,
        _converted,
        _written,
        _pruned,
        _called_in_the_constructor,
        _fused,
        _relative_positions,
        _decomposed,
        lambda: AveragedModel(nn.Linear(3, 3)),
        lambda: nn.Embedding.from_pretrained(torch.rand(5, 4), freeze=False),
        lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(2)]).apply(_init),
    ],
)
def test_constructors_give_their_ordinary_values(
    factory: Callable[[], nn.Module], same_as_ordinary: Check
):
    same_as_ordinary(factory)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        nn.init.zeros_(module.bias)


def test_a_truth_value_decides_a_branch(same_as_ordinary: Check):
    def factory() -> nn.Module:
        num_layers = 1
        if torch.rand(3)[0] > 0.5:
            num_layers += 1
        while torch.rand(()) < 0.7:
            num_layers += 1
        return nn.Sequential(*[nn.Linear(3, 3) for _ in range(num_layers)])

    same_as_ordinary(factory)


def test_generators_are_where_they_were_for_a_second_try():
    def factory() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            first = torch.rand(4)
        module: Any = nn.Linear(3, 3)
        module.first = first
        module.second = torch.rand(4).resize_(2, 2)
        return module

    torch.manual_seed(0)
    expected = factory()
    end = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.warns(DeferredWarning, match="resize_"):
        module = deferred_init(factory)
    assert torch.equal(torch.get_rng_state(), end)
    assert torch.equal(module.first, expected.first)
    assert torch.equal(module.second, expected.second)
