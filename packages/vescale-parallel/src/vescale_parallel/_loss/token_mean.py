"""The loss of one device, although every rank sees a shard of the batch.

A rank's batch, or micro-batch, is one of R equal parts of the global batch. Gradients are
averaged over the parts, which is one device's gradient if the loss is a mean over equally
many items. A mean over counted tokens is not: parts may count different numbers. While a
module runs, :class:`TokenMeans` therefore divides such sums by the global count instead. How it
hears of them is in [Note: where losses are seen]; of means that code writes out itself it is said
in [Note: ratios of sums].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_dtensor import DTensor
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._torch_private import (
    FakeTensor,
    current_function_mode,
    functorch,
    outside_of_transforms,
)

from . import kernels
from .inputs_of_means import InputsOfMeans
from .repeated import Around, run_again_within
from .sum_ratios import SumRatios
from .totals import Counted, Total

# Divides by the number of counted targets, or by the sum of their weights.
_COUNTED = {F.cross_entropy, F.nll_loss}
_MEAN_REDUCTION, _SUM_REDUCTION = 1, 2  # of at::Reduction

# Given the number of a count within the module's forward and what this part counts, returns the
# count of the global batch.
Denominator = Callable[[int, Tensor], Tensor]


class TokenMeans(TorchFunctionMode):
    """Replaces local token means so that their average over ranks is the global mean.

    Args:
        num_parts: Parts as large as this one that the global batch is in.
        denominator: Returns counts of the global batch.
        ratios: Sees which ratios of sums are such means, outside of blocks; None: none is.

    Attributes:
        means: What it returned, in order.
    """

    def __init__(
        self, num_parts: float, denominator: Denominator, ratios: SumRatios | None = None
    ) -> None:
        super().__init__()
        self._num_parts = num_parts
        self._denominator = denominator
        self._ratios = ratios
        self.means: list[Tensor] = []
        self._wholes: list[Tensor] = []
        # A model that is called in this one counts its own.
        self._outer: TokenMeans | None = None
        self._is_covered = False
        self._left_at: nn.Module | None = None
        self._block: nn.Module | None = None  # that runs

    def __enter__(self) -> TokenMeans:
        self._outer = kernels.innermost()
        if self._outer is not None:
            self._outer._is_covered = True
        kernels.begin(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        kernels.end()
        if self._outer is not None:
            self._outer._is_covered = False
        if self._left_at is None:
            super().__exit__(*raised)
        if self._ratios is not None:
            self._ratios.end()
        self._outer = self._left_at = self._block = None

    def leave(self, block: nn.Module) -> None:
        """Cost nothing while a block runs; :meth:`of_kernel` hears of what it computes."""
        self._block = block if self._block is None else self._block
        if self._left_at is None and current_function_mode() is self:
            super().__exit__(None, None, None)
            self._left_at = block

    def come_back(self, block: nn.Module) -> None:
        """Go on behind a block."""
        self._block = None if self._block is block else self._block
        if self._left_at is block:
            self._left_at = None
            super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        ratios = self._ratios
        is_outside = self._block is None and not self._is_covered
        # What is compiled is in blocks.
        if ratios is None or not is_outside or torch.compiler.is_compiling():
            return self._of_targets(func, args, given)
        before = ratios.num_seen
        counted = ratios.counted(func, args, given)
        if ratios.num_seen > before:
            self._note_region(functools.partial(ratios.since, before))
        if counted is None:
            result = self._of_targets(func, args, given)
        else:
            result = self._of_sums(counted)
        ratios.note(func, args, given, result)
        return result

    def _of_targets(
        self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
    ) -> Any:
        if func not in _COUNTED or self._is_covered or TokenMean.is_old(given):
            return func(*args, **given)
        counted = _counted(func, args, given)
        if counted is None or isinstance(counted, DTensor):
            # Distributed targets are those of the global batch.
            return func(*args, **given)
        self._note_region(None if self._ratios is None else self._ratios.since)
        return self._mean(counted, func(*args, **{**given, "reduction": "sum"}))

    def of_kernel(
        self,
        kernel: Callable[..., Tensor],
        given: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore_index: int,
        *more: Any,
    ) -> Tensor:
        """Compute what no mode saw."""
        is_mean = reduction == _MEAN_REDUCTION and not target.is_floating_point()
        if not is_mean or isinstance(target, DTensor) or is_mapped(target):
            return kernel(given, target, weight, reduction, ignore_index, *more)
        if isinstance(target, FakeTensor):
            raise ValueError(
                "torch.compile compiles a function that computes a mean over targets, within a "
                "block of a parallelized model, where the number of targets of all ranks is not "
                "known to it. Compile the block, block.compile(), or leave out the function"
            )
        self._note_region(None, is_in_block=True)
        counted = TokenMean(given, target, weight, ignore_index=ignore_index).counted().detach()
        return self._mean(
            counted, kernel(given, target, weight, _SUM_REDUCTION, ignore_index, *more)
        )

    def _note_region(
        self, ratios_since: Callable[[], SumRatios] | None, *, is_in_block: bool = False
    ) -> None:
        """Have code that runs now and again in backward count then as it does from now on.

        It does not hold what has a graph, which holds the code.
        """
        if torch.compiler.is_compiling():
            return
        num_parts, wholes, start = self._num_parts, self._wholes, len(self._wholes)

        def around() -> Around:
            ratios = None if ratios_since is None else ratios_since()

            def again() -> contextlib.AbstractContextManager[Any]:
                as_before = None if ratios is None else ratios.since()
                means = TokenMeans(num_parts, lambda index, _: wholes[start + index], as_before)
                return kernels.heard(means) if is_in_block else means

            return again

        run_again_within(around)

    def _of_sums(self, counted: Counted) -> Tensor:
        """Divide by what all parts together have."""
        counts = {each: self._count_of_all(each.counted()) for each in counted.sums()}
        result = counted.result(counts, self._num_parts)
        if counted.is_mean:
            self.means.append(result)
        return result

    def _count_of_all(self, counted: Tensor) -> Tensor:
        with _outside():
            whole = self._denominator(len(self._wholes), counted)
        self._wholes.append(whole)
        return whole

    def _mean(self, counted: Tensor, local: Tensor) -> Tensor:
        whole = self._count_of_all(counted)
        # A sum of nothing over a count of zero is nan here exactly when it is on one device.
        mean = local * self._num_parts / whole.to(local.dtype)
        self.means.append(mean)
        return mean

    def check_complete(self) -> None:
        """Raise if a forward computed fewer means than it is known of."""
        if self._ratios is not None:
            self._ratios.check_complete()

    def warn_of_sums(self, loss: Tensor) -> None:
        """Warn if a loss is, or contains, a sum that no mean is known to have come from."""
        sums = _sums_in(loss, {mean.grad_fn for mean in self.means})
        if sums:
            warn_at_user_line(
                f"the loss contains a sum over the batch ({sums[0]}). This rank sums over its "
                f"rows, one of {round(self._num_parts)} shards, and gradients are averaged over "
                "shards: that is one device's gradient if the sum is divided by a number of items "
                "that is the same in every shard, and not otherwise. F.cross_entropy and "
                "F.nll_loss with reduction='mean' count over all shards.",
            )


# Backward nodes of what a scalar loss is put together with from other scalars.
_SCALAR_NODES = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Alias", "View", "Squeeze", "Clone")
# A scalar that was distributed over tensor-parallel ranks (vocab_parallel.Returned), or over
# those that share a sequence (sliced.tensor.SumOverSlices).
_RETURNED = ("Returned", "SumOverSlices")


def _sums_in(loss: Tensor, trusted: set[Any]) -> list[str]:
    """Return the names of the sums that a scalar loss is put together from."""
    found: list[str] = []
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen or node in trusted:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith("Sum") or getattr(node, "_saved_reduction", None) == _SUM_REDUCTION:
            found.append(name)
        elif name.startswith((*_SCALAR_NODES, *_RETURNED)):
            todo += [following for following, _ in node.next_functions]
    return found


class TokenCounts(TorchFunctionMode):
    """Notes what token means would count, without computing them.

    Attributes:
        counts: The count of every mean so far.
    """

    def __init__(self, ratios: SumRatios | None = None) -> None:
        super().__init__()
        self.counts: list[Tensor] = []
        self._ratios = ratios

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        counted = _counted(func, args, given)
        if counted is not None:
            self.counts.append(counted)
            return args[0].new_zeros(()) if args else torch.zeros(())
        if self._ratios is None:
            return func(*args, **given)
        if (divided := self._ratios.counted(func, args, given)) is not None:
            for each in divided.sums():
                self.note_sum(each)
        result = func(*args, **given)
        self._ratios.note(func, args, given, result)
        return result

    def note_sum(self, divisor: Total) -> None:
        """Note a sum that divides, or what has to be summed to be one."""
        self.counts.append(divisor.counted())


def _counted(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return how much a call counts, None if it is no token mean."""
    mean = token_mean_of(func, args, kwargs)
    return None if mean is None else mean.counted().detach()


