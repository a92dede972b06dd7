"""Constructors that run their own layers, against ordinary construction."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _to_dlpack as to_dlpack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations

from vescale_deferred import DeferredError, DeferredWarning, ReadError, deferred_init, materialize

Check = Callable[[Callable[[], nn.Module]], Any]


class Called(nn.Module):
    """Runs a layer twice while it is constructed, and keeps what came out."""

    def __init__(self, layer: nn.Module, *batch: Tensor) -> None:
        super().__init__()
        self.layer = layer
        for number in range(2):
            found = layer(*batch)
            kept = found if isinstance(found, Tensor) else found[0]
            self.register_buffer(f"result{number}", kept.detach())


def _images() -> Tensor:
    return torch.rand(2, 3, 8, 8)


def _fake_quantized() -> nn.Module:
    return Called(torch.ao.quantization.FusedMovingAvgObsFakeQuantize(), torch.rand(4))


def _half_real_statistics() -> nn.Module:
    layer = nn.BatchNorm1d(3)
    layer.running_mean = torch.tensor([1.0, 2.0, 3.0])
    layer.running_var = torch.tensor([3.0, 2.0, 1.0])
    return Called(layer, torch.rand(4, 3))


_KEEPING_STATISTICS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Called(nn.BatchNorm2d(3), _images()),
    "without momentum": lambda: Called(nn.BatchNorm2d(3, momentum=None), _images()),
    "without statistics": lambda: Called(nn.BatchNorm2d(3, track_running_stats=False), _images()),
    "in evaluation": lambda: Called(nn.BatchNorm2d(3).eval(), _images()),
    "half real": _half_real_statistics,
    "instance norm": lambda: Called(
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True), _images()
    ),
    "behind a convolution": lambda: Called(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), _images()
    ),
    "bfloat16": lambda: Called(nn.BatchNorm2d(3).bfloat16(), _images().bfloat16()),
    "spectral norm": lambda: Called(
        parametrizations.spectral_norm(nn.Linear(4, 5)), torch.rand(2, 4)
    ),
    "renormalised embedding": lambda: Called(
        nn.Embedding(5, 3, max_norm=0.5), torch.tensor([1, 2])
    ),
    "bag of embeddings": lambda: Called(nn.EmbeddingBag(5, 3, mode="max"), torch.tensor([[1, 2]])),
    "noise of rrelu": lambda: Called(nn.RReLU(), torch.randn(9)),
    "fake quantization": _fake_quantized,
}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", _KEEPING_STATISTICS)
def test_what_layers_write_when_they_run_is_kept(name: str, same_as_ordinary: Check) -> None:
    same_as_ordinary(_KEEPING_STATISTICS[name])


def test_saved_statistics_of_evaluation_are_refused_by_name() -> None:
    """On the meta device they have elements, on the CPU none."""

    def factory() -> nn.Module:
        module = nn.Module()
        ones = torch.ones(3)
        found = torch.native_batch_norm(
            torch.rand(2, 3), ones, ones, ones.clone(), ones.clone(), False, 0.1, 1e-5
        )
        module.register_buffer("saved", found[1])
        return module

    with pytest.raises(DeferredError, match=r"'saved' cannot be made: expected .* got \(0,\)"):
        materialize(deferred_init(factory))


class CallsLazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.lazy = nn.LazyLinear(4)
        self.register_buffer("result", self.lazy(torch.rand(2, 3)).detach())


class MaterializesLazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.weight = nn.UninitializedParameter()
        self.weight.materialize((3, 4))
        nn.init.normal_(self.weight)
        table: Any = nn.UninitializedBuffer()
        self.register_buffer("table", table)
        table.materialize((2, 2))
        table.fill_(3)


class SetsRealData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        drawn = torch.rand(3)
        self.weight.data = drawn
        drawn.mul_(2)


class SetsRealStorage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        drawn = torch.rand(3)
        weight: Any = self.weight
        with torch.no_grad():
            weight.set_(drawn)
            drawn.mul_(2)


class SharesStorage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        drawn = torch.rand(3, 3)
        flat: Any = torch.empty(0)
        self.register_buffer("flat", flat.set_(drawn.untyped_storage(), 0, (9,)))
        drawn.mul_(2)


class CapsulesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        capsule: Any = to_dlpack(torch.rand(3))
        self.register_buffer("drawn", torch.from_dlpack(capsule))


class Conjugates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        drawn = torch.randn(3, dtype=torch.complex64)
        self.register_buffer("conjugate", drawn.conj())
        drawn.mul_(2)


class Quantizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.table = torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8)


class Nests(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.table = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    "cls",
    [
        CallsLazy,
        MaterializesLazy,
        SetsRealData,
        SetsRealStorage,
        SharesStorage,
        CapsulesMemory,
        Conjugates,
        Quantizes,
        Nests,
    ],
)
def test_what_reaches_for_memory_is_real_and_does_not_crash(cls: type[nn.Module]) -> None:
    """Each of these followed a null pointer, or told its name wrongly."""
    torch.manual_seed(3)
    ordinary = cls()
    end = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.warns(DeferredWarning, match=rf"{cls.__name__}|quantize_per_tensor|nested"):
        module = materialize(deferred_init(cls))
    assert torch.equal(torch.get_rng_state(), end)
    for name, expected in ordinary.state_dict().items():
        assert torch.equal(module.state_dict()[name], expected), name


def _array_written() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.data.numpy().fill(3.0)
    return layer


def _array_seen() -> nn.Module:
    layer = nn.Linear(3, 3)
    array = layer.weight.data.numpy()
    layer.weight.data.zero_()
    layer.register_buffer("seen", torch.tensor(array.tolist()))
    return layer


def _tensor_from_array_written() -> nn.Module:
    layer = nn.Linear(3, 3)
    torch.from_numpy(layer.weight.data.numpy()).zero_()
    return layer


@pytest.mark.parametrize("factory", [_array_written, _array_seen, _tensor_from_array_written])
def test_arrays_that_are_written_to_are_another_name_of_the_tensor(
    factory: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(3)
    ordinary = factory()
    torch.manual_seed(3)
    with pytest.warns(DeferredWarning, match=r"array.*test_called_layers\.py:\d+"):
        module = materialize(deferred_init(factory))
    for name, expected in ordinary.state_dict().items():
        assert torch.equal(module.state_dict()[name], expected), name


def test_arrays_that_are_only_read_leave_tensors_deferred(same_as_ordinary: Check) -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(3, 3)
        scale = float(layer.weight.data.numpy().sum())
        layer.weight.data.mul_(scale)
        vars(layer)["kept"] = layer.bias.data.numpy()
        return layer

    same_as_ordinary(factory)


def _spectra() -> nn.Module:
    module = nn.Module()
    weight, real = torch.randn(6, 4), torch.tensor([[1.0, 2.5], [3.5, 4.25], [0.5, 7.0]])
    for name, matrix in (("drawn", weight), ("real", real)):
        module.register_buffer(f"{name}_scaled", matrix / torch.linalg.matrix_norm(matrix, 2))
        module.register_buffer(f"{name}_singular", torch.linalg.svdvals(matrix))
        module.register_buffer(f"{name}_eigen", torch.linalg.eigvalsh(matrix.T @ matrix))
        module.register_buffer(f"{name}_nuclear", torch.linalg.norm(matrix, ord="nuc"))
        module.register_buffer(f"{name}_condition", torch.linalg.cond(matrix))
    return module


def _vectors() -> nn.Module:
    module = nn.Module()
    left, values, right = torch.linalg.svd(torch.randn(6, 4), full_matrices=False)
    module.register_buffer("left", left)
    module.register_buffer("values", values)
    module.register_buffer("right", right)
    module.register_buffer("spectrum", torch.fft.rfft2(torch.rand(4, 3, 4)).abs())
    return module


@pytest.mark.parametrize("factory", [_spectra, _vectors])
def test_decompositions_have_their_ordinary_bits_and_strides(
    factory: Callable[[], nn.Module], same_as_ordinary: Check
) -> None:
    same_as_ordinary(factory)


def test_fake_tensors_in_a_constructor_draw_nothing(same_as_ordinary: Check) -> None:
    def factory() -> nn.Module:
        with FakeTensorMode():
            size = nn.Linear(3, 4)(torch.rand(2, 3)).shape[1]
        return nn.Linear(3, size)

    same_as_ordinary(factory)


def _with_gradients() -> Any:
    layer = nn.Linear(3, 3)
    layer(torch.rand(2, 3)).square().sum().backward()
    return layer


def test_gradients_that_a_constructor_leaves_are_kept() -> None:
    torch.manual_seed(3)
    ordinary = _with_gradients()
    torch.manual_seed(3)
    module = materialize(deferred_init(_with_gradients))
    assert torch.equal(module.weight.grad, ordinary.weight.grad)
    assert torch.equal(module.bias.grad, ordinary.bias.grad)


def test_shards_of_what_has_a_gradient_are_refused() -> None:
    module = deferred_init(_with_gradients)
    with pytest.raises(DeferredError, match=r"'weight' has a gradient.*zero_grad"):
        materialize(module, make=lambda fqn, tensor, read: read(None))


def test_the_storage_of_a_deferred_tensor_tells_its_size_and_whose_it_is() -> None:
    layer = deferred_init(nn.Linear, 3, 4)
    storage = layer.weight.untyped_storage()
    assert (storage.nbytes(), len(storage), storage.device.type) == (48, 48, "cpu")
    assert storage._cdata == layer.weight.data.untyped_storage()._cdata
    with pytest.raises(ReadError, match=r"'weight' is deferred.*data_ptr"):
        storage.data_ptr()
