"""Compare what a module gives for all rows of a small batch with what it gives for a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .borders import Rows, part_of_rows, rows_dim
from .dims.bounds import GivenBounds

NUM_ROWS, NUM_PARTS = 4, 2


def rows_in(whole: Tensor, part: Tensor, index: int, num_rows: int) -> Rows | None:
    """Return where all ``num_rows`` are in a tensor, given the same for some of them."""
    dim = rows_dim(whole.shape, part.shape, NUM_PARTS)
    if dim is None:
        return None
    inner = Rows(dim, outermost=False)
    length = whole.shape[dim]
    if length % num_rows == 0 and length > num_rows:
        outer = part_of_rows(whole, Rows(dim), index, NUM_PARTS, num_rows)
        inside = part_of_rows(whole, inner, index, NUM_PARTS, num_rows)
        if not equal(part, outer) and equal(part, inside):
            return inner
    return Rows(dim)


def is_part(x: Tensor, whole: Tensor, part: int, num_rows: int) -> bool:
    if x.shape == whole.shape:
        return equal(x, whole)
    rows = rows_in(whole, x, part, num_rows)
    return rows is not None and equal(x, part_of_rows(whole, rows, part, NUM_PARTS, num_rows))


def same_value(x: Any, y: Any) -> bool:
    if isinstance(x, bool | int | float | str | torch.Size | type(None)):
        return x == y
    return type(x) is type(y)


def equal(found: Tensor, expected: Tensor, *, relative: float = 1e-9) -> bool:
    """Whether numbers agree up to rounding; 1e-9 is some thousand times that of a long sum."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point() and not found.is_complex():
        return torch.equal(found, expected)
    if found.dtype not in (torch.float64, torch.complex128):
        relative = 1e-3
    finite = expected.detach()[expected.detach().isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(
        found.detach(),
        expected.detach(),
        rtol=relative,
        atol=relative * (largest + 1e-3),
        equal_nan=True,
    )


def where_rows(
    whole: list[Any], part: list[Any], num_rows: int, bounds: GivenBounds | None = None
) -> tuple[tuple[Rows | None, ...], bool]:
    """Return where the rows are in tensors, and whether shapes tell for all of them.

    Those of ``bounds`` are known.
    """
    if len(whole) != len(part):
        return (), False
    pairs = list(zip(whole, part, strict=True))
    both = [isinstance(w, Tensor) and isinstance(x, Tensor) for w, x in pairs]
    rows = [
        _rows_of_pair(w, x, num_rows, bounds) if tensors else None
        for (w, x), tensors in zip(pairs, both, strict=True)
    ]
    told = [
        not tensors or found is not None or w.shape == x.shape
        for (w, x), found, tensors in zip(pairs, rows, both, strict=True)
    ]
    return tuple(rows), all(told)


def _rows_of_pair(
    whole: Tensor, part: Tensor, num_rows: int, bounds: GivenBounds | None
) -> Rows | None:
    kind = None if bounds is None else bounds.kind(whole, part, 0)
    return (
        rows_in(whole, part, 0, num_rows) if kind is None else Rows(whole.dim() - 1, bounds=kind)
    )
