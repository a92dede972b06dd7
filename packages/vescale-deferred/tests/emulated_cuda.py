"""A device that draws as a GPU does and whose memory is the CPU's, for machines without a GPU.

Its tensors are recorded with a type of device of their own; once they have values they lie on the
CPU. Its generators are CPU generators whose state holds a seed and an offset: torch makes
generators of no other device without its library.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_dtensor.random import CudaKernels, Fill
from vescale_dtensor.random._cuda_kernels import KINDS, cuda_kernels
from vescale_testing.philox import PhiloxKernels

NAME = "privateuseone"
DEVICE = torch.device(NAME)
# A block of 2048 elements: small tensors have several.
_KERNELS = PhiloxKernels(512)
_MARK = 0xC0DA
_WORDS = slice(24, 24 + 8 * 624)


class EmulatedKernels:
    """Takes the place of ``CudaKernels``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_threads = _KERNELS.num_threads

    def default_generator(self) -> Generator:
        return default_generator

    def state(self, generator: Generator) -> Tensor:
        words = generator.get_state()[_WORDS].view(torch.int64)
        offset = int(words[1]) if bool((words[2:] == _MARK).all()) else 0
        return torch.tensor([generator.initial_seed(), offset]).view(torch.uint8)

    def set_state(self, generator: Generator, state: Tensor) -> None:
        seed, offset = state.view(torch.int64).tolist()
        state = generator.manual_seed(seed).get_state()
        words = state[_WORDS].view(torch.int64)
        words[1], words[2:] = offset, _MARK
        generator.set_state(state)

    def draw(self, fill: Fill, state: Tensor, out: Tensor) -> Tensor:
        seed, offset = state.view(torch.int64).tolist()
        end = _KERNELS.draw(fill.method, fill.parameters, seed, offset, out)
        return torch.tensor([seed, end]).view(torch.uint8)


default_generator = Generator()
_kernels = EmulatedKernels(DEVICE)


class Ordinarily(TorchDispatchMode):
    """Runs a constructor as ordinary construction on the device would run, drawing everything."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.pop("generator", None)
        first = args[0] if args else None
        is_here = isinstance(first, Tensor) and self._is_here(first)
        if kwargs.get("device") is not None:
            is_here = torch.device(kwargs["device"]).type == NAME
            kwargs["device"] = "cpu" if is_here else kwargs["device"]
        name = func.name().removeprefix("aten::").split(".")[0]
        if is_here and torch.Tag.nondeterministic_seeded in func.tags:
            result = self._draw(name, args, kwargs, generator)
        else:
            kwargs |= {} if generator is None else {"generator": generator}
            result = func(*args, **kwargs)
        if is_here and isinstance(result, Tensor) and not self._is_here(result):
            self._storages.append(result.untyped_storage())
        return result

    def _is_here(self, tensor: Tensor) -> bool:
        pointer = tensor.untyped_storage().data_ptr()
        return any(storage.data_ptr() == pointer for storage in self._storages)

    def _draw(
        self, name: str, args: Any, kwargs: dict[str, Any], generator: Generator | None
    ) -> Tensor:
        out: Tensor
        parameters: Any
        match name:
            case "uniform_" | "normal_":
                # Arguments of their default value are not passed on.
                out, parameters = args[0], (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
            case "bernoulli_" | "random_":
                out, parameters = args[0], args[1:]
            case "rand" | "randn":
                out, parameters = torch.empty(args[0], **kwargs), (0.0, 1.0)
                name = "uniform_" if name == "rand" else "normal_"
            case "rand_like" | "randn_like":
                out, parameters = torch.empty_like(args[0], **kwargs), (0.0, 1.0)
                name = "uniform_" if name == "rand_like" else "normal_"
            case "randint":
                kwargs.setdefault("dtype", torch.int64)
                *bounds, shape = args
                out, name = torch.empty(shape, **kwargs), "random_"
                parameters = (0, *bounds)[-2:]
            case _:
                raise NotImplementedError(name)
        generator = generator or default_generator
        seed, offset = _kernels.state(generator).view(torch.int64).tolist()
        end = _KERNELS.draw(name, parameters, seed, offset, out)
        _kernels.set_state(generator, torch.tensor([seed, end]).view(torch.uint8))
        return out


def _module() -> ModuleType:
    """Return what torch looks for under the name of a device."""
    module: Any = ModuleType(f"torch.{NAME}")
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.manual_seed_all = default_generator.manual_seed
    module.get_rng_state = lambda device=None: _kernels.state(default_generator)
    module.set_rng_state = lambda state, device=None: _kernels.set_state(default_generator, state)
    return module


def _empty(size: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return torch.empty(size, dtype=dtype)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Install the device, for a fixture; yield what ``torch.cuda`` is for a GPU."""
    module = _module()
    monkeypatch.setattr(torch, NAME, module, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(KINDS, NAME, cast(type[CudaKernels], EmulatedKernels))
    cuda_kernels.cache_clear()
    _guard()
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    yield module
    library._destroy()
    cuda_kernels.cache_clear()


def _guard() -> None:
    """Have torch accept that there is such a device. It stays for the rest of the process."""
    private: Any = torch._C
    guard = type("Guard", (private._acc.DeviceGuard,), {"type_": lambda self: _device_type()})()
    private._acc.register_python_privateuseone_device_guard(_kept.setdefault("guard", guard))


def _device_type() -> Any:
    private: Any = torch._C
    return private._autograd.DeviceType.PrivateUse1


_kept: dict[str, Any] = {}
