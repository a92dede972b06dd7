"""``no_sync``: gradients of several backward passes are added on a rank, then reduced once.

[Note: gradients that are not reduced yet]
They wait in the rows that the reduction sends, in the dtype of the reduction. The sum of a step is
therefore that over a rank's passes first, in their order, and over ranks then. ``.grad`` cannot
show it before that: it has an :class:`UnsyncedGradient`, which raises when it is read. Setting
``.grad``, as ``zero_grad`` does, drops what waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.shape_questions import SHAPE_QUESTIONS
from vescale_parallel._parameters.sharded_parameter import ShardedParameter

from .param_group import ParamGroup
from .public_gradients import refuse_graphs

_ADVICE = (
    "run the last backward() of a step outside of no_sync(), which sums them over ranks, and "
    "clip, unscale and step after it; or drop them by zero_grad()"
)
_NOT_SUMMED = f"gradients were not summed over ranks yet, as no_sync() says: {_ADVICE}"


class UnsyncedGradient(Tensor):
    """What ``.grad`` is while gradients wait on each rank; any use of its values raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SHAPE_QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ValueError(_NOT_SUMMED)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_NOT_SUMMED)  # of distributed tensors

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]: torch has an argument
        return "UnsyncedGradient()"


@dataclass(frozen=True)
class _Hidden:
    """A gradient that waits.

    Attributes:
        shown: What ``.grad`` is.
        before: What it was, and what is added to.
    """

    shown: Any
    before: Any


class UnsyncedGradients:
    """The gradients of passes under ``no_sync``.

    Args:
        param_groups: All of them.

    Attributes:
        num_passes: How many wait.
        used: The parameters of which a gradient waits on this rank.
    """

    def __init__(self, param_groups: Iterable[ParamGroup]) -> None:
        self._param_groups = list(param_groups)
        self._hidden: dict[ShardedParameter, _Hidden] = {}
        # Summed over tensor-parallel ranks first.
        self._partial: dict[ShardedParameter, Tensor] = {}
        self._trained: set[ShardedParameter] = set()
        self.num_passes = 0
        self.used: set[ShardedParameter] = set()

    def keep(self, param_groups: Iterable[ParamGroup]) -> None:
        """Add the gradients of groups that autograd has written to those that wait.

        Raises:
            ValueError: If others of their parameters are trained than in the passes before.
        """
        for param_group in param_groups:
            self._keep(param_group)

    def _keep(self, param_group: ParamGroup) -> None:
        self.used |= param_group.take_used()
        rows = param_group.rows_to_add_to()
        for param in param_group.params:
            plain = param.unsharded
            if plain is None or plain.grad is None or not param.sharded.requires_grad:
                continue
            grad, plain.grad = plain.grad, None
            refuse_graphs(param, grad)
            self.used.add(param)
            if param.partial_over_tp:
                waiting = self._partial.get(param)
                grad = grad.to(rows[param].dtype)
                self._partial[param] = grad if waiting is None else waiting + grad
            else:
                rows[param].add(param, grad.to_dense() if grad.is_sparse else grad)

    def hide(self) -> None:
        """End a pass: ``.grad`` raises from now on."""
        self.num_passes += 1
        self._trained = self._trained_now()
        for param in self.used:
            sharded: Any = param.sharded
            held = self._hidden.get(param)
            if held is None or not isinstance(held.shown, UnsyncedGradient):
                self._hidden[param] = held = _Hidden(_placeholder(sharded), sharded.grad)
            sharded.grad = held.shown

    def open(self) -> None:
        """Show what was there before, for autograd to add to, which does so itself to some."""
        self.look_for_dropped()
        for param, held in self._hidden.items():
            if held.before is not None and held.shown is not held.before:
                self._hidden[param] = _Hidden(held.before, held.before)
                param.sharded.grad = held.before

    def look_for_dropped(self) -> None:
        """Drop what waits of parameters whose ``.grad`` was set."""
        dropped = [p for p, held in self._hidden.items() if p.sharded.grad is not held.shown]
        if not dropped:
            return
        for param in dropped:
            del self._hidden[param]
            self.used.discard(param)
            self._partial.pop(param, None)
        for param_group in self._param_groups:
            rows = param_group.rows_to_add_to()
            for param in dropped:
                if param in rows:
                    rows[param].drop(param)
        if not self._hidden:
            self.num_passes = 0

    def begin_sync(self) -> None:
        """Bring what waits to where this pass adds to it. Every rank must call this."""
        if self.num_passes and self._trained != self._trained_now():
            raise ValueError(
                "parameters were frozen or unfrozen between backward passes that no_sync() adds "
                "up; do so after the step"
            )
        for param_group in self._param_groups if self.num_passes else ():
            rows = param_group.rows_to_add_to()
            grads = {
                param: self._waiting(param, rows[param].dtype)
                for param in rows
                if param.partial_over_tp
            }
            if grads:
                param_group.sum_copies(list(grads), grads, "tp")
            for param, grad in grads.items():
                rows[param].add(param, grad)
        self._partial.clear()

    def end_sync(self) -> set[ShardedParameter]:
        """Show gradients again; return of which parameters some waited."""
        for param, held in self._hidden.items():
            param.sharded.grad = held.before
        used = self.used
        self._hidden, self.used, self.num_passes = {}, set(), 0
        return used

    def refuse(self) -> None:
        """Raise if gradients wait."""
        self.look_for_dropped()
        if self.num_passes:
            raise ValueError(
                f"the gradients of {self.num_passes} backward passes under no_sync() were not "
                f"summed over ranks yet: {_ADVICE}"
            )

    def lose(self) -> None:
        """Drop all that waits, of which a part is lost.

        Raises:
            RuntimeError: If there was some.
        """
        num_passes = self.num_passes
        self._partial.clear()
        self.end_sync()
        if num_passes:
            raise RuntimeError(
                f"a backward pass raised, and what {num_passes} passes under no_sync() had summed "
                "on this rank is lost with it; call zero_grad() and begin the step anew"
            )

    def _waiting(self, param: ShardedParameter, dtype: torch.dtype) -> Tensor:
        assert param.unsharded is not None
        waiting = self._partial.get(param)
        return torch.zeros_like(param.unsharded, dtype=dtype) if waiting is None else waiting

    def _trained_now(self) -> set[ShardedParameter]:
        groups = self._param_groups
        return {param for each in groups for param in each.params if param.sharded.requires_grad}


def scale_gradients(params: Iterable[ShardedParameter], scale: Tensor | None) -> None:
    """Multiply the gradients that a call has computed with that of its loss, in place."""
    for param in params if scale is not None else ():
        if param.unsharded is not None and param.unsharded.grad is not None:
            assert scale is not None
            param.unsharded.grad = param.unsharded.grad * scale.to(param.unsharded.grad.dtype)


def _placeholder(like: Tensor) -> Tensor:
    made = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
    return made.as_subclass(UnsyncedGradient)
