"""More silent bugs: of experts, slices of sequences, stages and optimizers.

As those of ``planted_bugs``, and named by a thread of another stack where one was reported there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import SGD

from vescale_parallel._cross_replica.context import blocks, conversions
from vescale_parallel._cross_replica.context.attention import ring
from vescale_parallel._cross_replica.context.attention.ring import Part
from vescale_parallel._cross_replica.context.slices import ContextProcesses
from vescale_parallel._data_parallel.gradient_rows import GradientRows
from vescale_parallel._expert_parallel import dispatch
from vescale_parallel._pipeline.execution.links import Links
from vescale_parallel._pipeline.execution.roots import LossRoots
from vescale_parallel._rng import part_of_whole
from vescale_parallel._tensor_parallel.communicators import ProcessRanks

from .plans import DP, SEQUENCE, TP, ZERO
from .planted_bugs import CP2, DP2, EP2, PP2, ZERO3, Bug, is_in_backward, replaced

RING = {**CP2, "context_parallel.method": "ring"}
SEQUENCE2 = {TP: 2, SEQUENCE: True}


def _ranks_change_places(
    right: Any, ranks: ProcessRanks, x: Tensor, dim: int, length: int
) -> Tensor:
    return right(ranks, x, dim, length).roll(length // ranks.size, dim)


def _part_of_next(right: Any, ranks: ProcessRanks, x: Tensor, dim: int) -> Tensor:
    if is_in_backward():
        x = x.roll(x.shape[dim] // ranks.size, dim)
    return right(ranks, x, dim)


def _to_next_expert(right: Any, index_TK: Tensor, num_experts: int) -> Any:
    return right((index_TK + 1) % num_experts, num_experts)


def _to_other_tokens(right: Any, rows: Tensor, *others: Any) -> Tensor:
    return right(rows.flip(0), *others)


def _slots_change_places(
    right: Any, rows: Tensor, index: Tensor, weights: Tensor, how: Any
) -> Tensor:
    return right(rows, index, weights.flip(-1), how)


def _sum_of_experts(right: Any, rows: GradientRows, row: Tensor, *groups: Any) -> Any:
    mean = yield from right(rows, row, *groups)
    return mean * 2 if groups == (None, None) else mean


def _without_last(right: Any, roots: LossRoots, loss: Tensor, microbatch: int) -> Tensor:
    count = roots.shares if isinstance(roots.shares, int) else len(roots.shares)
    return right(roots, loss, microbatch) * (0 if microbatch == count - 1 else 1)


def _rows_change_places(right: Any, *args: Any) -> Tensor:
    return right(*args) if is_in_backward() else right(*args).flip(0)


def _halved_gradient(right: Any, links: Links, message: Any, *args: Any) -> Tensor:
    received = right(links, message, *args)
    return received / 2 if message.lane.kind == "B" else received


def _no_momentum(
    right: Any, optimizer: SGD, group: Any, params: Any, grads: Any, momenta: list[Any]
) -> bool:
    is_sparse = right(optimizer, group, params, grads, momenta)
    momenta[:] = [None] * len(momenta)
    return is_sparse


def _faster(right: Any, optimizer: SGD, group: Any, *others: Any) -> bool:
    group["lr"] *= dist.get_world_size()
    return right(optimizer, group, *others)


def _not_on_last(
    right: Any, optimizer: SGD, group: Any, params: Any, grads: Any, momenta: list[Any]
) -> bool:
    is_sparse = right(optimizer, group, params, grads, momenta)
    if dist.get_rank() == dist.get_world_size() - 1:
        for each in (params, grads, momenta):
            each.clear()
    return is_sparse


def _not_dropped(right: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _but_first(right: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
    right(list(parameters)[1:], *args, **kwargs)


def _other_mask_again(right: Any, *args: Any, **kwargs: Any) -> Any:
    if is_in_backward():
        torch.rand(1)
    return right(*args, **kwargs)


def _forgetful(right: Any, softmax: Any, *args: Any) -> None:
    softmax._highest.fill_(-torch.inf)
    right(softmax, *args)


def _from_zero(right: Any, query: Tensor, key: Tensor, q_at: Part, k_at: Part, how: Any) -> Tensor:
    at = (Part(part.here, part.here, part.length) for part in (q_at, k_at))
    return right(query, key, *at, how)


def _stays(right: Any, ranks: ContextProcesses, x: Tensor, numel: int) -> Any:
    if not is_in_backward():
        return right(ranks, x, numel)
    right(ranks, x, numel)()
    return lambda: x


def _heads_change_places(right: Any, x: Tensor, *args: Any) -> Tensor:
    sent = right(x, *args)
    return sent if is_in_backward() else sent.flip(-3)


def _first_slice(right: Any, x: Tensor, dim: int, slices: Any, ranks: Any) -> Tensor:
    if x.requires_grad or is_in_backward():
        return right(x, dim, slices, ranks)
    return slices.part(x, dim, 0).contiguous()


BUGS: dict[str, Bug] = {
    "parts of the sequence are gathered in another order": Bug(
        model="llama",
        plan=SEQUENCE2,
        plant=replaced(ProcessRanks, "all_gather", _ranks_change_places),
        what="activation",
        name="layers.0",
    ),
    "a rank gets the gradient of the next one's part of the sequence": Bug(
        model="llama",
        plan=SEQUENCE2,
        plant=replaced(ProcessRanks, "reduce_scatter", _part_of_next),
        what="gradient",
    ),
    "tokens are sent to the next expert": Bug(
        model="mixtral",
        plan=EP2,
        plant=replaced(dispatch, "sorted_by_expert", _to_next_expert),
        what="activation",
        name="experts",
    ),
    "outputs of experts come back to other tokens": Bug(
        model="mixtral",
        plan=EP2,
        plant=replaced(dispatch, "combined", _to_other_tokens),
        what="activation",
        name="experts",
    ),
    "scores of experts change places": Bug(
        model="mixtral",
        plan=EP2,
        plant=replaced(dispatch, "combined", _slots_change_places),
        what="activation",
        name="experts",
    ),
    "gradients of experts are summed where others are averaged": Bug(
        source="NVIDIA/Megatron-LM#906",
        model="mixtral",
        plan=EP2,
        plant=replaced(GradientRows, "_mean_of_copies", _sum_of_experts),
        what="gradient",
        name="experts",
    ),
    "the last micro-batch has no gradient": Bug(
        model="blocks",
        plan=PP2,
        plant=replaced(LossRoots, "_share_of", _without_last),
        what="gradient",
    ),
    "rows change places between stages": Bug(
        model="blocks",
        plan=PP2,
        plant=replaced(Links, "_wait", _rows_change_places),
        what="activation",
        name="blocks.2",
    ),
    "gradients are halved between stages": Bug(
        model="blocks",
        plan=PP2,
        plant=replaced(Links, "_wait", _halved_gradient),
        what="gradient",
    ),
    "an optimizer loses its momentum": Bug(
        model="blocks",
        plan=ZERO3,
        plant=replaced(SGD, "_init_group", _no_momentum),
        what="parameter",
        is_behind_backward=True,
    ),
    "the learning rate is multiplied by the number of ranks": Bug(
        model="blocks",
        plan=DP2,
        plant=replaced(SGD, "_init_group", _faster),
        what="parameter",
        is_behind_backward=True,
    ),
    "a rank does not update its shards": Bug(
        model="blocks",
        plan={DP: 2, ZERO: 1},
        plant=replaced(SGD, "_init_group", _not_on_last),
        what="parameter",
        is_behind_backward=True,
    ),
    "gradients of the step before are not dropped": Bug(
        model="blocks",
        plan=ZERO3,
        plant=replaced(SGD, "zero_grad", _not_dropped),
        what="gradient",
    ),
    "a parameter is not clipped with the others": Bug(
        model="blocks",
        plan=ZERO3,
        plant=replaced(clip_grad, "_clip_grads_with_norm_", _but_first),
        what="parameter",
        name="embed",
        clips=True,
        is_behind_backward=True,
    ),
    "masks are drawn anew where blocks run again": Bug(
        model="dropout",
        plan={**DP2, "recompute": "full"},
        plant=replaced(part_of_whole, "draw_part", _other_mask_again),
        what="gradient",
    ),
    "a ring forgets what it read before": Bug(
        model="llama",
        plan=RING,
        plant=replaced(ring._Softmax, "take", _forgetful),
        what="activation",
        name="self_attn",
    ),
    "a causal mask begins anew on every rank": Bug(
        model="llama",
        plan=RING,
        plant=replaced(ring, "_scores", _from_zero),
        what="activation",
        name="self_attn",
    ),
    "gradients of keys do not come home": Bug(
        model="llama",
        plan=RING,
        plant=replaced(ContextProcesses, "pass_on", _stays),
        what="gradient",
    ),
    "heads change places between ranks": Bug(
        model="llama",
        plan=CP2,
        plant=replaced(conversions, "_send_slices", _heads_change_places),
        what="activation",
        name="self_attn",
    ),
    "positions begin anew on every rank": Bug(
        model="llama",
        plan=CP2,
        plant=replaced(blocks, "keep_slice", _first_slice),
        what="activation",
        name="self_attn",
    ),
}
