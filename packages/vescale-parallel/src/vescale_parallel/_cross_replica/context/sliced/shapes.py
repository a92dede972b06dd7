"""Sliced tensors in other shapes: views, parts, and what is put together; see :mod:`.rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import parts, views
from .tensor import SlicedTensor

Args = Sequence[Any]
Named = Mapping[str, Any]


def _index(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    x, index = args
    if not isinstance(x, SlicedTensor):
        return None
    return views.indexed(x, index)


def _narrowed(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "dim", "start", "length"), args, strict=False)) | {**kwargs}
    x, first, length = given.get("input"), given.get("start"), given.get("length")
    if not isinstance(x, SlicedTensor) or not isinstance(first, int) or length is None:
        return None
    dim = given["dim"] % x.local.ndim
    if dim != x.along.dim:
        return SlicedTensor.of(x.local.narrow(dim, first, length), x.along)
    first += x.along.length if first < 0 else 0
    return views.narrowed(x, first, first + length)


def _view(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    x, sizes = args[0], args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
    sizes = kwargs.get("shape", sizes)
    if not isinstance(sizes, Sequence) or not all(isinstance(size, int) for size in sizes):
        return None
    name = "view" if func is Tensor.view else "reshape"
    return views.reshaped(x, [*sizes], lambda local, shape: getattr(local, name)(shape))


def _flatten(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "start_dim", "end_dim"), args, strict=False)) | {**kwargs}
    x: SlicedTensor = given["input"]
    shape = x.along.whole_shape(x.local.shape)
    first, last = (given.get(n, d) % len(shape) for n, d in (("start_dim", 0), ("end_dim", -1)))
    flat = [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]]
    return views.reshaped(x, flat, Tensor.reshape)


def _unflatten(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "dim", "sizes"), args, strict=False)) | {**kwargs}
    x, sizes = given.get("input"), given.get("sizes")
    if not isinstance(x, SlicedTensor) or not isinstance(sizes, Sequence):
        return None
    shape = x.along.whole_shape(x.local.shape)
    dim = given["dim"] % len(shape)
    rest = math.prod(size for size in sizes if size != -1)
    split = [shape[dim] // rest if size == -1 else size for size in sizes]
    if not rest or math.prod(split) != shape[dim]:
        return None
    return views.reshaped(x, [*shape[:dim], *split, *shape[dim + 1 :]], Tensor.reshape)


def _rolled(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "shifts", "dims"), args, strict=False)) | {**kwargs}
    x, dims = given["input"], given.get("dims")
    dims = [dims] if isinstance(dims, int) else [*(dims or ())]
    if not dims or x.along.dim in [dim % x.local.ndim for dim in dims]:
        return None
    return SlicedTensor.of(func(x.local, *args[1:], **kwargs), x.along)


def _flipped(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    dims = _sizes(args) or kwargs.get("dims", ())
    if not dims or not all(isinstance(dim, int) for dim in dims):
        return None
    x: SlicedTensor = args[0]
    if x.along.dim in [dim % x.local.ndim for dim in dims]:
        return None
    return SlicedTensor.of(x.local.flip(tuple(dims)), x.along)


def _top(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "k", "dim"), args, strict=False)) | {**kwargs}
    x: SlicedTensor = given["input"]
    if given.get("dim", -1) % x.local.ndim == x.along.dim:
        return None
    made = func(x.local, *args[1:], **kwargs)
    return type(made)([SlicedTensor.of(each, x.along) for each in made])


def _triangle(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Keep a triangle of (.., rows, columns) with the positions in rows."""
    x, others = args[0], args[1:]
    if x.along.dim != x.local.ndim - 2 or x.along.count > 1:
        return None
    rows, columns = x.along.whole_shape(x.local.shape)[-2:]
    ones = torch.ones(rows, columns, dtype=torch.bool, device=x.local.device)
    kept = x.along.part(func(ones, *others, **kwargs), 0)
    return SlicedTensor.of(x.local.masked_fill(~kept, 0), x.along)