def token_mean_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TokenMean | None:
    """Return the mean over targets that a call computes, None if it is no such call."""
    if func not in _COUNTED:
        return None
    mean = TokenMean(*args, **kwargs)
    if mean.reduction != "mean" or mean.target.is_floating_point() or is_mapped(mean.target):
        return None
    return mean


def is_mapped(target: Tensor) -> bool:
    """Whether ``torch.vmap`` gives a loss the targets of one row: then it is that row's alone."""
    while not torch.compiler.is_compiling() and functorch.is_functorch_wrapped_tensor(target):
        if functorch.is_batchedtensor(target):
            return True
        target = functorch.get_unwrapped(target)
    return False


class TokenMean:
    """A mean over targets: what of ``F.cross_entropy`` and ``F.nll_loss`` decides its count."""

    def __init__(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        self.input, self.target, self.weight = input, target, weight
        self.ignore_index, self.reduction = ignore_index, reduction
        if size_average is not None or reduce is not None:  # which torch lets go before reduction
            is_summed = reduce is not False
            mean_or_sum = "sum" if size_average is False else "mean"
            self.reduction = mean_or_sum if is_summed else "none"

    @staticmethod
    def is_old(kwargs: Mapping[str, Any]) -> bool:
        """Whether a call's reduction is said in the way of long ago, which its kernel has plain.

        Functions hand on whatever has a default by name.
        """
        return kwargs.get("size_average") is not None or kwargs.get("reduce") is not None

    def counted(self) -> Tensor:
        """Return the number, or summed weight, of the targets that count."""
        with _outside():
            target = _unwrapped(self.target)
            kept = target != self.ignore_index
            if self.weight is None:
                return kept.sum().to(torch.float64)
            return _unwrapped(self.weight).detach()[target[kept]].sum(dtype=torch.float64)


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return what transforms of ``torch.func`` have wrapped, which have mapped none of it."""
    while not torch.compiler.is_compiling() and functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _outside() -> contextlib.AbstractContextManager[None]:
    """Compute as if nothing was transformed; what is compiled knows of no transform."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else outside_of_transforms()


class AverageOverRanks(torch.autograd.Function):
    """Report the mean over ranks, let every rank differentiate its own part."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, loss: Tensor, mean: Callable[[Tensor], Tensor], inputs: InputsOfMeans
    ) -> Tensor:
        ctx.inputs = inputs
        return mean(loss.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.inputs.note_mean(grad)
        return grad, None, None
