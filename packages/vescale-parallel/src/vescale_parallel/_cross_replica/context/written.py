"""Buffers and attributes that modules write in blocks, of all positions and not of a slice.

[Note: writes on slices] A mixture of experts counts its tokens in a buffer, by which a loop
corrects the router's bias; a layer keeps its loss or its scores in an attribute. On a slice these
are of its positions. Where the model is compared with one device it is seen what a module writes
and of what values of ranks one device's is made: their sum, on top of what was there or in its
place, their mean by numbers of positions, or all of them one behind the other. Behind every
forward of that module ranks exchange what they wrote, and write that. What is made in no such way,
as batch statistics with a variance, is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vescale_parallel._model.fqns import generalize
from vescale_parallel._torch_private import is_in_backward, left_out

from .leaving import gathered_part
from .sliced.tensor import SumOverSlices
from .slices import ContextRanks, SequenceSlices

_WHY = "what it writes is made whole, of all ranks that share the sequence"

# A module, by the pattern of its FQN, and the name of what it holds.
Place = tuple[str, str]
How = Literal["added", "sum", "mean", "gathered"]


@dataclass(frozen=True)
class Combination:
    """How one device's value is made of those that ranks wrote.

    Attributes:
        how: ``added`` sums what ranks added to the value before; ``sum`` and ``mean`` are of
            their values, by numbers of positions; ``gathered`` are parts of a sequence.
        dim: The one along the sequence, of what is gathered.
        is_folded: Whether the sequence is within that, as in (batch * sequence).
    """

    how: How
    dim: int = 0
    is_folded: bool = False

    def whole(
        self,
        before: Tensor | None,
        after: Tensor,
        slices: SequenceSlices,
        ranks: ContextRanks,
        fqn: str,
    ) -> Tensor:
        """Return one device's value. Every rank must call this."""
        if self.how == "gathered":
            return gathered_part(after, self.dim, self.is_folded, slices, ranks, fqn)
        if self.how == "sum":
            return _summed(after.clone(), ranks)  # others may read it while it is written to
        if self.how == "mean":
            return _summed(after * (slices.sizes[ranks.rank] / slices.length), ranks)
        begin = torch.zeros_like(after) if before is None else before
        return begin + _summed(after - begin, ranks)


# What modules write, and the slices of a call, while it runs.
Now = Callable[[], tuple[Mapping[Place, Combination], SequenceSlices]]


def _summed(x: Tensor, ranks: ContextRanks) -> Tensor:
    if x.is_floating_point():
        return SumOverSlices.apply(x, ranks, False)  # pyright: ignore[reportReturnType]: torch's own stub
    return ranks.all_gather(x[None], 0, [1] * ranks.size).sum(0, dtype=x.dtype)


class WholeWrites:
    """Has modules leave what one device writes; see [Note: writes on slices]."""

    def __init__(self, ranks: ContextRanks) -> None:
        self._ranks = ranks
        self._watched = set[str]()

    def watch(self, model: nn.Module, written: Collection[Place], now: Now) -> None:
        """Wrap the modules that write, in place; ``now`` returns what holds for a call."""
        patterns = {pattern for pattern, _ in written}
        for fqn, module in model.named_modules() if patterns else ():
            if generalize(fqn) in patterns and fqn not in self._watched:
                self._watched.add(fqn)
                run = self._around(module, fqn, now)
                module.forward = left_out(run, _WHY)

    def _around(self, module: nn.Module, fqn: str, now: Now) -> Callable[..., Any]:
        forward, own = module.forward, generalize(fqn)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            of_all = sorted(now()[0].items(), key=lambda each: each[0])
            combinations = {name: combination for (at, name), combination in of_all if at == own}
            held = {name: held_by(module, name) for name in combinations}
            before = {name: None if x is None else x.clone() for name, x in held.items()}
            end = functools.partial(self._make_whole, module, fqn, now, combinations, held, before)
            if is_in_backward():
                # A checkpoint stops, on all ranks at the same place, once it has what it needs.
                with contextlib.ExitStack() as ends:
                    ends.callback(end, again=True)
                    return forward(*args, **kwargs)
            output = forward(*args, **kwargs)
            end()
            return output

        return run

    def _make_whole(
        self,
        module: nn.Module,
        fqn: str,
        now: Now,
        combinations: Mapping[str, Combination],
        held: Mapping[str, Tensor | None],
        before: Mapping[str, Tensor | None],
        *,
        again: bool = False,
    ) -> None:
        for name, combination in combinations.items():
            if again and name not in module._buffers:
                setattr(module, name, held[name])  # of the first run, and whole
                continue
            after = held_by(module, name)
            # A tensor of the call before is whole already.
            is_old = combination.how == "gathered" and after is held[name]
            if after is not None and not is_old:
                value = combination.whole(before[name], after, now()[1], self._ranks, fqn)
                write(module, name, value)


def held_by(module: nn.Module, name: str) -> Tensor | None:
    """Return the buffer or the attribute of a module, None if it is no tensor."""
    found = module._buffers.get(name, vars(module).get(name))
    return found if isinstance(found, Tensor) else None


def write(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module another value of a buffer or an attribute, the buffer in its place."""
    buffer = module._buffers.get(name)
    if buffer is None or value.requires_grad or buffer.shape != value.shape:
        setattr(module, name, value)
    else:
        # Not counted as a write: what backward kept of the buffer is what one device has there.
        buffer.data.copy_(value)
