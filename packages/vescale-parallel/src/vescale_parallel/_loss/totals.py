"""Scalars that sum what the rows of a batch have, as code makes them from masks and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .scalar_functions import ADD, KEEP, PRODUCTS, QUOTIENTS, is_plain_number

Kind = Literal["sum", "mean", "other"]

_IN_PLACE = {"div_", "__itruediv__"}


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; of inference mode, which does not tell, 0."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class Total:
    """A scalar that sums all elements of a tensor, or that is made of such ones.

    Attributes:
        value: The scalar, or what has to be summed to be it.
        version: Of it when it was made.
        kind: Of which sums it is linear; of a mean each part has its own number of items.
        num_items: What a mean over elements divided by.
        func: What made it of other totals, None of tensors.
        args: Of the function, with totals in the places of their values.
        kwargs: Likewise.
    """

    value: Tensor
    version: int
    kind: Kind
    num_items: int = 1
    func: Callable[..., Any] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, value: Tensor, kind: Kind, num_items: int = 1) -> Total:
        """Return what sums all elements of tensors, or what has to be summed."""
        return cls(value, version_of(value), kind, num_items)

    @property
    def is_written(self) -> bool:
        """Whether its value was written to since then."""
        return version_of(self.value) != self.version

    def sums(self) -> list[Total]:
        """Return those that it is made of and that sum tensors, each once."""
        if self.func is None:
            return [self]
        given = (x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Total))
        return [*dict.fromkeys(each for x in given for each in x.sums())]

    def counted(self) -> Tensor:
        """Return what a part adds to the sum of all parts, in float64."""
        return self.value.detach().sum(dtype=torch.float64) * self.num_items

    def of_all_parts(self, counts: Mapping[Total, Tensor], num_parts: float) -> Tensor:
        """Return what it is if each of its sums is one over all parts, as ``counts`` says."""
        if self.func is None:
            divisor = self.num_items * num_parts if self.kind == "mean" else 1
            return (counts[self] / divisor).to(self.value.device, self.value.dtype)

        def whole(given: Any) -> Any:
            return given.of_all_parts(counts, num_parts) if isinstance(given, Total) else given

        kwargs = {name: whole(given) for name, given in self.kwargs.items()}
        return self.func(*map(whole, self.args), **kwargs)


def kind_of(name: str, args: Sequence[Any]) -> Kind:
    """Return of what sums a function's result is linear, given what it is called with."""
    totals = [x for x in args if isinstance(x, Total)]
    if not totals or any(x.kind != totals[0].kind for x in totals):
        return "other"
    rest = [x for x in args if not isinstance(x, Total)]
    is_scaled = len(rest) == 1 and is_plain_number(rest[0])
    is_sum = name in ADD and all(is_plain_number(x) and x == 0 for x in rest)
    is_quotient = name in QUOTIENTS and is_scaled and isinstance(args[0], Total)
    is_linear = is_sum or is_quotient or (name in PRODUCTS and is_scaled) or name in KEEP
    return totals[0].kind if is_linear else "other"


@dataclass(frozen=True)
class Ratio:
    """A linear sum of what is differentiated, divided by another sum."""

    func: Callable[..., Any]
    top: Tensor
    kind: Kind
    bottom: Total

    is_mean = True

    @property
    def is_of_loss(self) -> bool:
        return self.top.requires_grad

    def sums(self) -> Sequence[Total]:
        """Return what is counted."""
        return self.bottom.sums()

    def result(self, counts: Mapping[Total, Tensor], num_parts: float) -> Tensor:
        """Return what averages over parts to that of all rows; it may be written in place."""
        parts = num_parts if self.kind == "sum" else 1
        is_in_place = getattr(self.func, "__name__", "") in _IN_PLACE
        top = self.top.mul_(parts) if is_in_place else self.top * parts
        return self.func(top, self.bottom.of_all_parts(counts, num_parts))


@dataclass(frozen=True)
class Share:
    """A tensor of rows, divided by a sum over all of them."""

    func: Callable[..., Any]
    rows: Tensor
    bottom: Total

    is_mean, is_of_loss = False, True

    def sums(self) -> Sequence[Total]:
        """Return what is counted."""
        return self.bottom.sums()

    def result(self, counts: Mapping[Total, Tensor], num_parts: float) -> Tensor:
        """Return the rows of what one device has."""
        return self.func(self.rows, self.bottom.of_all_parts(counts, num_parts))


@dataclass(frozen=True)
class SumOfShares:
    """A sum of what was divided by a sum over all rows."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    is_mean, is_of_loss = True, True

    def sums(self) -> Sequence[Total]:
        """Return nothing: it was counted where it was divided."""
        return ()

    def result(self, counts: Mapping[Total, Tensor], num_parts: float) -> Tensor:
        """Return what averages over parts to that of all rows."""
        return self.func(*self.args, **self.kwargs) * num_parts


@dataclass(frozen=True)
class MeanOfSelected:
    """A mean over the items of a tensor that a mask picks.

    Attributes:
        func: Computes it, or, with a reduction, its sum.
        args: Of the function.
        kwargs: Likewise, for a sum.
        selected: What was picked, and what was made of that.
        mask: Where items were.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    selected: Tensor
    mask: Total

    is_mean = True

    @property
    def is_of_loss(self) -> bool:
        return any(isinstance(x, Tensor) and x.requires_grad for x in self.args)

    def sums(self) -> Sequence[Total]:
        """Return what is counted."""
        return [self.mask]

    def result(self, counts: Mapping[Total, Tensor], num_parts: float) -> Tensor:
        """Return what averages over parts to that of all rows."""
        per_item = self.selected.shape[1:].numel()
        total = self.func(*self.args, **self.kwargs)
        return total * num_parts / (counts[self.mask].to(total.device, total.dtype) * per_item)


Counted = Ratio | Share | SumOfShares | MeanOfSelected
