"""Calls of experts in lists on several ranks, as [Note: dispatch] has them of stacked ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import all_to_all, profiler_range
from vescale_parallel._torch_private import pytree

from .expert_draws import ExpertDraws
from .experts import MadeDtypes, refuse_whole_batch
from .listed import CallsOf, ListedExperts, PlayedBack, first_pass, num_on_ranks, second_pass
from .load import Counted


class SharesRows(Protocol):
    """Has each rank send its part of rows that code has of the batch of all ranks."""

    def is_whole(self, tree: Any) -> bool:
        """Whether any tensor of a tree is of all ranks."""
        ...

    def on_parts(self) -> AbstractContextManager[None]:
        """Make what runs code on this rank's plain tensors."""
        ...

    def part_of(self, rows: Tensor) -> Tensor:
        """Return this rank's part of rows."""
        ...

    def whole_of(self, made: Tensor, rows: Tensor) -> Tensor:
        """Return what all ranks made of their parts of rows."""
        ...


class ListDispatch:
    """The calls of one module with a list of experts; ranks make them in one order.

    Attributes:
        rows_of_all: Shares out rows of the batch of all ranks; None if there are none.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: ListedExperts,
        group: dist.ProcessGroup,
        counted: Counted,
        draws: ExpertDraws,
    ) -> None:
        self._module, self._forward, self._experts = module, module.forward, experts
        self._group, self._counted, self._draws = group, counted, draws
        self._dtypes = MadeDtypes(experts.fqn, group)
        self._seed: int | None = None
        self._num_on = num_on_ranks(experts.num_experts, group.size())
        modules, rank = experts.modules_of(module), dist.get_rank(group)
        start = sum(self._num_on[:rank])
        self._all = modules
        self._own = modules[start : start + self._num_on[rank]]
        self._run_own = [expert.forward for expert in self._own]
        self._played: PlayedBack | None = None
        self.rows_of_all: SharesRows | None = None

    def install(self) -> None:
        """Take the place of the forward of the module, and of its experts."""

        @functools.wraps(self._forward)
        def run_twice(*args: Any, **kwargs: Any) -> Any:
            of_all = self.rows_of_all
            if of_all is None or not of_all.is_whole((args, kwargs)):
                refuse_whole_batch(self._experts.fqn, (args, kwargs))
                of_all = None
            if self._experts.experts_draw:
                self._seed = self._draws.seed(self._experts.fqn, self._all[0])
            run = self._module, self._forward, self._experts
            noted = first_pass(*run, args, kwargs, self._draws.mark)
            with profiler_range("experts"):
                if of_all is None:
                    returned, played = self._sent(noted.calls, (args, kwargs))
                else:
                    returned, played = self._sent_of_all(noted.calls, of_all)
            self._played = PlayedBack(self._experts.fqn, played)
            try:
                made = second_pass(*run, noted, args, kwargs)
            finally:
                self._played = None
            return _with_backward_of(returned, made)

        self._module.forward = run_twice
        for index, expert in enumerate(self._all):
            expert.forward = functools.partial(self._take, index)

    def _take(self, index: int, rows: Tensor) -> Tensor:
        if self._played is None:
            raise ValueError(
                f"{self._experts.fqn_of(index)!r} was called by another module than "
                f"{self._experts.fqn!r}, or again in backward by a checkpoint within that; with "
                "expert_parallel it has one caller, and a checkpoint is around that"
            )
        return self._played.take(index, rows)

    def _sent(self, calls: CallsOf, given: Any) -> tuple[Tensor, CallsOf]:
        """Return all that came back, and of each call."""
        sent, shapes = self._flat(calls, given)
        returned = self._exchange(sent, shapes)
        return returned, self._calls(returned, shapes)

    def _sent_of_all(self, calls: CallsOf, of_all: SharesRows) -> tuple[Tensor, CallsOf]:
        """Likewise of the batch of all ranks, of which each sends a part of every call's rows."""
        with of_all.on_parts():
            parts = [[of_all.part_of(rows) for rows in of_expert] for of_expert in calls]
            returned, made = self._sent(parts, [])
            whole = [[*map(of_all.whole_of, *each)] for each in zip(made, calls, strict=True)]
        return returned, whole

    def _flat(self, calls: CallsOf, given: Any) -> tuple[Tensor, list[list[torch.Size]]]:
        """Return all rows one after the other, and the shapes of calls."""
        shapes = [[rows.shape for rows in of_expert] for of_expert in calls]
        rows = [each.reshape(-1, each.shape[-1]) for of in calls for each in of]
        if rows:
            return torch.cat(rows), shapes
        # Not a fresh tensor: backward passes through here on all ranks.
        like = next(x for x in pytree.tree_leaves(given) if _is_float(x))
        return like.reshape(-1)[:0].view(0, self._experts.width or like.shape[-1]), shapes

    def _exchange(self, sent: Tensor, shapes: list[list[torch.Size]]) -> Tensor:
        """Send rows to their experts' ranks, and back what is made of them."""
        counts = [sum(shape[:-1].numel() for shape in of) for of in shapes]
        arriving, called = self._told(counts, [*map(bool, shapes)], sent.device)
        there = [sum(part) for part in _split(counts, self._num_on)]
        here = [sum(part) for part in arriving]
        given = all_to_all(sent, self._group, input_splits=there, output_splits=here)
        with self._draws.of_experts(self._seed, dist.get_rank(self._group)):
            made = self._made_here(given, arriving, called)
        return all_to_all(made, self._group, input_splits=here, output_splits=there)

    def _told(
        self, counts: Sequence[int], called: Sequence[bool], device: torch.device
    ) -> tuple[list[list[int]], list[bool]]:
        """Return how many rows of each rank are for each expert of this one, and which any calls.

        One is called with no row by code that does not look, and has gradients of zero on one
        device; one that code passes over has None, by which optimizers pass it over, too.
        """
        own = len(self._own)
        told = torch.tensor(counts, device=device)
        self._counted.add(told)
        # In one message: the lowest bit says whether it is called.
        received = all_to_all(
            told * 2 + torch.tensor(called, device=device),
            self._group,
            input_splits=self._num_on,
            output_splits=[own] * self._group.size(),
        )
        if not own:
            return [[] for _ in self._num_on], []
        of_ranks: list[list[int]] = received.view(-1, own).tolist()
        arriving = [[each // 2 for each in of_rank] for of_rank in of_ranks]
        return arriving, [any(each) for each in zip(*of_ranks, strict=True)]

    def _made_here(
        self, given: Tensor, arriving: list[list[int]], called: Sequence[bool]
    ) -> Tensor:
        """Return what this rank's experts make of the rows that were sent to it."""
        width = self._experts.made_width or given.shape[-1]
        parts = iter(given.split([*itertools.chain.from_iterable(arriving)]))
        rows_of = [*zip(*([next(parts) for _ in self._own] for _ in arriving), strict=True)]
        results, unused = list[Tensor](), list[nn.Parameter]()
        own = zip(self._own, self._run_own, rows_of, called, strict=True)
        for expert, run, rows, is_called in own:
            together = torch.cat(rows)
            if len(together):
                results.append(run(together))
            else:
                results.append(together.reshape(0, width))
                unused += [p for p in expert.parameters() if p.requires_grad and is_called]
        dtype = self._dtypes.of([each for each in results if len(each)], given)
        made = [
            each.to(dtype).split([*map(len, rows)])
            for each, rows in zip(results, rows_of, strict=True)
        ]
        by_rank = [each for of_rank in zip(*made, strict=True) for each in of_rank]
        whole = torch.cat(by_rank) if by_rank else given.reshape(0, width).to(dtype)
        if not torch.is_grad_enabled():
            return whole
        whole = _WithZeros.apply(whole, *unused)
        if whole.requires_grad:
            return whole
        # Backward sends gradients back on all ranks if it does on one.
        return whole.requires_grad_(any(p.requires_grad for p in self._module.parameters()))

    def _calls(self, returned: Tensor, shapes: list[list[torch.Size]]) -> CallsOf:
        """Return what was made of the rows of each call."""
        width = returned.shape[-1]
        parts = iter(returned.split([shape[:-1].numel() for of in shapes for shape in of]))
        return [[next(parts).view(*shape[:-1], width) for shape in of] for of in shapes]


def _split(values: Sequence[int], lengths: Sequence[int]) -> list[Sequence[int]]:
    ends = [*itertools.accumulate(lengths)]
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _with_backward_of(returned: Tensor, made: Any) -> Any:
    """Return what forward made, whose backward passes through the exchange whatever was used."""
    if not returned.requires_grad:
        return made
    leaves, spec = pytree.tree_flatten(made)
    first = next(index for index, leaf in enumerate(leaves) if _is_float(leaf))
    leaves[first] = _WithZeros.apply(leaves[first], returned)
    return pytree.tree_unflatten(leaves, spec)


class _WithZeros(torch.autograd.Function):
    """Returns its first argument; the gradients of the others are zero."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(each.shape, each.dtype) for each in others]
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        # Of plain tensors, though the first one may be distributed.
        others = (torch.zeros(s, dtype=d, device=grad.device) for s, d in ctx.shapes)
        return grad, *others