def _transpose(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    if kwargs or not isinstance(args[0], SlicedTensor):
        return None
    order = views.order_of(func.__name__, args[0].local.ndim, args[1:])
    return None if order is None else views.transposed(args[0], order)


def _squeeze(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(dim, int):
        return None
    if func in (torch.unsqueeze, Tensor.unsqueeze):
        return views.unsqueezed(args[0], dim)
    return views.squeezed(args[0], dim)


def _joined(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not isinstance(args[0], list | tuple) or not isinstance(dim, int):
        return None
    return parts.joined(func, args[0], dim)


def _taken_apart(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Take apart: all but ``unbind`` have sizes, or a number, before the dim."""
    x, *others = args
    named, place = {**kwargs}, 0 if "unbind" in func.__name__ else 1
    dim = named.pop("dim", 0) if len(others) <= place else others.pop(place)
    return parts.taken_apart(func, x, dim, others, named)


def _padded(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | {**kwargs}
    x, pad, value = given.get("input"), given.get("pad", ()), given.get("value") or 0.0
    if not isinstance(x, SlicedTensor) or given.get("mode", "constant") != "constant":
        return None
    at = 2 * (x.local.ndim - 1 - x.along.dim)  # the last dim comes first
    of_positions, others = pad[at : at + 2], [*pad[:at], *(0, 0), *pad[at + 2 :]]
    made = SlicedTensor.of(func(x.local, others, value=value), x.along) if any(others) else x
    return parts.padded(made, of_positions, value) if any(of_positions) else made


def _sizes(args: Args) -> list[Any] | None:
    """Return the integers that a method was given one by one, or as one tuple."""
    found = [*args[1]] if len(args) == 2 and not isinstance(args[1], int) else [*args[1:]]
    return found if found and all(isinstance(each, int) for each in found) else None


def _expanded(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    sizes = _sizes(args)
    return None if sizes is None or kwargs else parts.expanded(args[0], sizes)


def _repeated(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    counts = _sizes(args)
    return None if counts is None or kwargs else parts.repeated(args[0], counts)


def _interleaved(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | {**kwargs}
    x, repeats, dim = given.get("input"), given.get("repeats"), given.get("dim")
    if not isinstance(x, SlicedTensor) or not isinstance(repeats, int) or dim is None:
        return None
    if dim % x.local.ndim == x.along.dim:
        return None
    return SlicedTensor.of(x.local.repeat_interleave(repeats, dim), x.along)


def _of_numbers(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Take pairs of the last dim for complex numbers, and the opposite."""
    x: SlicedTensor = args[0]
    if func is torch.view_as_complex and x.along.dim == x.local.ndim - 1:
        return None
    return SlicedTensor.of(func(x.local), x.along)


def _embedding(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    x, others = args[0], (*args[1:], *kwargs.values())
    if not isinstance(x, SlicedTensor) or _is_sliced(others):
        return None
    return SlicedTensor.of(func(x.local, *args[1:], **kwargs), x.along)


def _new(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Make a tensor of given sizes, of the kind of another one, whose values are not read."""
    if not isinstance(args[0], SlicedTensor) or _is_sliced((*args[1:], *kwargs.values())):
        return None
    return func(args[0].local, *args[1:], **kwargs)


def _is_sliced(values: Iterable[Any]) -> bool:
    return any(isinstance(x, SlicedTensor) for x in values)


RULES = (
    (_index, ("__getitem__",)),
    (_narrowed, ("narrow",)),
    (_view, ("view", "reshape")),
    (_flatten, ("flatten",)),
    (_unflatten, ("unflatten",)),
    (_rolled, ("roll",)),
    (_flipped, ("flip",)),
    (_top, ("topk",)),
    (_triangle, ("tril", "triu")),
    (_transpose, ("transpose", "swapaxes", "swapdims", "permute")),
    (_squeeze, ("squeeze", "unsqueeze")),
    (_joined, ("cat", "concat", "concatenate", "stack")),
    (_taken_apart, ("split", "split_with_sizes", "tensor_split", "chunk", "unbind")),
    (_padded, ("pad",)),
    (_expanded, ("expand",)),
    (_repeated, ("repeat",)),
    (_interleaved, ("repeat_interleave",)),
    (_of_numbers, ("view_as_complex", "view_as_real")),
    (_embedding, ("embedding",)),
    (_new, ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")),
)
