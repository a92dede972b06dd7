"""Every class of torch.nn that has parameters, against ordinary construction."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vescale_deferred import deferred_init, is_deferred, materialize

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "AdaptiveLogSoftmaxWithLoss": (64, 20, [4, 10]),
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"), (4,)),
    "Bilinear": (4, 6, 3),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), (4, 6, 3)),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"), (4, 6, 3)),
    "Embedding": (7, 6, 2),
    "EmbeddingBag": (7, 6),
    "GroupNorm": (2, 4),
    **dict.fromkeys(
        ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), (4, 1e-5, 0.1, True, True)
    ),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (4, 6, 2)),
    **dict.fromkeys(("GRUCell", "LSTMCell", "RNNCell"), (4, 6)),
    "LayerNorm": (4,),
    "Linear": (5, 6),
    "LinearCrossEntropyLoss": (4, 6),
    "MultiheadAttention": (8, 2),
    "PReLU": (3,),
    "RMSNorm": (4,),
    "Transformer": (8, 2, 2, 2, 16, 0.1, nn.functional.relu, None, None, 1e-5, True),
    "TransformerDecoderLayer": (8, 2, 16),
    "TransformerEncoderLayer": (8, 2, 16),
}
_LAZY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d"), ()),
    **dict.fromkeys(("LazyConv1d", "LazyConv2d", "LazyConv3d"), (4, 3)),
    **dict.fromkeys(("LazyConvTranspose1d", "LazyConvTranspose2d", "LazyConvTranspose3d"), (4, 3)),
    **dict.fromkeys(("LazyInstanceNorm1d", "LazyInstanceNorm2d", "LazyInstanceNorm3d"), ()),
    "LazyLinear": (4,),
}
# Bases of the classes above, or containers of them.
_OTHERS = {
    "RNNBase",
    "RNNCellBase",
    "ParameterDict",
    "ParameterList",
    "TransformerDecoder",
    "TransformerEncoder",
}


@pytest.mark.parametrize("name", [name for name in _ARGUMENTS if hasattr(nn, name)])
def test_modules_of_torch_have_their_ordinary_values(
    name: str, same_as_ordinary: Callable[..., nn.Module]
):
    same_as_ordinary(lambda: getattr(nn, name)(*_ARGUMENTS[name]))


@pytest.mark.parametrize("name", _LAZY)
def test_lazy_modules_are_initialised_by_their_first_batch_as_usual(name: str):
    def run(module: nn.Module) -> dict[str, torch.Tensor]:
        num_dims = int(name[-2]) if name.endswith("d") else 1
        torch.manual_seed(1)
        module(torch.ones(2, 3, *(5,) * num_dims))
        return module.state_dict()

    expected = run(getattr(nn, name)(*_LAZY[name]))
    got = run(materialize(deferred_init(getattr(nn, name), *_LAZY[name])))
    assert all(torch.equal(got[key], expected[key]) for key in expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # deprecated classes
def test_no_class_with_parameters_is_forgotten():
    for name, cls in inspect.getmembers(nn, inspect.isclass):
        if not issubclass(cls, nn.Module) or name in {*_ARGUMENTS, *_LAZY, *_OTHERS}:
            continue
        try:
            module = cls()
        except TypeError:
            source = inspect.getsource(cls)
            assert "Parameter(" not in source, name
        else:
            assert not list(module.parameters()), name


def test_containers_of_parameters_have_their_ordinary_values(
    same_as_ordinary: Callable[..., nn.Module],
):
    def factory() -> nn.Module:
        shared = nn.Parameter(torch.rand(3))
        named = nn.ParameterDict({"a": torch.rand(4), "b": shared})
        return nn.ModuleList([nn.ParameterList([torch.rand(2), shared]), named])

    same_as_ordinary(factory)


def test_encoders_made_of_copied_layers_have_their_ordinary_values(
    same_as_ordinary: Callable[..., nn.Module],
):
    same_as_ordinary(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
        )
    )


def test_a_module_without_tensors_is_not_deferred():
    assert not is_deferred(deferred_init(nn.ReLU))
