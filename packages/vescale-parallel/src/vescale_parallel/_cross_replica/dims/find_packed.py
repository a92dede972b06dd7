"""Find what a call packs, by names of tokens, shapes and how often tokens are in its texts."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.inputs import has_dims, is_shared_by_rows
from vescale_parallel._model.leaf_names import names_of_call
from vescale_parallel._torch_private import pytree

from .media_tokens import kind_of_media, media_tokens
from .packed_rows import PackedRows, PackedRowsError
from .rows_by_tokens import (
    MOST_SIZES,
    Mark,
    RowsByTokens,
    counts_of,
    shared_lengths,
    sizes_of_elements,
)

_IMAGE_DIMS = 4


def packed_rows(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, RowsByTokens], ...]:
    """Return the packed leaves of a call, and what tells how many elements every row has.

    Where no token of the model's configuration is in the texts all rows have as many.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    told = _Told.of(model, leaves)
    found = () if told is None else told.every(leaves, _arguments(model, args, kwargs))
    return tuple((index, rows) for index, rows in found if {*rows.lengths(leaves, index)} != {1})


def rows_of_media(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, RowsByTokens], ...]:
    """Return what :func:`packed_rows` does, or what is of images though every row has one.

    The texts are then with it, of which every row has one, too: of rows with padded images, say,
    what the model makes may be packed.
    """
    if packed := packed_rows(model, args, kwargs):
        return packed
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    told = _Told.of(model, leaves)
    if told is None or not told.counts:
        return ()
    texts = told.texts, RowsByTokens(told.texts, kept=told.kept)
    return texts, *told.every(leaves, _arguments(model, args, kwargs))


def newly_packed(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Any]
) -> tuple[tuple[int, RowsByTokens], ...]:
    """Return the leaves that a call packs though calls before had one element of every row.

    Args:
        model: Whose configuration may name tokens.
        args: Of the call.
        kwargs: Likewise.
        given: Where every leaf had its rows in calls before; :class:`PackedRows` of what is known
            to be packed.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    firsts = {len(x) for x, at in zip(leaves, given, strict=False) if has_dims(x) and at}
    is_text = len(firsts) == 1 and not any(_is_image(x) or sizes_of_elements(x) for x in leaves)
    if is_text or len(leaves) != len(given) or not media_tokens(model):
        return ()
    return tuple(
        (index, rows)
        for index, rows in packed_rows(model, args, kwargs)
        if given[index] is not None
        and not isinstance(given[index], PackedRows)
        and not rows.is_even
    )


def given_whole(
    given: Sequence[Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return the names of what may be packed in a call otherwise than is known."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    texts = texts_of(leaves)
    if texts is None:
        return []
    known = [None] * len(leaves) if given is None else given
    each = zip(names_of_call(args, kwargs), leaves, known, strict=False)
    num_rows = len(leaves[texts])
    return [
        name
        for name, leaf, rows in each
        if (rows is None or (isinstance(rows, PackedRows) and rows.is_even))
        and isinstance(leaf, Tensor)
        and leaf.dim() > 1
        and leaf.is_floating_point()
        and len(leaf) != num_rows
        and _may_be_packed(leaf, leaves, num_rows)
    ]


def uncut_error(names: Sequence[str]) -> str:
    """Return a note for what a model says of micro-batches that have other rows' images."""
    return (
        f"Micro-batches are given all of {', '.join(names)}, or equal parts of it, which has not "
        "as many elements as the batch has rows. If rows have several of these or none, images "
        "for example, name the token that stands for them in the texts "
        "(model.config.image_token_id): micro-batches are then given their own"
    )


def unknown_rows(names: Sequence[str]) -> PackedRowsError:
    """Return the error of a call that runs neither as shapes nor as tokens say."""
    return PackedRowsError(
        f"it cannot be told which rows the elements of {', '.join(names)} are of: the model does "
        "not run on fewer rows of this call, neither with one element of every row nor as many "
        "as its tokens say. Run the batch in one piece (pipeline_parallel.microbatches 1, "
        "batch.gradient_accumulation 1)"
    )


