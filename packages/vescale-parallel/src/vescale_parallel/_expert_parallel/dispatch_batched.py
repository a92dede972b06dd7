"""Calls on several ranks of experts that are given as many rows each, as [Note: dispatch]."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import all_to_all, profiler_range

from .expert_draws import ExpertDraws
from .experts import Experts, by_expert, call_counting, laid_out, refuse_whole_batch


class BatchedDispatch:
    """The calls of one module; every rank of the group makes them in one order.

    Ranks tell each other how many rows an expert has of each, and send those of its experts.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: Experts,
        group: dist.ProcessGroup,
        draws: ExpertDraws,
    ) -> None:
        self._module, self._forward, self._experts = module, module.forward, experts
        self._draws = draws
        self._group, self._num_local = group, experts.num_experts // group.size()

    def install(self) -> None:
        """Take the place of the module's forward."""

        @functools.wraps(self._forward)
        def run(*args: Any, **kwargs: Any) -> Tensor:
            refuse_whole_batch(self._experts.fqn, (args, kwargs))
            (rows,) = (*args, *kwargs.values())
            self._experts.check(rows)
            with profiler_range("experts"):
                made = self._run(by_expert(rows, self._experts.num_experts))
            return made.reshape(*rows.shape[:-1], made.shape[-1])

        self._module.forward = run

    def _run(self, rows_ENH: Tensor) -> Tensor:
        ranks, local, (count, num_rows, hidden) = (
            self._group.size(),
            self._num_local,
            rows_ENH.shape,
        )
        told = torch.full((ranks,), num_rows, device=rows_ENH.device)
        of_each = all_to_all(told, self._group).tolist()
        sent, received = [local * num_rows] * ranks, [local * num for num in of_each]
        given = all_to_all(
            rows_ENH.reshape(-1, hidden),
            self._group,
            input_splits=sent,
            output_splits=received,
        )
        together = torch.cat([x.view(local, -1, hidden) for x in given.split(received)], 1)
        seed = self._draws.seed(self._experts.fqn, self._module) if self._experts.draws else None
        with self._draws.of_experts(seed, dist.get_rank(self._group)):
            made = self._made_here(together)
        back = [part.flatten(0, 1) for part in made.split(of_each, 1)]
        returned = all_to_all(
            torch.cat(back), self._group, input_splits=received, output_splits=sent
        )
        return returned.view(count, num_rows, returned.shape[-1])

    def _made_here(self, rows_ENH: Tensor) -> Tensor:
        num_dims = self._experts.num_dims
        assert num_dims is not None
        made = call_counting(
            self._module,
            self._forward,
            self._experts.attributes,
            self._num_local,
            laid_out(rows_ENH, num_dims),
        )
        made = by_expert(made, self._num_local)
        if made.requires_grad or not torch.is_grad_enabled():
            return made
        # Backward sends gradients back on all ranks if it does on one.
        return made.requires_grad_(any(p.requires_grad for p in self._module.parameters()))
