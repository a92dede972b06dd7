"""What is computed of a sliced tensor on this rank's slice; see [Note: sliced tensors].

A rule returns nothing of a call that it does not know, which then gets whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_parallel._loss.token_mean import TokenMean
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import lifted
from vescale_parallel._torch_private import pytree, unseen_functions

from . import parts, products, shapes, views
from .tensor import WHOLE, Along, SlicedTensor, WholeError, gathered, summed

Args = Sequence[Any]
Named = Mapping[str, Any]
Rule = Callable[[Callable[..., Any], Args, Named], Any]
UNKNOWN = object()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


POINTWISE = _names(
    """
    abs add addcmul bfloat16 bitwise_and ceil celu clamp clamp_max clamp_min clip clone
    contiguous cos detach div divide double elu eq erf exp expm1 float floor ge gelu greater gt
    half hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu less log log1p
    logical_and logical_not logical_or logsigmoid lt masked_fill maximum minimum mish mul
    multiply nan_to_num ne neg negative pow reciprocal relu relu6 round rsqrt selu sigmoid
    sign silu sin softplus sqrt square sub subtract tanh to true_divide type where
    zeros_like ones_like __abs__
    __add__ __and__ __eq__ __ge__ __gt__ __invert__ __le__ __lt__ __mul__ __ne__ __neg__
    __or__ __pow__ __radd__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__
    """
)
_IN_PLACE = _names(
    """
    add_ clamp_ div_ exp_ masked_fill_ mul_ neg_ pow_ relu_ sigmoid_ sub_ tanh_ __iadd__
    __imul__ __isub__ __itruediv__
    """
)
_WRITES = {
    "__set__",
    "__setitem__",
    "__iadd__",
    "__imul__",
    "__isub__",
    "__itruediv__",
    "__ipow__",
}
# Recurrences and convolutions, of whose positions no rank can compute its own alone.
_MIXING = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "cumsum", "cumprod", "cummax", "cummin",
    "logcumsumexp", "lstm", "gru", "rnn_tanh", "rnn_relu",
}  # fmt: skip
_TOKEN_LOSSES = (F.cross_entropy, F.nll_loss)
_OVER_FEATURES = _names(
    """
    amax amin argmax argmin cumsum log_softmax logsumexp softmax sort std var
    """
)
_METADATA = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.element_size,
    Tensor.__hash__, torch.is_floating_point, torch.is_complex, torch.numel, Tensor.stride,
}  # fmt: skip
# By which torch's functions take their arguments, too.
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_OF_SLICE = {"requires_grad", "grad_fn", "is_leaf"}
_VALUES = {"T", "H", "mH", "data", "real", "imag"}


def computed(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Return what a function makes of arguments with sliced tensors.

    Raises:
        ValueError: If it writes to one of them in a way that a slice does not know.
    """
    if (found := metadata(func, args, kwargs)) is not UNKNOWN:
        return found
    named = {_OF_NUMPY.get(name, name): value for name, value in kwargs.items()}
    rule = _RULES.get(func) if args or func in _TOKEN_LOSSES else None
    rule = None if "out" in kwargs else rule
    if rule is not None and (found := rule(func, args, named)) is not None:
        return found
    name = name_of(func)
    _refuse_writes(name, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    first = _sliced(leaves)[0]
    call = first.along.call
    if first.along.in_blocks and first.is_floating_point() and name in _MIXING:
        raise WholeError(repr(name), call.module)
    call.gathered_by.append(name)
    found = [gathered(x) for x in leaves]
    args, kwargs = pytree.tree_unflatten(found, spec)
    made = func(*args, **kwargs)
    call.note_views(
        name, made, [x for x, mine in zip(found, leaves, strict=True) if x is not mine]
    )
    return made


def _refuse_writes(name: str, args: Args, kwargs: Named) -> None:
    """Refuse what would be written to a gathered copy."""
    is_method = name.endswith("_") and not name.endswith("__")
    writes = is_method or name in _WRITES
    written = [*(args[:1] if writes else ()), kwargs.get("out")]
    found = _sliced(written)
    if found and (module := found[0].along.call.module):
        raise ValueError(
            f"context_parallel: in {module!r} {name!r} writes to a tensor of which a rank has a "
            "slice; compute a new tensor, as torch.where does"
        )
    if found:
        raise ValueError(
            f"context_parallel: {name!r} writes to a tensor behind the blocks of which a rank has "
            f"a slice; write a new tensor, or {WHOLE}"
        )


def metadata(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Return what is known of a tensor without its values."""
    if func in (Tensor.register_hook, Tensor.is_contiguous):
        return func(args[0].local, *args[1:], **kwargs)
    if func not in _METADATA:
        if getattr(func, "__name__", "") != "__get__":
            return UNKNOWN
        name = name_of(func)
        if name == "mT":
            return views.swapped(args[0], -1, -2)
        if name in _VALUES:
            return UNKNOWN
        if name in _OF_SLICE:
            return func(args[0].local)
    with unseen_functions():
        return func(*args, **kwargs)


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, or of the attribute that it gets."""
    name = getattr(func, "__name__", str(func))
    return (
        getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
    )


def _sliced(values: Iterable[Any]) -> list[SlicedTensor]:
    return [x for x in values if isinstance(x, SlicedTensor)]


def _pointwise(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Compute element by element: whole tensors that are along the sequence are sliced."""
    given = (tuple(args), dict(kwargs))
    leaves, spec = pytree.tree_flatten(given)
    found = _sliced(leaves)
    if not found:
        return None
    along = found[0].along
    place = found[0].local.ndim - along.dim  # from behind, as tensors are broadcast
    mesh = next((x.local.device_mesh for x in found if isinstance(x.local, DTensor)), None)
    for at, x in enumerate(leaves):
        if isinstance(x, Tensor):
            mine = _part(x, along, place)
            if mine is None:
                return None
            if mesh is not None and not isinstance(x, SlicedTensor):
                mine = lifted(mine, mesh)
            leaves[at] = mine
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    made = func(*args, **kwargs)
    if not isinstance(made, Tensor):
        return made
    return SlicedTensor.of(made, along.at(made.ndim - place))


def _part(x: Tensor, along: Along, place: int) -> Tensor | None:
    """Return this rank's part of a factor or summand, with the sequence in a dim from behind.

    In blocks, of one with the sequence elsewhere too, as scores of keys with queries are turned.
    """
    if isinstance(x, SlicedTensor):
        if x.local.ndim - x.along.dim == place and x.along.is_like(along):
            return x.local
        if not along.in_blocks or isinstance(x.local, DTensor):
            return None
        x = gathered(x)
    if x.ndim < place or x.shape[-place] == 1:
        return x
    return along.part(x, x.ndim - place) if x.shape[-place] == along.length else None


def _typed(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Convert to the dtype of another tensor, whatever its shape."""
    x, other = args
    other = other.local if isinstance(other, SlicedTensor) else other
    if not isinstance(x, SlicedTensor):
        return func(x, other)
    return SlicedTensor.of(func(x.local, other), x.along)


def _in_place(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    target = args[0]
    if not isinstance(target, SlicedTensor):
        return None
    made = _pointwise(func, args, kwargs)
    return made if made is None else target


def _over_features(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Reduce, or normalize, over dims that are not along the sequence."""
    x, dims = _reduced(func, args, kwargs)
    if x is None or not dims or x.along.dim in dims:
        return None
    made = func(x.local, *args[1:], **kwargs)
    first = made if isinstance(made, Tensor) else made[0]
    gone = sum(dim < x.along.dim for dim in dims) if first.ndim < x.local.ndim else 0
    along = x.along.at(x.along.dim - gone)
    return pytree.tree_map_only(Tensor, lambda each: SlicedTensor.of(each, along), made)


def _largest(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Take the larger of two tensors, or the largest along a dim."""
    other = args[1] if len(args) > 1 else kwargs.get("other")
    return (_pointwise if isinstance(other, Tensor) else _over_features)(func, args, kwargs)


def _total(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Sum, or average, over positions too, which is summed over ranks."""
    x, dims = _reduced(func, args, kwargs)
    if x is None:
        return None
    if dims and x.along.dim not in dims:
        return _over_features(func, args, kwargs)
    if x.along.slices.shared:
        return None
    if len(args) > 1 + bool(dims) or {*kwargs} - {"dim", "dtype", "keepdim"}:
        return None
    local = x.local if kwargs.get("dtype") is None else x.local.to(kwargs["dtype"])
    keeps = bool(kwargs.get("keepdim", False))
    mine = local.sum(dims, keepdim=keeps) if dims else local.sum()
    made = summed(mine, x.along)
    if func in (torch.sum, Tensor.sum):
        return made
    shape = x.along.whole_shape(local.shape)
    return made / math.prod(shape[dim] for dim in dims or range(len(shape)))


def _reduced(
    func: Callable[..., Any], args: Args, kwargs: Named
) -> tuple[SlicedTensor | None, tuple[int, ...]]:
    """Return the tensor of a reduction, and its dims; none for all."""
    if (
        not args
        or not isinstance(args[0], SlicedTensor)
        or len(_sliced((*args, *kwargs.values()))) > 1
    ):
        return None, ()
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    ndim = args[0].local.ndim
    match dim:
        case None:
            return args[0], ()
        case bool():
            return None, ()
        case int():
            return args[0], (dim % ndim,)
        case tuple() | list():
            return args[0], tuple(each % ndim for each in dim)
        case _:
            return None, ()


def _linear(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Multiply features with a matrix that has no positions."""
    x, others = args[0], (*args[1:], *kwargs.values())
    if not isinstance(x, SlicedTensor) or _sliced(others) or x.along.dim == x.local.ndim - 1:
        return None
    weight = args[1] if len(args) > 1 else kwargs.get("weight", kwargs.get("other"))
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(x.local, DTensor):
        return None
    return SlicedTensor.of(func(x.local, *args[1:], **kwargs), x.along)


def _product(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    x, y = args[0], args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mat2"))
    return products.multiplied(func, x, y) if isinstance(y, Tensor) else None


def _added_product(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | {**kwargs}
    return products.added_product(func, given.pop("input"), given)


def _einsum(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    equation, *factors = args
    if len(factors) == 1 and isinstance(factors[0], list | tuple):
        factors = [*factors[0]]
    if not isinstance(equation, str):
        return None
    return products.summed_as(func, equation, factors)


def _norm(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    x, others = args[0], (*args[1:], *kwargs.values())
    shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape")
    if not isinstance(x, SlicedTensor) or _sliced(others) or isinstance(x.local, DTensor):
        return None
    if not isinstance(shape, tuple | list) or x.along.dim >= x.local.ndim - len(shape):
        return None
    return SlicedTensor.of(func(x.local, *args[1:], **kwargs), x.along)


def _dropout(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | {**kwargs}
    x: SlicedTensor = given.pop("input")
    if given.get("p", 0.5) == 0 or not given.get("training", True):
        return x
    if not x.along.in_blocks:
        return None  # what is drawn, is drawn of the whole
    return SlicedTensor.of(func(x.local, **given), x.along)


def _picked(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Gather by an index along features, as probabilities of targets are."""
    given = dict(zip(("input", "dim", "index"), args, strict=False)) | {**kwargs}
    x, dim, index = given.get("input"), given.get("dim"), given.get("index")
    if {*given} != {"input", "dim", "index"} or not isinstance(x, SlicedTensor):
        return None
    if not isinstance(dim, int) or dim % x.local.ndim == x.along.dim:
        return None
    mine = parts.like(index, x.along, x.along.dim)
    return None if mine is None else SlicedTensor.of(x.local.gather(dim, mine), x.along)


def _token_loss(func: Callable[..., Any], args: Args, kwargs: Named) -> Any:
    """Compute losses of this rank's positions, and count the targets of all."""
    given = dict(zip(("input", "target"), args, strict=False)) | {**kwargs}
    x, target = given.pop("input", None), given.pop("target", None)
    if not isinstance(x, SlicedTensor) or len(args) > 2 or TokenMean.is_old(kwargs):
        return None
    along, has_classes = x.along, x.local.ndim > 1
    class_dim = 1 if has_classes else 0
    if not has_classes or along.dim == class_dim or not isinstance(target, Tensor):
        return None
    is_soft = target.is_floating_point()
    dim = along.dim if is_soft or along.dim == 0 else along.dim - 1
    mine, how = parts.like(target, along, dim), given.pop("reduction", "mean")
    if mine is None:
        return None
    if how == "none":
        return SlicedTensor.of(func(x.local, mine, **given, reduction=how), along.at(dim))
    total = summed(func(x.local, mine, **given, reduction="sum"), along)
    if how == "sum":
        return total
    if is_soft:
        shape = along.whole_shape(x.local.shape)
        return total / (math.prod(shape) // shape[class_dim])
    weight, ignored = given.get("weight"), given.get("ignore_index", -100)
    counted = TokenMean(x.local, gathered(target), weight, ignore_index=ignored).counted()
    return total / counted.to(total.dtype)


def functions(names: Iterable[str]) -> list[Any]:
    """Return the functions of these names of all of torch's places."""
    places: tuple[Any, ...] = (torch, Tensor, F)
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]


_BY_NAME: tuple[tuple[Rule, Sequence[str]], ...] = (
    (_pointwise, POINTWISE),
    (_in_place, _IN_PLACE),
    (_typed, ("type_as",)),
    (_over_features, _OVER_FEATURES),
    (_largest, ("max", "min")),
    (_total, ("sum", "mean")),
    (_linear, ("linear",)),
    (_product, ("matmul", "__matmul__", "bmm")),
    (_added_product, ("baddbmm",)),
    (_einsum, ("einsum",)),
    (_norm, ("layer_norm", "rms_norm")),
    (_dropout, ("dropout",)),
    (_picked, ("gather",)),
    (_token_loss, ("cross_entropy", "nll_loss")),
    *shapes.RULES,
)
_RULES: dict[Any, Rule] = {func: rule for rule, names in _BY_NAME for func in functions(names)}
