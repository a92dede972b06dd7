"""Products of sliced tensors: of features with features, and of positions with positions.

A product has the positions of one of its factors, queries as a rule. What it is summed over, or
has in another dim, is whole: keys and values of all positions are gathered, and scores are those
of a rank's queries (as context parallelism of Llama 3 has it, arXiv:2407.21783, 3.3.2). A product
that is summed over positions of slices, as linear attention has it of keys with values, is summed
over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from vescale_dtensor import DTensor

from .tensor import Along, SlicedTensor, gathered, summed

Made = Tensor | None  # None of what is to be computed of whole tensors
_MATRIX = 2  # dims


def multiplied(func: Callable[..., Any], x: Tensor, y: Tensor) -> Made:
    """Return ``x @ y`` (.., N, K) (.., K, M) with the positions in N, M or before, or in K."""
    ndim = max(x.ndim, y.ndim)
    if min(x.ndim, y.ndim) < _MATRIX or _is_distributed(x, y):
        return None
    if (found := _kept(x, y)) is None:
        return _over_positions(func, x, y)
    along, place = found
    rows, columns = (_part(each, along, place) for each in (x, y))
    if place == _MATRIX:
        columns = gathered(y)
    elif place == 1:
        rows = gathered(x)
    if rows is None or columns is None:
        return None
    return SlicedTensor.of(func(rows, columns), along.at(ndim - place))


def added_product(func: Callable[..., Any], added: Tensor, args: Mapping[str, Any]) -> Made:
    """Return ``beta * added + alpha * (batch1 @ batch2)``, likewise."""
    given = {**args}
    x, y = given.pop("batch1"), given.pop("batch2")
    found = _kept(x, y)
    if found is None or _is_distributed(x, y):
        return None
    along, place = found
    parts = [_part(each, along, place) for each in (added, x, y)]
    if place <= _MATRIX:
        parts[1 + (place == _MATRIX)] = gathered((x, y)[place == _MATRIX])
    if any(each is None for each in parts):
        return None
    return SlicedTensor.of(func(*parts, **given), along.at(x.ndim - place))


def _kept(x: Tensor, y: Tensor) -> tuple[Along, int] | None:
    """Return the positions that a product has, and in which dim, from behind.

    Behind the blocks, where what is gathered has one device's gradient on every rank, only of a
    product with a matrix, which nobody gathered.
    """
    along = next(each.along for each in (x, y) if isinstance(each, SlicedTensor))
    if not along.in_blocks and (isinstance(y, SlicedTensor) or y.ndim > _MATRIX):
        return None
    of_x, of_y = (
        each.ndim - each.along.dim if isinstance(each, SlicedTensor) else 0 for each in (x, y)
    )
    if isinstance(x, SlicedTensor) and of_x >= _MATRIX:
        return x.along, of_x
    if isinstance(y, SlicedTensor) and of_y != _MATRIX:
        return y.along, of_y
    return None


def _over_positions(func: Callable[..., Any], x: Tensor, y: Tensor) -> Made:
    """Return a product that is summed over the positions of which both have slices.

    Or its rows, if ``x`` mixes positions (.., S, S): as many as this rank has.
    """
    if not isinstance(y, SlicedTensor):
        return None
    if not isinstance(x, SlicedTensor):
        along, is_square = y.along, x.shape[-_MATRIX] == x.shape[-1] == y.along.length
        if not is_square or not along.in_blocks:
            return None
        rows = along.part(x, x.ndim - _MATRIX)
        return SlicedTensor.of(func(rows, gathered(y)), along.at(max(x.ndim, y.ndim) - _MATRIX))
    places = x.ndim - x.along.dim, y.ndim - y.along.dim
    if places != (1, _MATRIX) or not x.along.is_like(y.along) or not x.along.in_blocks:
        return None
    if x.along.slices.shared:
        return None
    return summed(func(x.local, y.local), x.along)


def _part(x: Tensor, along: Along, place: int) -> Tensor | None:
    """Return this rank's part of a factor that has the positions, or one for all, in a dim."""
    dim = x.ndim - place
    if isinstance(x, SlicedTensor):
        is_like = x.along.dim == dim and x.along.is_like(along)
        return x.local if is_like else None
    if dim < 0 or x.shape[dim] == 1:
        return x
    return along.part(x, dim) if x.shape[dim] == along.length else None


def _is_distributed(*factors: Tensor) -> bool:
    return any(isinstance(x, SlicedTensor) and isinstance(x.local, DTensor) for x in factors)


def summed_as(func: Callable[..., Any], equation: str, factors: Sequence[Tensor]) -> Made:
    """Return ``einsum(equation, *factors)`` with the positions of the first that keeps them."""
    named = _labels(equation, factors)
    if named is None or _is_distributed(*factors):
        return None
    *of_factors, of_result = named
    for x, labels in zip(factors, of_factors, strict=True):
        if isinstance(x, SlicedTensor) and labels[x.along.dim] in of_result:
            along, label = x.along, labels[x.along.dim]
            break
    else:
        return _summed_positions(func, equation, factors, of_factors)
    parts = list[Tensor]()
    for x, labels in zip(factors, of_factors, strict=True):
        if label not in labels:
            parts.append(gathered(x))
            continue
        mine = _part(x, along, x.ndim - labels.index(label))
        if mine is None:
            return None
        parts.append(mine)
    return SlicedTensor.of(func(equation, *parts), along.at(of_result.index(label)))


def _summed_positions(
    func: Callable[..., Any],
    equation: str,
    factors: Sequence[Tensor],
    of_factors: Sequence[Sequence[str]],
) -> Made:
    """Return a sum over the positions of which all factors that have them have slices."""
    pairs = [*zip(factors, of_factors, strict=True)]
    found = [(x.along, labels[x.along.dim]) for x, labels in pairs if isinstance(x, SlicedTensor)]
    along, label = found[0]
    if len({each for _, each in found}) > 1 or not along.in_blocks or along.slices.shared:
        return None
    parts = [
        _part(x, along, x.ndim - labels.index(label)) if label in labels else x
        for x, labels in pairs
    ]
    if any(part is None for part in parts):
        return None
    return summed(func(equation, *parts), along)


def _labels(equation: str, factors: Sequence[Tensor]) -> list[list[str]] | None:
    """Return what the dims of factors and of the result are called; those of "..." by number."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    specs = given.split(",")
    if not arrow or len(specs) != len(factors):
        return None
    found, most = list[list[str]](), 0
    for spec, x in zip(specs, factors, strict=True):
        hidden = x.ndim - len(spec.replace("...", ""))
        most = max(most, hidden)
        found.append(_spelled(spec, hidden))
    return [*found, _spelled(result, most)]


def _spelled(spec: str, hidden: int) -> list[str]:
    before, dots, after = spec.partition("...")
    return [*before, *(str(at) for at in range(hidden, 0, -1) if dots), *after]
