"""Weights that two pipeline stages use: one owns them, the others borrow them each step.

Tied embeddings are used by the first and the last stage. The owner sends the weight before
the step and gets the borrower's gradient back after it, so there is one optimizer state and
one value, and the bytes are those of an all-reduce between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import named_failures
from vescale_parallel._parameters.sharded_parameter import ShardedParameter


def pipeline_ranks(param: ShardedParameter, size: int) -> list[int]:
    """Return the pipeline ranks that use a parameter, its owner first."""
    return list(dict.fromkeys(stage % size for stage in param.stages))


def send_tied_weights(params: Sequence[ShardedParameter], group: dist.ProcessGroup) -> None:
    """Send owners' weights to borrowers. Every rank of the pipeline's group must call this."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for owner, borrower, param in _loans(params, size):
        if rank in (owner, borrower):
            assert param.unsharded is not None
            _move(param.unsharded.data, group, owner, borrower)


def return_tied_gradients(params: Sequence[ShardedParameter], group: dist.ProcessGroup) -> None:
    """Add borrowers' gradients to owners'. Every rank of the pipeline's group must call this."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    loans: dict[tuple[int, int], list[ShardedParameter]] = {}
    for owner, borrower, param in _loans(params, size):
        if rank in (owner, borrower) and param.sharded.requires_grad:
            loans.setdefault((owner, borrower), []).append(param)
    for (owner, borrower), lent in loans.items():
        tensors = [param.unsharded for param in lent if param.unsharded is not None]
        # What no stage uses has no gradient, which is not the same as one of zero.
        flags = torch.tensor([tensor.grad is not None for tensor in tensors], dtype=torch.uint8)
        flags = flags.to(tensors[0].device)
        _move(flags, group, borrower, owner)
        for tensor, has_grad in zip(tensors, flags.tolist(), strict=True):
            if has_grad:
                _return_gradient(tensor, group, owner, borrower)


def _return_gradient(
    tensor: nn.Parameter, group: dist.ProcessGroup, owner: int, borrower: int
) -> None:
    if dist.get_rank(group) == borrower:
        assert tensor.grad is not None
        _move(tensor.grad, group, borrower, owner)
        tensor.grad = None
        return
    theirs = torch.empty_like(tensor, requires_grad=False)
    _move(theirs, group, borrower, owner)
    tensor.grad = theirs if tensor.grad is None else tensor.grad.detach() + theirs


def _loans(
    params: Sequence[ShardedParameter], size: int
) -> list[tuple[int, int, ShardedParameter]]:
    """Return (owner, borrower, param) for every loan, in an order all ranks share."""
    found: list[tuple[int, int, ShardedParameter]] = []
    for param in params:
        owner, *borrowers = pipeline_ranks(param, size)
        found += [(owner, borrower, param) for borrower in borrowers]
    return found


def _move(tensor: Tensor, group: dist.ProcessGroup, source: int, target: int) -> None:
    with named_failures():
        if dist.get_rank(group) == source:
            dist.send(tensor.detach().contiguous(), group=group, group_dst=target)
        else:
            dist.recv(tensor.detach(), group=group, group_src=source)
