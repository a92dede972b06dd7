"""Losses that data-parallel ranks may average: sums of means over rows.

The mean of what parts of a batch give is what the whole gives if each part divides by the same
number of items, or if the count is that of all parts (:class:`TokenMeans`), and only additions
and multiplications by numbers come after: plain ones, and what parameters alone give, as weight
decay or the learned weight of a task. A sum (but see :mod:`.divided_sums`), a mean over chosen
items, a product or quotient of two means is that only for some data, so it does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_parallel._cross_replica.borders import MeanOfParts, NotOfParts, Output, Rows
from vescale_parallel._loss.scalar_functions import ADD, KEEP, PRODUCTS, QUOTIENTS, is_plain_number
from vescale_parallel._torch_private import pytree

from .divided_sums import LOSSES, DividedSums
from .lengths import IndexedLengths

_SCALE = PRODUCTS | QUOTIENTS
_JOINED = {"stack", "cat", "concat", "concatenate", "hstack"}
# Of a vector of means.
_REDUCED = {"sum", "mean"}
_CONTRACTED = {"dot", "matmul", "__matmul__", "__rmatmul__"}
# What divide by how many rows there are; F.cross_entropy with probabilities does, too.
_OVER_ROWS = {F.multi_margin_loss, F.multilabel_margin_loss}

# Backward nodes of means over all elements.
_MEANS = ("Mean",)
_MEAN_REDUCTION = 1  # at::Reduction::Mean
# What these return is as long as there are elements of some value.
_OF_UNKNOWN_LENGTH = ("Index", "MaskedSelect", "Take", "Unique", "RepeatInterleave")


def with_means(
    rows: Sequence[Rows | None],
    are_means: Sequence[bool],
    whole: Sequence[Any],
    parts: Sequence[Sequence[Any]],
) -> tuple[Output, ...]:
    """Return where the rows are in outputs, or what numbers are.

    Args:
        rows: Where the rows are.
        are_means: Which outputs of a part are known to be means; of other outputs if not as many.
        whole: What is returned for all rows.
        parts: For equal parts of them; empty leaves numbers without a gradient as they are.
    """
    if len(are_means) != len(rows):
        are_means = (False,) * len(rows)
    found: list[Output] = [
        MeanOfParts() if mean else at for at, mean in zip(rows, are_means, strict=True)
    ]
    for index, number in enumerate(whole) if parts else ():
        of_parts = [part[index] for part in parts if len(part) == len(whole)]
        if is_number(number) and not _is_mean_of(number, of_parts):
            found[index] = NotOfParts()
    return tuple(found)


def is_number(output: Any) -> bool:
    """Whether it is a scalar without a gradient."""
    return isinstance(output, Tensor) and output.dim() == 0 and not output.requires_grad


def _is_mean_of(number: Tensor, parts: Sequence[Any]) -> bool:
    """Whether these rows' number is the mean of what parts of them give."""
    if not parts or not all(map(is_number, parts)):
        return False
    mean = torch.stack([part.to(torch.float64) for part in parts]).mean()
    return torch.allclose(mean, number.to(torch.float64), equal_nan=True)


