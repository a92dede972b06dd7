"""The small batches that a cross-replica check runs a model on: a few rows, and halves of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.check import CannotRunError
from vescale_parallel._cross_replica.dims.bounds import leaves_of_bounds
from vescale_parallel._cross_replica.dims.find_packed import texts_of
from vescale_parallel._cross_replica.dims.media_tokens import media_tokens
from vescale_parallel._cross_replica.dims.packed_rows import is_packed
from vescale_parallel._cross_replica.dims.row_counts import (
    OF_ONE_ROW,
    RowDims,
    is_one_a_row,
    row_dim,
    shapes_with_rows,
)
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._cross_replica.parts import NUM_ROWS
from vescale_parallel._model.copies import tensors_within
from vescale_parallel._model.inputs import (
    children_of,
    common_length,
    is_shared_by_rows,
    map_children,
    refuse_closed_batch,
    some_that_count,
)
from vescale_parallel._model.random_copies import in_double
from vescale_parallel._torch_private import pytree

from .bounded_batches import bounded_batches
from .packed_batches import RowsMade, packed_batches


def within(model: nn.Module, given: Any, dims: RowDims = ()) -> Any:
    """Return a call with token ids in a smaller vocabulary; ``dims`` says where the rows are.

    Texts for a model that :func:`with_any_ids` made take any stay: it compares them with its
    configuration. So do bounds of rows, which are no ids.
    """
    limit = _vocabulary(model) or largest_table(model)
    if limit <= 0:
        return given
    leaves, spec = pytree.tree_flatten(given)
    texts = texts_of(leaves) if type(_embedding(model)) is _OfAnyIds else None
    kept = leaves_of_bounds(dims) | {texts}

    def inside(index: int, x: Any) -> Any:
        is_ids = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool
        return torch.where(x >= limit, x % limit, x) if is_ids and index not in kept else x

    return pytree.tree_unflatten([inside(i, x) for i, x in enumerate(leaves)], spec)


def with_any_ids(model: nn.Module) -> nn.Module:
    """Have a model with a smaller vocabulary take texts of a larger one, in place.

    Those that have tokens for images, of which ``within`` leaves the texts as they are.
    """
    found: Any = _embedding(model)
    if media_tokens(model) and type(found) is nn.Embedding:
        found.__class__ = _OfAnyIds
    return model


class _OfAnyIds(nn.Embedding):
    """An embedding in which ids of a larger vocabulary share rows."""

    def forward(self, input: Tensor) -> Tensor:  # as torch names it
        return super().forward(input % self.num_embeddings)


def _vocabulary(model: nn.Module) -> int:
    """Return how many rows the embedding of tokens has, by transformers' name for it; else 0.

    Others may have more: of positions in an image, or of entities.
    """
    found = _embedding(model)
    return found.num_embeddings if isinstance(found, nn.Embedding) else 0


def _embedding(model: nn.Module) -> nn.Module | None:
    try:
        return getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return None


def largest_table(model: nn.Module) -> int:
    """Return how many rows the largest embedding has."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return max(tables, default=0)


def holds_rows(leaf: object) -> bool:
    """Whether an argument, not a tensor itself, holds some: they cannot be made fewer rows."""
    if isinstance(leaf, Tensor | Mapping):
        return False  # a mapping is opened
    return any(x.numel() for x in tensors_within(leaf))


@dataclass(frozen=True)
class Extremes:
    """Integers that no row of a half shares with the other one.

    Attributes:
        larger: Of a tensor that has one value only, of one row of one token for example, the
            value of the second half. It need not be an index of what the model looks up.
        smaller: And that of the first half. 0 is an index of everything that has any, and the
            length of nothing.
    """

    larger: Callable[[Tensor], Tensor]
    smaller: Callable[[Tensor], Tensor] = lambda value: value.clamp(max=0)

    def fill(self, rows: Tensor) -> None:
        """Give the first half of rows the least integer, the second half the largest.

        And numbers that differ, if all are the same: weights that are still 1, targets of which
        none is there yet.
        """
        if rows.is_complex() or not rows.numel():
            return
        if rows.is_floating_point():
            return _tell_apart(rows)
        least, largest = rows.amin(), rows.amax()
        if rows.dtype == torch.bool and rows.dim() == 1 and least == largest:
            rows[0] = ~rows[0]  # one row is left out, no half of them
            return
        if rows.dim() > 1 and least == largest == 0:
            return _mark_some(rows)
        # A mask that keeps all stays one. One number a row is a label, and no mask.
        is_label = rows.dim() == 1 and rows.dtype != torch.bool
        if least == largest and (is_label or not _is_mask(rows)):
            least, largest = self.smaller(least), self.larger(largest)
        half = len(rows) // 2
        rows[:half] = least
        rows[half:] = largest


def _tell_apart(rows: Tensor) -> None:
    """Give halves of rows other numbers if all have one."""
    first, half = rows.flatten()[0], len(rows) // 2
    if not bool((rows == first).all()):
        return
    if rows.numel() == len(rows):
        rows[half:] = first + (first == 0)
        rows[:half] = first / 2
    elif first == 0:
        _mark_some(rows)


def _mark_some(rows: Tensor) -> None:
    """Put a 1 into zeros, at the end of a row of the second half: most are as they were."""
    rows[-1].view(-1)[-1] = 1


def extremes_of(model: nn.Module) -> Iterable[Extremes]:
    """Return the kinds to try of integers that a model may look up."""
    last = largest_table(model) - 1
    larger = _twice, lambda value: value.clamp(min=last), _as_it_is
    return *map(Extremes, larger), Extremes(_as_it_is, lambda value: value.clamp(max=1))


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _twice(value: Tensor) -> Tensor:
    return 2 * value.clamp(min=0) + 2


