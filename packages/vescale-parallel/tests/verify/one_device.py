"""Compare what a policy makes of a model with one device: threads as ranks, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from vescale_parallel import ShardingProposal, propose_sharding
from vescale_parallel._model.copies import copied_without_hooks
from vescale_parallel._tensor_parallel.apply import install
from vescale_parallel._tensor_parallel.communicators import ThreadExchange, ThreadRanks
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.shard_module import cut_parameters, rank_part
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.threads import run_in_threads

# A loss and the gradient of every parameter.
Results = tuple[Tensor, dict[str, Tensor]]


def forward_backward(model: nn.Module, args: tuple[Any, ...]) -> Results:
    given = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
    outputs = [x for x in pytree.tree_leaves(model(*given)) if isinstance(x, Tensor)]
    outputs = [x for x in outputs if x.is_floating_point() and x.requires_grad]
    # Not a plain sum: what shifts all of an output by a constant must not go unnoticed.
    loss = torch.stack([(x.sin() * x).sum() for x in outputs]).sum()
    loss.backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return loss.detach(), grads


def _copy(model: nn.Module) -> nn.Module:
    return copied_without_hooks(
        model, lambda p: nn.Parameter(p.detach().clone()), lambda b: b.detach().clone()
    )


def check_against_one_device(
    model: nn.Module, args: tuple[Any, ...], plan: dict[str, str], size: int
) -> None:
    """Raise unless every rank has the loss, and its part of every gradient, of one device."""
    model = model.double().eval()
    sharding = shard(plan, model, size)
    spec, placements = sharding.spec, sharding.placements
    loss, grads = forward_backward(_copy(model), args)

    def on_rank(rank: int, threads: ThreadExchange) -> Results:
        local = _copy(model)
        cut_parameters(local, placements, size, rank)
        install(local, sharding, Boundary(ThreadRanks(threads, rank)))
        return forward_backward(local, args)

    runs: list[Results] = run_in_threads(size, on_rank)
    for rank, (found, _) in enumerate(runs):
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12, msg=f"loss of rank {rank}")
    # Gradients that are zero but for rounding, of a bias of all keys: compare with the largest.
    largest = max((float(grad.abs().max()) for grad in grads.values()), default=0.0)
    for name, grad in grads.items():
        found_grads = [each[name] for _, each in runs]
        if name in spec.grads or name.rpartition(".")[0] in spec.shared:
            found_grads = [torch.stack(found_grads).sum(0)] * size
        for rank, found in enumerate(found_grads):
            placement = placements.get(name, Replicate())
            part = grad if placement == Replicate() else rank_part(grad, placement, size, rank)
            torch.testing.assert_close(
                found, part, rtol=1e-12, atol=1e-12 * largest,
                msg=lambda text, name=name: f"gradient of {name}: {text}",
            )  # fmt: skip


def proposed(
    make: Callable[[], nn.Module], args: tuple[Any, ...], size: int, policy: str = "auto"
) -> ShardingProposal:
    """Return what a policy says, after comparing it with one device."""
    torch.manual_seed(0)
    model = make().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    found = propose_sharding(model, policy, size, example_batch=args)
    check_against_one_device(model, args, found.plan, size)
    return found
