"""Means that code writes out as ratios of sums: ``(losses * mask).sum() / mask.sum()``.

[Note: ratios of sums] Parts of a batch have other masks, so the mean of their ratios is not the
ratio of all rows. It is if each divides its own sum by what all parts together have below: then
it is linear in the sums, as the mean of ``F.cross_entropy`` is that divides by the targets of all
parts. What divides may be made of sums in any way, ``mask.sum().clamp(min=1) + 1e-6``: these sums
are added up, and the functions called again. The same goes for rows that are divided before they
are summed, ``(losses * (mask / mask.sum())).sum()``, and for means over what a mask picks,
``losses[mask].mean()``, which divide by how many it has.

Functions are followed by name, since no graph is there where sums are counted before anything is
computed. A check has to show that rows are not coupled in another way: that parts' sums add up to
that of the whole, for example.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._model.code import writes_to_first
from vescale_parallel._torch_private import pytree

from .scalar_functions import QUOTIENTS
from .totals import (
    Counted,
    Kind,
    MeanOfSelected,
    Ratio,
    Share,
    SumOfShares,
    Total,
    kind_of,
    version_of,
)

_PLAIN_SUMS = {"sum", "nansum", "count_nonzero"}
_PRODUCT_SUMS = {"dot", "vdot", "inner", "einsum", "matmul", "__matmul__", "__rmatmul__"}
_SUMS = _PLAIN_SUMS | _PRODUCT_SUMS
_PICKING = {"__getitem__", "masked_select"}
_ADD_IN_PLACE = {"add_", "__iadd__", "sub_", "__isub__"}
# Means over all elements of what they are given, unless a reduction says otherwise.
_MEAN_LOSSES = {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
}


class SumRatios:
    """Follows sums, while code runs, to see what is divided by them.

    ``are_counted`` says of each such call, in order, whether sums of all parts divide in it; None
    to learn it in a run with gradients: not in a metric that is divided by what modules compute,
    which need not be known before.

    Attributes:
        are_counted: Likewise, of those that were computed if it is learned.
        num_seen: Of such calls, so far.
    """

    def __init__(self, are_counted: Sequence[bool] | None = None) -> None:
        self._learns = are_counted is None
        self.are_counted = list[bool]() if are_counted is None else [*are_counted]
        self._of_batch: dict[int, Tensor] = {}  # what is made of the batch alone
        self.num_seen = 0
        # By the numbers of tensors, which are held so that no other one gets them.
        self._totals: dict[int, Total] = {}
        self._constants: dict[int, Tensor] = {}
        self._zeros: dict[int, Tensor] = {}
        self._selected: dict[int, tuple[Tensor, Total]] = {}
        self._shares: dict[int, Tensor] = {}
        self._written = set[Total]()
        self._latest: Counted | None = None
        # Sums that are differentiated, of code that runs again, which their graphs hold.
        self._before: dict[int, tuple[weakref.ref[Tensor], Kind]] = {}

    def since(self, num_seen: int | None = None) -> SumRatios:
        """Return what sees what runs again as this one from then on; None: from now on."""
        again = SumRatios(())
        again.are_counted = self.are_counted  # that grows where it is learned
        again.num_seen = self.num_seen if num_seen is None else num_seen
        again._constants, again._zeros = {**self._constants}, {**self._zeros}
        again._before = {**self._before}
        for number, total in self._totals.items():
            if total.value.requires_grad:
                again._before[number] = weakref.ref(total.value), total.kind
            else:
                again._totals[number] = total
        for number, (rows, mask) in self._selected.items():
            if not rows.requires_grad:
                again._selected[number] = rows, mask
        again._shares = {number: x for number, x in self._shares.items() if not x.requires_grad}
        return again

    def end(self) -> None:
        """Hold nothing more of a call that is over: what a mask has picked may be large."""
        for held in (self._of_batch, self._totals, self._constants, self._zeros):
            held.clear()
        for held in (self._selected, self._shares, self._before):
            held.clear()
        self._written.clear()
        self._latest = None

    def begin(self, batch: Any) -> None:
        """Learn of a call with these arguments."""
        tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
        self._of_batch = {id(x): x for x in tensors if not x.requires_grad}

    def counted(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Counted | None:
        """Return what a call divides by sums over all parts of a batch, if it does.

        Raises:
            ValueError: If there are more such calls than it is known of.
        """
        found = self._found(func, getattr(func, "__name__", ""), args, kwargs)
        self._latest = None if found is None or not self._is_next_counted(found) else found
        return self._latest

    def check_complete(self) -> None:
        """Raise if code computed fewer means than it is known of.

        Raises:
            ValueError: If it did.
        """
        if self.num_seen < len(self.are_counted):
            raise ValueError(
                f"forward divided by sums {self.num_seen} times outside of blocks, and "
                f"{len(self.are_counted)} times when it was looked at; compute such means "
                "unconditionally"
            )

    def note(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: object,
    ) -> None:
        """Note what a function returned."""
        if self._learns:
            self._note_of_batch([*args, *kwargs.values()], result)
        if not isinstance(result, Tensor):
            return
        given = [*args, *kwargs.values()]
        tensors = [x for x in given if isinstance(x, Tensor)]
        if any(result is x for x in tensors):
            if not writes_to_first(func):
                return  # .double() of what is float64 already
            before = self._written_total(getattr(func, "__name__", ""), args, result)
            if (total := self._totals.pop(id(result), None)) is not None:
                self._written.add(total)  # versions do not tell in inference mode
            self._constants.pop(id(result), None)
            if before is not None:
                self._made(func, [before, *args[1:]], kwargs, result)
            if isinstance(self._latest, Share):
                self._shares[id(result)] = result
        elif result.dim():
            self._note_rows(getattr(func, "__name__", ""), args, tensors, result)
        else:
            self._note_scalar(func, args, kwargs, tensors, result)

    def _found(
        self,
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Counted | None:
        if name in QUOTIENTS and len(args) == 2 and not kwargs:
            return self._divided(func, *args)
        if not args or not isinstance(args[0], Tensor):
            return None
        if name == "sum" and id(args[0]) in self._shares and _is_of_all(args, kwargs):
            return SumOfShares(func, args, kwargs)
        if name == "mean" and _is_of_all(args, kwargs):
            picked = self._picked(args[0])
            return None if picked is None else MeanOfSelected(_summed, args, {}, *picked)
        if func not in _MEAN_LOSSES or len(args) != 2 or kwargs.get("reduction", "mean") != "mean":
            return None
        is_old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
        picked, target = map(self._picked, args)
        if is_old or picked is None or target is None:
            return None
        return MeanOfSelected(func, args, {**kwargs, "reduction": "sum"}, *picked)

    def _picked(self, given: Any) -> tuple[Tensor, Total] | None:
        """Return what a mask has picked, and the mask, unless that was written to since then."""
        picked = self._selected.get(id(given))
        return None if picked is None or picked[1].is_written else picked

    def _divided(self, func: Callable[..., Any], top: Any, divisor: Any) -> Counted | None:
        bottom = self._total_of(divisor)
        if bottom is None or bottom.value.requires_grad or not isinstance(top, Tensor):
            return None
        if any(each.is_written or each in self._written for each in bottom.sums()):
            return None
        if top.dim():
            return Share(func, top, bottom)
        kind = self._kind_of(top)
        return None if kind == "other" else Ratio(func, top, kind, bottom)

    def _kind_of(self, given: Tensor) -> Kind:
        total = self._total_of(given)
        if total is not None:
            return total.kind
        held, kind = self._before.get(id(given), (lambda: None, "other"))
        return kind if held() is given else "other"

    def _is_next_counted(self, found: Counted) -> bool:
        index, self.num_seen = self.num_seen, self.num_seen + 1
        if self._learns:
            sums = found.sums()
            is_of_batch = all(id(each.value) in self._of_batch for each in sums)
            self.are_counted.append(found.is_of_loss or is_of_batch)
        if index < len(self.are_counted):
            return self.are_counted[index]
        raise ValueError(
            "forward divides by sums more often than when it was looked at, "
            f"{len(self.are_counted)} times; compute such means unconditionally"
        )

    def _note_of_batch(self, given: Sequence[Any], result: object) -> None:
        tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
        if tensors and all(id(x) in self._of_batch or id(x) in self._constants for x in tensors):
            made = (x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
            self._of_batch |= {id(x): x for x in made}

    def _note_rows(
        self, name: str, args: Sequence[Any], tensors: Sequence[Tensor], made: Tensor
    ) -> None:
        if isinstance(self._latest, Share) or any(id(x) in self._shares for x in tensors):
            self._shares[id(made)] = made
        if name in _PICKING and (mask := _mask_of(name, args)) is not None:
            self._selected[id(made)] = made, Total.of(mask, "sum")
            return
        picked = [self._selected[id(x)] for x in tensors if id(x) in self._selected]
        if picked and made.shape[:1] == picked[0][0].shape[:1]:
            self._selected[id(made)] = made, picked[0][1]

    def _note_scalar(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        made: Tensor,
    ) -> None:
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves([*args, *kwargs.values()])):
            self._constants[id(made)] = made
            if getattr(func, "__name__", "") == "zeros":
                self._zeros[id(made)] = made
            return
        name, totals = getattr(func, "__name__", ""), [self._total_of(x) for x in tensors]
        pairs = zip(totals, tensors, strict=True)
        if any(totals) and all(x is not None or id(t) in self._constants for x, t in pairs):
            self._made(func, args, kwargs, made)
        elif name in _SUMS or kwargs.get("reduction") == "sum":
            self._take(Total.of(made, "sum"))
        elif name == "mean" and tensors and tensors[0].numel():
            self._take(Total.of(made, "mean", tensors[0].numel()))

    def _made(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Tensor,
    ) -> None:
        """Note what a function made of totals."""
        args, named = [*map(self._known, args)], {k: self._known(x) for k, x in kwargs.items()}
        numbers = [0 if self._is_zero(x) else x for x in args]
        kind = "other" if named else kind_of(getattr(func, "__name__", ""), numbers)
        self._take(Total(made, version_of(made), kind, func=func, args=args, kwargs=named))

    def _is_zero(self, given: Any) -> bool:
        return id(given) in self._zeros and version_of(given) == 0

    def _known(self, given: Any) -> Any:
        """Return the total that an argument is, or the argument."""
        total = self._total_of(given)
        return given if total is None else total

    def _written_total(self, name: str, args: Sequence[Any], written: Tensor) -> Total | None:
        """Return what a tensor was to which a sum of others is added in place."""
        is_added = name in _ADD_IN_PLACE and args[0] is written and len(args) == 2
        total = self._totals.get(id(written)) if is_added else None
        others = (x for x in args[1:] if isinstance(x, Tensor))
        return total if all(self._total_of(x) is not None for x in others) else None

    def _total_of(self, given: Any) -> Total | None:
        if not isinstance(given, Tensor):
            return None
        total = self._totals.get(id(given))
        return None if total is None or total.is_written else total

    def _take(self, total: Total) -> None:
        self._totals[id(total.value)] = total


def ratios_to_count(are_counted: Sequence[bool]) -> SumRatios | None:
    """Return what sees what is divided by sums in a call, None if no loss is."""
    return SumRatios(are_counted) if any(are_counted) else None


def _mask_of(name: str, args: Sequence[Any]) -> Tensor | None:
    """Return the mask by which a call picks items; None if they are not as many as it has."""
    if len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
        return None
    rows, mask = args
    num_dims = mask.dim() if name == "__getitem__" else rows.dim()
    is_of_rows = mask.dtype is torch.bool and mask.dim() > 0
    return mask if is_of_rows and mask.shape == rows.shape[:num_dims] else None


def _is_of_all(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a reduction is over all elements, and to the dtype that they have."""
    return len(args) == 1 and not kwargs


def _summed(rows: Tensor) -> Tensor:
    return rows.sum()