class MeanTracker(TorchFunctionMode):
    """Tells which scalars are sums of means over rows, while code runs.

    ``token_means`` is filled meanwhile with means that count over all parts; ``given`` are the
    arguments of what runs, ``fixed`` tensors that no row changes: buffers.

    Attributes:
        counts: Numbers by which code has scaled means, and how many scalars it has put together.
    """

    def __init__(
        self, token_means: Sequence[Tensor], given: Any = (), fixed: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self._token_means = token_means
        self.counts: list[float] = []
        self._divides = False
        self._known: dict[int, Tensor] = {}  # held, so that no other tensor gets the number
        self._vectors: dict[int, Tensor] = {}  # of such scalars
        # Made of parameters alone; and what was, until something else was written to it.
        self._fixed = {id(x): x for x in fixed}
        self._written: dict[int, Tensor] = {}
        self._lengths = IndexedLengths(self._is_fixed)
        self._of_rows = _has_values_in_lists(given)
        are_given = self._of_rows or any(map(is_plain_number, pytree.tree_leaves(given)))
        self._sums = DividedSums(self._lengths, are_given=are_given)

    def note(self, mean: Tensor) -> Tensor:
        """Take a scalar for such a one."""
        self._known[id(mean)] = mean
        return mean

    def is_mean(self, value: object) -> bool:
        """Whether a value is such a scalar."""
        return id(value) in self._known

    def may_divide_by_sums(self) -> bool:
        """Whether code has divided by a scalar, or picked items by their values."""
        return self._divides or self._lengths.has_picked

    @contextlib.contextmanager
    def passing_over_reads(self) -> Iterator[None]:
        """Take what is read within this for no choice of the code that runs: a check compares."""
        has_read = self._lengths.has_read
        try:
            yield
        finally:
            self._lengths.has_read = has_read

    def counts_as(self, whole: MeanTracker) -> bool:
        """Whether no number of rows that values decide may be in a mean; ``whole`` saw all rows.

        Python that has read a label, or was given one, may leave its row out, and divide by how
        many are left.
        """
        chooses = self._of_rows or self._lengths.has_read or whole._lengths.has_read
        return self.counts == whole.counts or not chooses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        tensors = _tensors_in([*args, *(kwargs or {}).values()])
        is_fixed = bool(tensors) and all(map(self._is_fixed, tensors))
        is_linear = bool(tensors) and self._is_linear(name, args, tensors)
        result = func(*args, **(kwargs or {}))
        self._lengths.note(name, args, tensors, result)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        self._divides |= name in QUOTIENTS and len(tensors) == 2 and not tensors[-1].dim()
        if name in _JOINED and not any(x.dim() for x in tensors):
            self.counts.append(len(tensors))
        if any(result is tensor for tensor in tensors):
            self._known.pop(id(result), None)
            if not is_fixed:
                self._written[id(result)] = result
        is_divided = self._sums.note(name, args, tensors, result)
        is_divided = is_divided and not self._is_by_values(result.grad_fn)
        if is_fixed or (not tensors and self._is_constant()):
            self._fixed[id(result)] = result
        elif is_linear and result.dim():
            self._vectors[id(result)] = result
        elif (
            is_divided
            or is_linear
            or self._is_new_mean(result)
            or self._is_batch_mean(func, args, kwargs, result)
        ):
            self.note(result)
        return result

    def _is_constant(self) -> bool:
        """Whether what is made of no tensor is of no row: Python has not read any."""
        return not (self._lengths.has_read or self._of_rows)

    def _is_fixed(self, value: Tensor) -> bool:
        is_made = isinstance(value, nn.Parameter) or id(value) in self._fixed
        return is_made and id(value) not in self._written

    def _is_new_mean(self, result: Tensor) -> bool:
        if result.dim():
            return False
        if any(result is mean for mean in self._token_means[-1:]):
            return True
        node = result.grad_fn
        return node is not None and _is_mean(node, node.name()) and not self._is_by_values(node)

    def _is_batch_mean(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> bool:
        """Whether a loss was divided by its first dim; a run shows if rows are there."""
        how = (kwargs or {}).get("reduction", "mean")
        target = args[1] if len(args) > 1 else (kwargs or {}).get("target")
        is_soft = isinstance(target, Tensor) and target.is_floating_point()
        is_over_rows = func in _OVER_ROWS or (func is F.cross_entropy and is_soft)
        if not (how == "mean" and is_over_rows) and not (how == "batchmean" and func is F.kl_div):
            return False
        return result.grad_fn is not None and not self._is_by_values(result.grad_fn)

    def _is_by_values(self, node: Any) -> bool:
        """Whether a mean may be over as many elements as have some value."""
        todo, seen = [node], {node}
        while todo:
            for following, _ in todo.pop().next_functions:
                if following is None or following in seen:
                    continue
                is_indexed = following.name().startswith(_OF_UNKNOWN_LENGTH)
                if is_indexed and not self._lengths.is_by_shape(following):
                    return True
                seen.add(following)
                todo.append(following)
        return False

    def _is_linear(self, name: str, args: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
        """Whether a function makes such scalars, or a vector of them, of such ones."""
        means = [x for x in tensors if self.is_mean(x) or id(x) in self._vectors]
        if not means or not all(
            self.is_mean(x) or id(x) in self._vectors or self._is_fixed(x) for x in tensors
        ):
            return False
        if name in _SCALE:
            self.counts += [x for x in args if isinstance(x, int | float)]
            return len(means) == 1 and (means[0] is args[0] or name in PRODUCTS)
        if name in _REDUCED or name == "__getitem__":
            is_all = all(x is None or isinstance(x, int | slice) for x in args[1:])
            return len(tensors) == 1 and is_all
        if name in _CONTRACTED:
            return len(means) == 1
        return name in ADD or name in KEEP or name in _JOINED


def _has_values_in_lists(given: Any) -> bool:
    """Whether lists or dicts that are arguments hold plain values: one of each row, perhaps."""
    args, kwargs = given or ((), {})
    held = [x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple | dict)]
    return not all(x is None or isinstance(x, Tensor) for x in pytree.tree_leaves(held))


def _tensors_in(arguments: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in arguments:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):  # of few operators, and slower
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _is_mean(node: Any, name: str) -> bool:
    is_loss = name.startswith(LOSSES) and getattr(node, "_saved_reduction", 0) == _MEAN_REDUCTION
    return name.startswith(_MEANS) or is_loss