def some_rows(
    given: Given,
    num_rows: int,
    *,
    uneven: bool,
    alike: Extremes | None = None,
    dims: RowDims = (),
    num_few: int = NUM_ROWS,
    repeats: bool = False,
    has_short: bool = False,
) -> list[Given]:
    """Return small batches: one of ``num_few`` rows, and both halves of it.

    ``uneven`` has masks keep another number of positions of every row: whoever counts them must
    not be taken for somebody who does not. ``alike`` has all integers of the first half of the
    rows be alike, and those of the second. ``dims`` says where the rows are in leaves where shapes
    would mislead; see [Note: tensors as long as the batch]. Where there are fewer rows than that
    they are made different, or are the same ones again, if it ``repeats``.

    Raises:
        ValueError: If there are no rows.
        TypeError: If objects that pytree does not open hold them.
        CannotRunError: If there is a nested tensor.
    """
    if not num_rows:
        refuse_closed_batch(given)
        raise ValueError(
            "expected a batch of at least one row, got 0 rows; leave such a batch out, on all "
            "ranks alike"
        )
    if is_packed(dims):
        thinned = _thinned_masks if uneven else lambda x: x
        made = RowsMade(repeats, thinned, None if alike is None else alike.fill)
        if not leaves_of_bounds(dims):
            return packed_batches(given, dims, num_few, made)
        new = None if repeats else torch.Generator().manual_seed(0)
        grown = functools.partial(
            _grown, num_few=num_few, generator=new, length=None, uneven=uneven
        )
        return bounded_batches(given, dims, num_few, made, grown, has_short=has_short)
    half = num_few // 2
    kept = (slice(0, num_few), slice(0, half), slice(half, num_few))
    leaves = pytree.tree_leaves(given)
    if any(isinstance(x, Tensor) and x.is_nested for x in leaves):
        raise CannotRunError("a nested tensor is given")
    told = {id(leaves[index]): dim for index, dim in dims}
    counts = num_rows, num_few
    return [
        _some_rows(given, counts, rows, told, uneven=uneven, alike=alike, repeats=repeats)
        for rows in kept
    ]


def _some_rows(
    given: Given,
    counts: tuple[int, int],
    rows: slice,
    told: Mapping[int, Any],
    *,
    uneven: bool,
    alike: Extremes | None,
    repeats: bool,
) -> Given:
    generator, (num_rows, num_few) = torch.Generator().manual_seed(0), counts
    # What has no rows may have to fit the length of what has.
    length = None if told else common_length(given, num_rows)
    shapes = shapes_with_rows(*given)

    def some(value: Any) -> Any:
        if isinstance(value, Tensor):
            dim = told.get(id(value), row_dim(value, num_rows))
            real = in_double(value)
            if dim is None and alike is not None and id(value) in told and value.dim() == 1:
                # Numbers of rows, if they do matter, of which code takes the first ones: zip().
                real = real.clone()
                alike.fill(real[:num_few])
            if dim is None or dim == OF_ONE_ROW or is_shared_by_rows(value.shape, shapes):
                return real
            new = None if repeats else generator
            grown = _grown(real.movedim(dim, 0), num_few, new, length, uneven=uneven)
            if alike is not None:
                alike.fill(grown)
            return grown[rows].movedim(0, dim).contiguous()
        if type(value) in (list, tuple) and is_one_a_row(value, num_rows, told):
            every = max(num_rows // num_few, 1)
            chosen = [_plain_tree(value[i * every % num_rows]) for i in range(num_few)]
            if alike is not None and all(type(each) is int for each in chosen):
                integers = torch.tensor(chosen)
                alike.fill(integers)
                chosen = integers.tolist()
            return type(value)(chosen[rows])
        if isinstance(value, Mapping) and not children_of(value):
            return {key: some(each) for key, each in value.items()}
        return map_children(some, value)

    args, kwargs = given
    return tuple(map(some, args)), {name: some(value) for name, value in kwargs.items()}


def _plain_tree(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, in_double, tree)


def _grown(
    x: Tensor,
    num_few: int,
    generator: torch.Generator | None,
    length: int | None,
    *,
    uneven: bool,
) -> Tensor:
    """Return ``num_few`` rows, of all of them: the first ones may be of one kind.

    Where there were fewer they are made different, with a generator.
    """
    if length is not None and x.dim() == 2:
        x = x[:, :length]
    every = max(len(x) // num_few, 1)
    rows = [x[i * every % len(x)] for i in range(num_few)]
    for i in range(len(x), num_few if generator is not None else 0):
        if x.is_floating_point() and not _is_mask(x):
            noise = torch.rand(rows[i].shape, generator=generator, dtype=x.dtype)
            rows[i] = rows[i] * (1 + 0.1 * noise)
        elif rows[i].dim():
            rows[i] = rows[i].roll(i, -1)
    made = some_that_count(torch.stack(rows))
    return _thinned_masks(made) if uneven else made


def _thinned_masks(rows: Tensor) -> Tensor:
    return _thinned(rows) if _is_mask(rows) and rows.dim() > 1 else rows


def _is_mask(x: Tensor) -> bool:
    return x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all())


def _thinned(mask: Tensor) -> Tensor:
    """Clear the ends of rows, of each one another number of positions."""
    length = math.prod(mask.shape[1:])
    flat = mask.clone().reshape(len(mask), length)
    for i, row in enumerate(flat):
        row[length - (i * length) // (2 * len(mask)) :] = 0
    return flat.view(mask.shape)
