"""Batches: where their rows are, how a model takes them, and small ones to run a model on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from vescale_parallel._torch_private import pytree

from .copies import own_containers, tensors_within

_ROWS, _LENGTH, _MOST_ROWS = 2, 16, 64


def batch_dims(batch: Any) -> tuple[int | None, ...]:
    """Return the dim of every leaf of a batch that its rows are along, None of one without rows.

    [Note: which dim is the batch] The rows are the first dim of the first tensor that has dims,
    and of every other tensor whose first dim is as long; but a tensor with a first dim of 1
    beside one of many is shared by all rows, as positions of (1 x time) are. It is what torch's
    data loaders give, and all that can be said without a run. A model that is called with (time x
    batch) and targets of (batch) is told from one that is called with (batch x time) and
    positions of (time) by a run alone, if at all. So what splits or joins real batches asks the
    cross-replica check first, which runs the model: ``RowCoupling.rows_of``. Its guesses,
    ``row_counts``, are in the order in which they are tried, and no rule.
    """
    leaves = pytree.tree_leaves(batch)
    rows = usual_num_rows(leaves)
    return tuple(usual_rows_dim(x.shape, rows) if has_dims(x) else None for x in leaves)


def usual_num_rows(batch: Any) -> int | None:
    """Return how many rows a batch has by [Note: which dim is the batch], None without tensors."""
    firsts = [x.shape[0] for x in pytree.tree_leaves(batch) if has_dims(x)]
    return next((first for first in firsts if first != 1), firsts[0] if firsts else None)


def usual_rows_dim(shape: Sequence[int], num_rows: int | None) -> int | None:
    """Return the dim of the rows by [Note: which dim is the batch], None of a tensor without."""
    return 0 if len(shape) and shape[0] == num_rows else None


def is_shared_by_rows(shape: Sequence[int], shapes: Iterable[Sequence[int]]) -> bool:
    """Whether a tensor is one row for all rows of another one: (1, S) beside (B, S)."""
    sizes = {*shape} - {1}
    return shape[:1] == (1,) and any(other[0] != 1 and sizes <= {*other[1:]} for other in shapes)


def has_rows_first(batch: Any) -> bool:
    """Whether every tensor of a batch that has dims has its rows, the same number, first.

    What makes a batch smaller or larger needs that: tensors without rows may have to fit others.
    """
    leaves = pytree.tree_leaves(batch)
    dims = [dim for x, dim in zip(leaves, batch_dims(leaves), strict=True) if has_dims(x)]
    return bool(dims) and None not in dims


def has_dims(x: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with a dim that rows could be along."""
    return isinstance(x, Tensor) and x.dim() > 0


def opened(batch: Any) -> Any:
    """Return a batch that pytree opens: not every mapping is one for it."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def map_children(func: Callable[[Any], Any], node: Any) -> Any:
    """Return a node with ``func`` of what is directly in it; what pytree does not open, as it is.

    Example:
        >>> map_children(lambda x: -x, (1, 2))
        (-1, -2)
    """
    children, spec = pytree.tree_flatten(node, is_leaf=lambda x: x is not node)
    if spec.is_leaf():
        return node
    return pytree.tree_unflatten(map(func, children), spec)


def children_of(node: Any) -> list[Any]:
    """Return what is directly in a node that pytree opens, nothing for a leaf."""
    children, spec = pytree.tree_flatten(node, is_leaf=lambda x: x is not node)
    return [] if spec.is_leaf() else children


def refuse_closed_batch(batch: Any) -> None:
    """Refuse a batch whose tensors are all in objects that pytree does not open.

    Raises:
        TypeError: If it is so.
    """
    leaves = pytree.tree_leaves(batch)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return
    for leaf in leaves:
        if next(tensors_within(leaf), None) is not None:
            name = type(leaf).__name__
            raise TypeError(
                f"expected a batch of tensors, alone or in tuples, lists and dicts, got a {name}, "
                "in which torch does not look for any, so its rows are not found: make it a dict, "
                "a NamedTuple or a dataclass, or say once what it holds, "
                f"torch.utils._pytree.register_pytree_node({name}, ...)"
            )


def refuse_shut_output(fqn: str, output: Any, needed_by: str) -> None:
    """Refuse what a block returns in an object that pytree does not open.

    Raises:
        TypeError: If there are tensors in a dataclass that makes itself (``__new__``), or in
            another object and nowhere else.
    """
    leaves = pytree.tree_leaves(output)
    has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves)
    for leaf in leaves:
        if isinstance(leaf, Tensor) or (has_tensors and not is_dataclass(leaf)):
            continue
        if next(tensors_within(leaf), None) is not None:
            name = type(leaf).__name__
            raise TypeError(
                f"{needed_by}: expected {fqn!r} to return tensors, alone or in tuples, lists and "
                f"dicts, got a {name}, in which torch does not look for any: return a dict, a "
                "NamedTuple or a dataclass, or say once what it holds, "
                f"torch.utils._pytree.register_pytree_node({name}, ...)"
            )


def bind(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that forward takes for a batch.

    In lists and dicts of their own: a forward may put what it computes into those it is given.
    """
    signature, batch = inspect.signature(model.forward), own_containers(batch)
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        named = {str(name): value for name, value in batch.items()}
        if binds(signature, (), named):
            return (), named
    if isinstance(batch, tuple | list) and binds(signature, tuple(batch), {}):
        return tuple(batch), {}
    return (batch,), {}


