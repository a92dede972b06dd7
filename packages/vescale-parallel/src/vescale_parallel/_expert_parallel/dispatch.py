"""Calls of experts on several ranks: tokens are sent to the experts, and what they make back.

[Note: dispatch] Nothing is dropped. Pairs of a token and an expert are sorted by expert, so that
each rank is sent consecutive rows. Ranks tell each other once how many rows every expert gets,
which is all that the host waits for, and says which expert a row is for. The module's own forward
runs on what arrived with this rank's experts, each row with weight one. Rows come back the same
way, and are weighted and summed where their token is. So ``top_k`` rows a token are sent there
and back, less those of experts of the token's own rank; backward sends as much.

A rank to which nothing was sent runs nothing, and takes part in every exchange.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import all_to_all, profiler_range
from vescale_parallel._mesh.mesh import second_group
from vescale_parallel._model.code import refuse_one_graph
from vescale_parallel._torch_private import left_out

from .adapters import settle_adapters, slice_adapters
from .dispatch_batched import BatchedDispatch
from .dispatch_listed import ListDispatch
from .expert_draws import ExpertDraws
from .experts import (
    Experts,
    MadeDtypes,
    bound,
    call_some,
    combined,
    refuse_whole_batch,
    sorted_by_expert,
)
from .found import FoundExperts
from .load import Counted, Load

# How many rows are sent is known from values, for which a graph would break again and again.
_LEFT_OUT = "tokens are sent to experts of other ranks"


def dispatch(
    model: nn.Module,
    found: FoundExperts,
    mesh: DeviceMesh,
    draws: ExpertDraws,
) -> list[ListDispatch]:
    """Have modules that hold this rank's experts be called with tokens of all ranks, in place.

    Returns what calls experts in lists.
    """
    settle_adapters(model)
    if not (found.stacked or found.listed):
        return []
    group = second_group(mesh, "ep")
    # Experts that all have as many rows have a load that says nothing.
    rows_of = [each for each in found.stacked if each.num_dims is None]
    counted = {each.fqn: Counted(each.num_experts) for each in (*rows_of, *found.listed)}
    lists = [
        ListDispatch(model.get_submodule(each.fqn), each, group, counted[each.fqn], draws)
        for each in found.listed
    ]
    for each in lists:
        each.install()
    for experts in found.stacked:
        module = model.get_submodule(experts.fqn)
        slice_adapters(model, experts, dist.get_rank(group), group.size())
        if experts.num_dims is not None:
            BatchedDispatch(module, experts, group, draws).install()
            continue
        _Dispatch(module, experts, group, counted[experts.fqn], draws).install()
    fqns = [experts.fqn for experts in (*found.listed, *found.stacked)]
    for fqn in fqns:
        module = model.get_submodule(fqn)
        module.forward = left_out(module.forward, _LEFT_OUT)
    model.register_forward_pre_hook(lambda of, _: refuse_one_graph(of, fqns, _LEFT_OUT))
    object.__setattr__(model, "_vescale_expert_load", Load(counted, mesh))
    return lists


class _Dispatch:
    """The calls of one module; every rank of the group makes them in one order."""

    def __init__(
        self,
        module: nn.Module,
        experts: Experts,
        group: dist.ProcessGroup,
        counted: Counted,
        draws: ExpertDraws,
    ) -> None:
        self._module, self._forward, self._experts = module, module.forward, experts
        self._counted, self._draws = counted, draws
        self._dtypes = MadeDtypes(experts.fqn, group)
        self._group, self._num_ranks = group, group.size()
        self._num_local = experts.num_experts // self._num_ranks

    def install(self) -> None:
        """Take the place of the module's forward."""

        @functools.wraps(self._forward)
        def run(*args: Any, **kwargs: Any) -> Tensor:
            refuse_whole_batch(self._experts.fqn, (args, kwargs))
            rows, index, weights = bound(self._forward, args, kwargs)
            with profiler_range("experts"):
                rows_TH = rows.reshape(-1, rows.shape[-1])
                index_TK = index.reshape(-1, index.shape[-1])
                made = self._run(rows_TH, index_TK, self._weights(rows, index_TK, weights))
            return made.view(rows.shape)

        self._module.forward = run

    def _weights(self, rows: Tensor, index_TK: Tensor, weights: Tensor) -> Tensor:
        """Return the weights of the experts of each row, (tokens, k)."""
        if not self._experts.weighs_all:
            return weights.reshape(index_TK.shape)
        if rows.dim() != 3:  # seen with a batch of them alone: others may come back reshaped
            raise ValueError(
                f"expected rows (batch, tokens, hidden) with expert_parallel, as "
                f"{self._experts.fqn!r} takes them, got shape {tuple(rows.shape)}"
            )
        return weights.reshape(len(index_TK), self._experts.num_experts).gather(1, index_TK)

    def _run(self, rows_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_pairs, num_slots = index_TK.numel(), index_TK.shape[-1]
        order, counts = sorted_by_expert(index_TK, self._experts.num_experts)
        self._counted.add(counts)
        arriving = all_to_all(counts, self._group)
        told = torch.stack([counts, arriving]).view(2, self._num_ranks, -1).sum(-1).tolist()
        sent, received = told
        if sum(sent) != num_pairs:
            raise ValueError(self._refusal(index_TK))
        there = {"input_splits": sent, "output_splits": received}
        back = {"input_splits": received, "output_splits": sent}
        given = all_to_all(rows_TH[order // num_slots], self._group, **there)
        seed = self._draws.seed(self._experts.fqn, self._module) if self._experts.draws else None
        with self._draws.of_experts(seed, dist.get_rank(self._group)):
            made = self._made_here(given, arriving)
        returned = all_to_all(made, self._group, **back)
        place = torch.empty_like(order)
        place[order] = torch.arange(num_pairs, device=order.device)
        rows_TKH = returned[place].view(*index_TK.shape, -1)
        return combined(rows_TKH, index_TK, weights_TK, self._experts.combination)

    def _made_here(self, given: Tensor, arriving: Tensor) -> Tensor:
        """Return what this rank's experts make of the rows that were sent to it."""
        made = [given.clone()]
        if len(given):
            own = torch.arange(self._num_local, device=given.device).repeat(self._num_ranks)
            experts = own.repeat_interleave(arriving, output_size=len(given))
            made[0] = call_some(
                self._module,
                self._forward,
                self._experts.attributes,
                self._num_local,
                given,
                experts,
                weighs_all=self._experts.weighs_all,
            )
        made = made[0].to(self._dtypes.of(made if len(given) else [], given))
        if made.requires_grad or not torch.is_grad_enabled():
            return made
        # Backward sends gradients back on all ranks if it does on one.
        trained = any(p.requires_grad for p in self._module.parameters())
        return made.requires_grad_(trained)

    def _refusal(self, index: Tensor) -> str:
        num_experts = self._experts.num_experts
        return (
            f"{self._experts.fqn!r} was called with experts from {int(index.min())} to "
            f"{int(index.max())}, and has 0 to {num_experts - 1}; with expert_parallel.size "
            f"{self._num_ranks} every row goes to experts that there are"
        )