@dataclass(frozen=True)
class _Told:
    """What the texts of a call tell: by token, how many of it every row has."""

    texts: int
    counts: Mapping[Mark, list[int]]
    names: Mapping[int, str]

    @staticmethod
    def of(model: nn.Module, leaves: Sequence[Any]) -> _Told | None:
        """Return what they tell, None if a call has none or nothing that may be packed."""
        texts, tokens = texts_of(leaves), media_tokens(model)
        if texts is None:
            return None
        num_rows = len(leaves[texts])
        if not tokens and not any(_may_be_packed(x, leaves, num_rows) for x in leaves):
            return None
        marks = [Mark(token, in_runs) for in_runs in (False, True) for token in tokens]
        counts = counts_of(leaves[texts], marks)
        return _Told(texts, {mark: each for mark, each in counts.items() if any(each)}, tokens)

    def every(
        self, leaves: Sequence[Any], named: Mapping[int, tuple[str, bool]]
    ) -> tuple[tuple[int, RowsByTokens], ...]:
        """Return what tells how many elements every row has, of each leaf of which it is told."""
        num_rows, found = len(leaves[self.texts]), dict[int, RowsByTokens]()
        for index, leaf in enumerate(leaves):
            name, is_optional = named.get(index, ("", False))
            beside = _beside(leaves, index, num_rows, named)
            if beside or _may_be_packed(leaf, leaves, num_rows):
                rows = self._rows(leaves, index, beside, kind_of_media(name))
                if rows is not None:
                    found[index] = replace(rows, is_optional=is_optional)
        return tuple(found.items())

    def _rows(
        self, leaves: Sequence[Any], index: int, beside: Sequence[int], kind: str
    ) -> RowsByTokens | None:
        """Return what tells how many elements of a leaf, of a kind of media, every row has."""
        leaf, num_rows = leaves[index], len(leaves[self.texts])
        # Class weights are one number each, too; of images there are sizes beside them.
        for sizes in [*beside, None] if leaf.dim() > 1 else beside:
            if ratios := self._ratios(leaves, index, sizes, kind):
                return RowsByTokens(self.texts, ratios, self.kept, sizes)
        # (time x batch) is not packed.
        may_be_even = leaf.dim() > 1 and num_rows not in leaf.shape[:2]
        is_even = may_be_even and not self.counts and len(leaf) % num_rows == 0
        return RowsByTokens(self.texts) if is_even else None

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the tokens that are no words."""
        return tuple(dict.fromkeys(mark.token for mark in self.counts))

    def _ratios(
        self, leaves: Sequence[Any], index: int, sizes: int | None, kind: str
    ) -> tuple[tuple[Mark, Fraction], ...]:
        def likelihood(mark: Mark) -> tuple[int, int]:
            """Return how likely a mark that fits is there for a leaf; of one row all fit."""
            of_mark = kind_of_media(self.names[mark.token])
            likely = 2 if of_mark == kind else int(not (of_mark and kind))
            return likely, sum(count > 0 for count in self.counts[mark])

        weights = None if sizes is None else sizes_of_elements(leaves[sizes])
        length = len(leaves[index])
        whole = length if weights is None else sum(weights)
        marks = sorted(self.counts, key=likelihood, reverse=True)
        each = [(mark, Fraction(whole, sum(self.counts[mark]))) for mark in marks]
        return tuple(
            (mark, ratio)
            for mark, ratio in each
            if not (mark.in_runs and ratio != 1)  # a run is of one image
            and shared_lengths(length, weights, self.counts[mark], ratio) is not None
        )


def texts_of(leaves: Sequence[Any]) -> int | None:
    """Return the leaf of token ids, the one with the most different ones, if there is any."""
    found = {
        index: len(leaf.unique())
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
        and not leaf.is_nested
        and leaf.dim() == 2
        and leaf.shape[1] > MOST_SIZES
        and leaf.numel()
        and leaf.device.type != "meta"
        and not bool((leaf < 0).any())  # as labels have
        and not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    }
    return max(found, key=lambda index: found[index], default=None)


def _may_be_packed(leaf: Any, leaves: Sequence[Any], num_rows: int) -> bool:
    """Whether a leaf may have elements of every row, not one of each, in its first dim.

    One that is as long as there are rows has mostly one of each. Whether it has is asked of what
    may be images, (rows x channels x height x width), their sizes, and crops of images beside
    sizes, (rows x crops x channels x height x width).
    """
    if not has_dims(leaf) or leaf.layout is not torch.strided or leaf.device.type == "meta":
        return False
    if sizes_of_elements(leaf) is not None:
        return True
    if len(leaf) == num_rows:
        beside = any(sizes_of_elements(x) and len(x) == num_rows for x in leaves)
        is_crops = beside and leaf.is_floating_point() and leaf.dim() == _IMAGE_DIMS + 1
        return is_crops or _is_image(leaf)
    shapes = [tuple(x.shape) for x in leaves if has_dims(x)]
    return not is_shared_by_rows(leaf.shape, shapes)


def _beside(
    leaves: Sequence[Any], index: int, num_rows: int, named: Mapping[int, tuple[str, bool]]
) -> list[int]:
    """Return the leaves of sizes of a leaf's elements, if it may have some.

    One number for each of as many images as rows may be of the rows: a word of its name says
    (``second_per_grid_ts`` beside ``video_grid_thw``).
    """
    leaf = leaves[index]
    if not has_dims(leaf):
        return []
    found = [i for i, x in enumerate(leaves) if sizes_of_elements(x) and len(x) == len(leaf)]
    if leaf.dim() > 1 or len(leaf) != num_rows:
        return found if leaf.dim() == 1 or _may_be_packed(leaf, leaves, num_rows) else []
    words = {*named.get(index, ("", False))[0].split("_")}
    return [i for i in found if words & {*named.get(i, ("", False))[0].split("_")}]


def _is_image(leaf: Any) -> bool:
    return has_dims(leaf) and leaf.is_floating_point() and leaf.dim() == _IMAGE_DIMS


def _arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[int, tuple[str, bool]]:
    """Return the leaves that are arguments, by what they are called and if None is the default."""
    parameters = inspect.signature(model.forward).parameters
    names = [*itertools.islice(parameters, len(args)), *kwargs]
    index, found = 0, dict[int, tuple[str, bool]]()
    for name, value in zip(names, [*args, *kwargs.values()], strict=False):
        if isinstance(value, Tensor):
            found[index] = name, name in parameters and parameters[name].default is None
        index += len(pytree.tree_leaves(value))
    return found
