"""Tied weights of a pipeline: one stage owns them, and the others get them for each step.

Tied embeddings are used by the first and the last stage. The owner sends the weight before
the step and gets the other stage's gradient back after it, so there is one optimizer state and
one value, and the bytes are those of an all-reduce between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import named_failures, profiler_range
from vescale_parallel._mesh.transfers import tell_sent
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._plan.pipeline_schedules import StagePlacement


def pipeline_ranks(
    param: ShardedParameter, size: int, placement: StagePlacement | None = None
) -> list[int]:
    """Return the pipeline ranks that use a parameter, its owner first.

    ``placement`` says where stages are; None is round ``size`` ranks.
    """
    placement = StagePlacement(size) if placement is None else placement
    return list(dict.fromkeys(placement.rank_of(stage) for stage in param.stages))


def send_tied_weights(
    params: Sequence[ShardedParameter],
    group: dist.ProcessGroup,
    placement: StagePlacement | None = None,
) -> None:
    """Send tied weights to the stages that do not own them.

    Every rank of the pipeline's group must call this.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for owner, user, param in _transfers(params, size, placement):
        if rank in (owner, user):
            assert param.unsharded is not None
            _move(param.unsharded.data, group, owner, user)


def return_tied_gradients(
    params: Sequence[ShardedParameter],
    group: dist.ProcessGroup,
    placement: StagePlacement | None = None,
) -> None:
    """Add other stages' gradients to the owner's.

    Every rank of the pipeline's group must call this.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    transfers: dict[tuple[int, int], list[ShardedParameter]] = {}
    for owner, user, param in _transfers(params, size, placement):
        if rank in (owner, user) and param.sharded.requires_grad:
            transfers.setdefault((owner, user), []).append(param)
    for (owner, user), sent in transfers.items():
        tensors = [param.unsharded for param in sent if param.unsharded is not None]
        # What no stage uses has no gradient, which is not the same as one of zero.
        flags = torch.tensor([tensor.grad is not None for tensor in tensors], dtype=torch.uint8)
        flags = flags.to(tensors[0].device)
        _move(flags, group, user, owner)
        for tensor, has_grad in zip(tensors, flags.tolist(), strict=True):
            if has_grad:
                _return_gradient(tensor, group, owner, user)


def _return_gradient(
    tensor: nn.Parameter, group: dist.ProcessGroup, owner: int, user: int
) -> None:
    if dist.get_rank(group) == user:
        assert tensor.grad is not None
        _move(tensor.grad, group, user, owner)
        tensor.grad = None
        return
    theirs = torch.empty_like(tensor, requires_grad=False)
    _move(theirs, group, user, owner)
    tensor.grad = theirs if tensor.grad is None else tensor.grad.detach() + theirs


def _transfers(
    params: Sequence[ShardedParameter], size: int, placement: StagePlacement | None
) -> list[tuple[int, int, ShardedParameter]]:
    """Return (owner, user, param) for every stage but the owner, in an order all ranks share."""
    found: list[tuple[int, int, ShardedParameter]] = []
    for param in params:
        owner, *users = pipeline_ranks(param, size, placement)
        found += [(owner, user, param) for user in users]
    return found


def _move(tensor: Tensor, group: dist.ProcessGroup, source: int, target: int) -> None:
    is_sent = dist.get_rank(group) == source
    nbytes = tensor.numel() * tensor.element_size() * is_sent
    with profiler_range("move tied weights over pp", nbytes=nbytes), named_failures():
        if is_sent:
            tell_sent("send tied weights", tensor)
            dist.send(tensor.detach().contiguous(), group=group, group_dst=target)
        else:
            # What is not contiguous itself is a copy here.
            arrived = tensor.detach().contiguous()
            dist.recv(arrived, group=group, group_src=source)
            if not tensor.is_contiguous():
                tensor.detach().copy_(arrived)
