"""Copies of modules with random float64 parameters, to be run once; complex ones stay complex."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .copies import copied_without_hooks, deep_copied


def random_copy(
    module: nn.Module,
    empty: Collection[int] = (),
    alike: Mapping[int, nn.Parameter] | None = None,
) -> nn.Module:
    """Copy a module with random float64 parameters, whatever its tensors are made of.

    Parameters that are ``empty``, by identity, get zeros and no memory. Those that are ``alike``,
    by identity too, are in the copy the one parameter that another one is there.

    Every parameter is trained in the copy, so that every gradient can be compared.
    """
    made = dict[int, nn.Parameter]()

    def random_or_alike(parameter: nn.Parameter) -> nn.Parameter:
        of = (alike or {}).get(id(parameter), parameter)
        if id(of) not in made:
            made[id(of)] = random_parameter(of)
        return made[id(of)]

    def random_parameter(parameter: nn.Parameter) -> nn.Parameter:
        dtype = torch.complex128 if parameter.is_complex() else torch.float64
        if id(parameter) in empty:
            return nn.Parameter(torch.zeros((), dtype=dtype).expand(parameter.shape))
        data = torch.randn(parameter.shape, dtype=dtype)
        if parameter.dim() < 2:
            # Biases, and scales of norms: around 1, or gradients fade away in deep models.
            return nn.Parameter(0.5 * data + 0.75)
        return nn.Parameter(data / max(parameter.shape[-1], 1) ** 0.5)

    def same_buffer(buffer: Tensor) -> Tensor:
        if type(buffer) in (Tensor, nn.Buffer) and buffer.device.type != "meta":
            return in_double(buffer)
        if buffer.is_floating_point() or buffer.is_complex():
            dtype = torch.complex128 if buffer.is_complex() else torch.float64
            return torch.rand(buffer.shape, dtype=dtype)
        return torch.zeros(buffer.shape, dtype=buffer.dtype)

    return copied_without_hooks(module, random_or_alike, same_buffer).eval()


def in_double(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU in the dtype of its kind that rounds least."""
    real = tensor.detach().cpu().clone()
    if real.is_complex():
        return real.to(torch.complex128)
    return real.double() if real.is_floating_point() else real


def sharing_copy(module: nn.Module) -> nn.Module:
    """Copy a module with parameters that share memory and have gradients of their own."""
    # Not detach(): a write of one copy must not count as one to what backward of others kept.
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data) for p in module.parameters()}
    return deep_copied(module, memo)


def scaled_copy(module: nn.Module, factor: float) -> nn.Module:
    """Copy a module with parameters multiplied by a number."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach() * factor, p.requires_grad) for p in module.parameters()
    }
    return deep_copied(module, memo)


_IN_DOUBLE = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}


class _MadeInDouble:
    """Float64 as the default dtype while any thread is within."""

    def __init__(self) -> None:
        self._lock, self._num_within = threading.Lock(), 0
        self._default = torch.float32

    def enter(self) -> None:
        with self._lock:
            if not self._num_within:
                self._default = torch.get_default_dtype()
                torch.set_default_dtype(torch.float64)
            self._num_within += 1

    def leave(self) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                torch.set_default_dtype(self._default)


_made_in_double = _MadeInDouble()


class InDouble(TorchFunctionMode):
    """Has code that asks for float32 compute in float64, so that sums can be compared.

    What it makes without a dtype is float64 from the start: the least float64, which masks are
    filled with, has no float32.
    """

    def __enter__(self) -> Self:
        _made_in_double.enter()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _made_in_double.leave()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _grouped_mm(*args, **(kwargs or {}))
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **kwargs)


def _grouped_mm(
    rows_TK: Tensor, weights_EKN: Tensor, offs: Tensor | None = None, **_: Any
) -> Tensor:
    """Multiply groups of rows each with a matrix of its own; torch's has no float64."""
    assert offs is not None
    assert weights_EKN.dim() == 3
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    parts = [rows_TK[a:b] @ w for a, b, w in zip(starts, ends, weights_EKN, strict=True)]
    left = rows_TK.new_zeros(len(rows_TK) - ends[-1], weights_EKN.shape[-1])
    return torch.cat([*parts, left])


def _double(value: Any) -> Any:
    return _IN_DOUBLE.get(value, value) if isinstance(value, torch.dtype) else value