def binds(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function takes these arguments."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def example_from(dataset: Any) -> Any:
    """Return two samples as a batch, None of what cannot be read without consequences.

    A stream may be one that is read once. HuggingFace's give another one to look at.
    """
    collate: Any = default_collate
    if isinstance(dataset, DataLoader):
        dataset, collate = dataset.dataset, dataset.collate_fn
    # What the data set draws must not change what is drawn in the first epoch.
    with torch.random.fork_rng(devices=[]):
        if isinstance(dataset, IterableDataset):
            take: Callable[[int], Iterable[Any]] | None = getattr(dataset, "take", None)
            samples = [] if take is None else list(take(2))
            return collate([samples[0], samples[-1]]) if samples else None
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            return None
        return collate([dataset[0], dataset[min(1, len(dataset) - 1)]])


def small_examples(batch: Any) -> Iterator[Any]:
    """Yield :func:`small_example`, then more rows, for code that does not run on so few.

    [Note: groups of rows] Code that has several rows in a group (the answers to one prompt, of
    which rewards are compared) runs on whole groups only, ``rewards.view(-1, 8)``. Their size
    divides the number of rows.
    """
    yield small_example(batch)
    num_rows = usual_num_rows(opened(batch)) or 0
    if has_rows_first(opened(batch)):
        counts = range(_ROWS + 1, min(num_rows, _MOST_ROWS) + 1)
        yield from (small_example(batch, count) for count in counts if num_rows % count == 0)


def small_example(batch: Any, num_rows: int = _ROWS) -> Any:
    """Return the first rows of a batch, and the first positions if all its tensors are (B, S)."""
    batch = opened(batch)
    if not has_rows_first(batch):
        return batch
    length = common_length(batch, next(filter(has_dims, pytree.tree_leaves(batch))).shape[0])

    def small(x: Tensor) -> Tensor:
        rows = x[:num_rows]
        return some_that_count(rows[:, :length] if length is not None and x.dim() == 2 else rows)

    return pytree.tree_map_only(Tensor, lambda x: small(x) if x.dim() else x, batch)


def some_that_count(x: Tensor) -> Tensor:
    """Return targets, of which some are not ignored: of a long prompt the first ones all are."""
    if x.is_floating_point() or x.is_complex() or not x.numel() or not bool((x < 0).all()):
        return x
    counting = x.clone()
    counting[..., ::2] = 0  # the next ones stay, and are ignored
    return counting


def common_length(batch: Any, num_rows: int) -> int | None:
    """Return a short length if a batch is of integers (B, S), all as long; None if it is not."""
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
    flat = all(x.dim() <= 2 and x.shape[0] == num_rows for x in tensors)
    same_length = len({x.shape[1] for x in tensors if x.dim() == 2}) == 1
    ids = all(not x.is_floating_point() for x in tensors)
    return _LENGTH if flat and same_length and ids else None


def example_of(model: nn.Module) -> dict[str, Tensor] | None:
    """Return what a transformers model takes, by its configuration; None for other models."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if config is None or not isinstance(main, str):
        return None
    if main == "input_ids":
        vocabulary = _vocabulary(model)
        if vocabulary is None:
            return None
        ids_BS = torch.arange(_ROWS * _LENGTH).view(_ROWS, _LENGTH) % vocabulary
        both = getattr(config, "is_encoder_decoder", False)
        return {main: ids_BS, "decoder_input_ids": ids_BS} if both else {main: ids_BS}
    if main == "input_features" and _says(config, *_OF_SPECTRA):
        ids_BS = torch.arange(_ROWS * _LENGTH).view(_ROWS, _LENGTH) % config.vocab_size
        # Two steps of a spectrum become one position.
        shape = (_ROWS, config.num_mel_bins, 2 * config.max_source_positions)
        return {main: torch.zeros(shape), "decoder_input_ids": ids_BS}
    if main == "pixel_values" and _says(config, *_OF_IMAGES):
        side = config.image_size
        height, width = (side, side) if isinstance(side, int) else side
        return {main: torch.zeros(_ROWS, config.num_channels, height, width)}
    return None


# What an input is made by; networks of convolutions, of images of any size, do not say one.
_OF_SPECTRA = ("max_source_positions", "num_mel_bins", "vocab_size")
_OF_IMAGES = ("image_size", "num_channels")


def _says(config: Any, *names: str) -> bool:
    return all(getattr(config, name, None) is not None for name in names)


def _vocabulary(model: nn.Module) -> int | None:
    """Return how many ids there are; None where a model of something else takes none."""
    try:
        embed = cast("Any", model).get_input_embeddings()
    except NotImplementedError:
        return getattr(cast("Any", model).config, "vocab_size", None)
    weight = getattr(embed, "weight", None)
    if embed is not None and weight is None:
        return None
    return 2 if weight is None else math.prod(weight.shape[:1])
