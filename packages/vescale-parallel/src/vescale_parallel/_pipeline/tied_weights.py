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
from vescale_parallel._parameters.sharded_parameter import Slot


def pipeline_ranks(slot: Slot, size: int) -> list[int]:
    """Return the pipeline ranks that use a parameter, its owner first."""
    return list(dict.fromkeys(stage % size for stage in slot.stages))


def lend(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Send owners' weights to borrowers. Every rank of the pipeline's group must call this."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for owner, borrower, slot in _loans(slots, size):
        if rank in (owner, borrower):
            assert slot.compute is not None
            _move(slot.compute.data, group, owner, borrower)


def give_back(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Add borrowers' gradients to owners'. Every rank of the pipeline's group must call this."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    loans: dict[tuple[int, int], list[Slot]] = {}
    for owner, borrower, slot in _loans(slots, size):
        if rank in (owner, borrower) and slot.face.requires_grad:
            loans.setdefault((owner, borrower), []).append(slot)
    for (owner, borrower), lent in loans.items():
        computes = [slot.compute for slot in lent if slot.compute is not None]
        # What no stage uses has no gradient, which is not the same as one of zero.
        flags = torch.tensor([compute.grad is not None for compute in computes], dtype=torch.uint8)
        flags = flags.to(computes[0].device)
        _move(flags, group, borrower, owner)
        for compute, has_grad in zip(computes, flags.tolist(), strict=True):
            if has_grad:
                _give_back(compute, group, owner, borrower)


def _give_back(compute: nn.Parameter, group: dist.ProcessGroup, owner: int, borrower: int) -> None:
    if dist.get_rank(group) == borrower:
        assert compute.grad is not None
        _move(compute.grad, group, borrower, owner)
        compute.grad = None
        return
    theirs = torch.empty_like(compute, requires_grad=False)
    _move(theirs, group, borrower, owner)
    compute.grad = theirs if compute.grad is None else compute.grad.detach() + theirs


def _loans(slots: Sequence[Slot], size: int) -> list[tuple[int, int, Slot]]:
    """Return (owner, borrower, slot) for every loan, in an order all ranks share."""
    found: list[tuple[int, int, Slot]] = []
    for slot in slots:
        owner, *borrowers = pipeline_ranks(slot, size)
        found += [(owner, borrower, slot) for borrower in borrowers]
    return found


def _move(tensor: Tensor, group: dist.ProcessGroup, source: int, target: int) -> None:
    with named_failures():
        if dist.get_rank(group) == source:
            dist.send(tensor.detach().contiguous(), group=group, group_dst=target)
        else:
            dist.recv(tensor.detach(), group=group, group_src=source)
