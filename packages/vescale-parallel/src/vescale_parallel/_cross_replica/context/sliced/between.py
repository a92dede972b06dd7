"""What is computed of a tensor that other ranks have parts of besides those that share a sequence.

With ``tensor_parallel.sequence`` a layer at the end of a region returns this rank's part of its
slice. Code of a module that sees whole sequences may scale it, add to it and drop of it before it
returns it. Anything else would have to know which positions these are, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._torch_private import pytree

from .rules import POINTWISE, UNKNOWN, functions, metadata, name_of
from .tensor import Along, SlicedTensor

_COMPUTED = frozenset((*functions(POINTWISE), F.dropout))


def part_of_slice(local: Tensor, along: Along) -> SlicedTensor:
    """Return the tensor of which this rank has a part of its slice."""
    return SlicedTensor.of(local, replace(along, compute=_computed, is_part=True))


def _computed(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> SlicedTensor | Any:
    """Return what a function makes of arguments with such tensors, element by element.

    Raises:
        ValueError: If it is none of those, or an argument has another layout.
    """
    if (found := metadata(func, args, kwargs)) is not UNKNOWN:
        return found
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    given = [x for x in leaves if isinstance(x, Tensor)]
    [first, *others] = [x for x in given if isinstance(x, SlicedTensor)]
    dim, shape = first.along.dim, first.local.shape
    are_alike = all(
        x.along.is_part and (x.along.dim, x.local.shape) == (dim, shape) for x in others
    ) and all(isinstance(x, SlicedTensor) or x.ndim < len(shape) - dim for x in given)
    if func not in _COMPUTED or not are_alike:
        raise ValueError(
            f"context_parallel: {first.along.call.module!r} computes {name_of(func)!r} of "
            "something of which tensor-parallel ranks have parts, too; compute it element by "
            "element, or set tensor_parallel.sequence to False"
        )
    mine = [x.local if isinstance(x, SlicedTensor) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(mine, spec)
    return SlicedTensor.of(func(*args, **kwargs), first.along)
