"""Run a module on fake tensors: its skeleton, a batch of fake tensors, real integers."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from vescale_parallel._model.copies import deep_copied, tensors_of
from vescale_parallel._torch_private import FakeTensor, FakeTensorMode, fake_like, pytree

from .known_values import KnownValues

# Elements above which an integer operator is not run for real.
_LARGE_NUMEL = 1 << 27


class ObservationError(ValueError):
    """The forward cannot run without values; names the operator and the module."""


def skeleton(model: nn.Module, fake_mode: FakeTensorMode, values: KnownValues) -> nn.Module:
    """Return a deep copy of a model whose tensors have no storage, and note their values."""
    memo: dict[int, Any] = {}
    originals: list[Any] = []
    for module in model.modules():
        for tensor in tensors_of(module):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, fake_mode, values)
                originals.append(tensor)
        # Of the dicts of a module most are of hooks that nobody added, a dozen: deepcopy takes
        # longer to copy these, one by one, than all else.
        for held in vars(module).values():
            if type(held) is OrderedDict and not held:
                empty: OrderedDict[Any, Any] = OrderedDict()
                memo[id(held)] = empty
                originals.append(held)
    memo[id(memo)] = originals  # what deepcopy does to keep ids from being reused
    try:
        return deep_copied(model, memo)
    except Exception as error:
        raise ObservationError(
            f"expected a model that copy.deepcopy can copy, {type(model).__name__} cannot be: "
            f"{type(error).__name__}: {error}"
        ) from error


def fake_batch(batch: Any, fake_mode: FakeTensorMode, values: KnownValues) -> Any:
    """Return a batch of fake tensors, one for a tensor that appears twice."""
    leaves, spec = pytree.tree_flatten(batch)
    made = {id(leaf): _fake(leaf, fake_mode, values) for leaf in leaves}
    return pytree.tree_unflatten([made[id(leaf)] for leaf in leaves], spec)


def _fake(leaf: Any, fake_mode: FakeTensorMode, values: KnownValues) -> Any:
    """Return a tensor's shape and dtype as a fake tensor, or a real copy of readable integers."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not _is_readable(leaf):
        return fake_like(leaf, fake_mode)
    if not is_float(leaf.dtype) and leaf.numel() < _LARGE_NUMEL:
        return leaf.detach().cpu().clone()
    fake = fake_like(leaf, fake_mode)
    if not isinstance(leaf, nn.Parameter):
        values.give(fake, leaf)
    return fake


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout is torch.strided and tensor.device.type != "meta"


def all_integer(inputs: list[torch.Tensor], kwargs: Any, func: Any, args: Any) -> bool:
    """Return whether an operator has real integers only, in and out, and not too many."""
    dtype: torch.dtype | None = kwargs.get("dtype")
    if inputs:
        if any(isinstance(t, FakeTensor) or t.is_meta or is_float(t.dtype) for t in inputs):
            return False
        name = func._schema.name.rpartition("::")[2]
        to_float = name in ("div", "true_divide", "mean", "log", "exp", "sqrt", "rsqrt", "sin")
        small = sum(t.numel() for t in inputs) < _LARGE_NUMEL
        return small and not to_float and (dtype is None or not is_float(dtype))
    name = func._schema.name.rpartition("::")[2]
    if name not in _CONSTRUCTORS:
        return False
    if dtype is None:
        values = pytree.tree_leaves(args)
        return name in ("arange", "full") and all(isinstance(v, int) for v in values)
    return not is_float(dtype)


_CONSTRUCTORS = frozenset(("arange", "zeros", "ones", "full", "empty", "scalar_tensor"))


def fake_output(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fake_mode: FakeTensorMode
) -> Any:
    """Return what an operator gives for fake tensors, where torch has no answer as well."""
    aten = torch.ops.aten
    with fake_mode:
        if func is aten._grouped_mm.default:
            return _grouped_mm(func, args, kwargs)
        if func is aten.masked_fill.Tensor:  # reads the value that it fills with
            return aten.masked_fill.Scalar(*args[:2], 0)
        if func.overloadpacket is aten._ctc_loss:
            return _ctc_loss(*args[:2])
        return func(*args, **kwargs)


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Run a grouped matrix product whose shape function insists on bfloat16."""
    bfloat16 = [a.bfloat16() if is_float(a.dtype) else a for a in args[:2]]
    return func(*bfloat16, *args[2:], **kwargs).to(args[0].dtype)


def _ctc_loss(log_probs_TBC: torch.Tensor, targets: torch.Tensor) -> Any:
    """Return losses, and what backward keeps: as wide as targets, which torch asks for values."""
    length, *rows, _ = log_probs_TBC.shape
    kept = log_probs_TBC.new_empty((*(rows or [1]), length, 2 * targets.shape[-1] + 1))
    return log_probs_TBC.new_empty(rows), kept


def grouped_mm_flops(left: torch.Size, right: torch.Size) -> int:
    """Return the flops of rows that each meet one matrix, which torch's registry leaves out."""
    return 2 * math.prod(left) * right[-1]


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
