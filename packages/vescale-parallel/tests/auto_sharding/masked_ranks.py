"""Check what a cut says about ranks, with whole tensors on one device.

A rank is the whole model in which only its elements of the axis count: elsewhere the weights
that end the axis are zero. What such a module returns is then that rank's partial value, and the
gradients are that rank's. A cut is right if the partial values sum to the output, if the gradients
that reach the entries, or sums that ranks read, sum to those of one device, and if, given these
sums, every rank has the gradients of one device for its own elements and for every parameter that
is whole, but for the replicated ones, which sum to them. Biases that are added to partial sums are
the first one's. Modules that are called with all of the axis are so here, too: gradients of what
they return are put together, and of those of what they were given a rank keeps its own. Of parts
of a parameter that all ranks read whole the gradients sum to those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.func import functional_call
from torch.utils._pytree import tree_map

from vescale_dtensor import InterleavedShard
from vescale_parallel._auto_sharding.find_candidates import Candidate
from vescale_parallel._tensor_parallel.chunks import part_sizes


def mask(parameter: torch.Tensor, placement: Placement, rank: int, size: int) -> torch.Tensor:
    """Return ones where a rank has a parameter's elements, and zeros elsewhere."""
    assert isinstance(placement, Shard | InterleavedShard)
    made = torch.zeros_like(parameter)
    for part in packed(made, placement):
        # Rows of a vocabulary need not divide evenly.
        sizes = part_sizes(part.shape[placement.dim], size)
        part.narrow(placement.dim, sum(sizes[:rank]), sizes[rank]).fill_(1)
    return made


def packed(parameter: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, ...]:
    """Return the parts of a parameter that are sharded each on its own, as views of it."""
    assert isinstance(placement, Shard | InterleavedShard)
    length = parameter.shape[placement.dim]
    lengths = placement.lengths(length) if isinstance(placement, InterleavedShard) else (length,)
    return parameter.split(lengths, placement.dim)


def shared_parts(cut: Candidate, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return which elements of a parameter every rank reads."""
    made, placement = torch.zeros_like(parameter, dtype=torch.bool), cut.parameters[name]
    read = {f"{module}.{below}": parts for (module, below), parts in cut.reads.items()}
    if name in read:
        for part, each in zip(packed(made, placement), read[name], strict=True):
            part.fill_(each == Replicate())
    return made


@dataclass
class _Record:
    """What one run saw at exits and entries, call by call."""

    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    gradients: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    inputs: int = 0


def worst_error(
    model: nn.Module, run: Callable[[nn.Module], torch.Tensor], cut: Candidate, size: int = 2
) -> float:
    """Return the largest deviation from one device, relative to the largest value of its kind.

    Args:
        model: In float64, without randomness.
        run: Calls a module that stands for the model and returns a tensor of what it gives.
        cut: What is checked.
        size: Ranks.
    """
    whole, expected = _run(model, run, cut, {}, None)
    ranks = [
        _run(model, run, cut, _rank_weights(model, cut, rank, size), whole, (rank, size))
        for rank in range(size)
    ]
    errors = [0.0]
    # A gradient that is zero but for rounding, of a bias of all keys: compare with the largest.
    least = 0.1 * max(gradient.abs().max().item() for gradient in expected.values())
    for call, output in enumerate(whole.outputs):
        errors.append(_error(sum(r.outputs[call] for r, _ in ranks), output))
    for call, gradient in whole.gradients.items():
        errors.append(_error(sum(r.gradients[call] for r, _ in ranks), gradient))
    for name, gradient in expected.items():
        found = [gradients[name] for _, gradients in ranks]
        if name in cut.parameters:
            shared = shared_parts(cut, name, gradient)
            masks = [mask(gradient, cut.parameters[name], rank, size) for rank in range(size)]
            own = [each * ~shared for each in masks]
            pairs = [(g * m, gradient * m) for g, m in zip(found, own, strict=True)]
            pairs.append((sum(found) * shared, gradient * shared))
        elif name in cut.replicated or name in cut.biases:
            pairs = [(sum(found), gradient)]
        else:
            pairs = [(each, gradient) for each in found]
        errors += [_error(each, right, least) for each, right in pairs]
    return max(errors)


def _error(found: Any, expected: torch.Tensor, least: float = 1e-6) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=least)).item()


def _rank_weights(
    model: nn.Module, cut: Candidate, rank: int, size: int
) -> dict[str, torch.Tensor]:
    """Return the parameters that end the axis, without the elements of the other ranks."""
    ends = set(cut.exits) | (set(cut.entries) if cut.kind == "vocabulary" else set())
    own = {id(p) for fqn in ends for p in model.get_submodule(fqn).parameters(recurse=False)}
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, placement in cut.parameters.items():
        parameter = model.get_parameter(name)
        if id(parameter) in own:
            if id(parameter) not in made:
                made[id(parameter)] = parameter * mask(parameter.detach(), placement, rank, size)
            found[name] = made[id(parameter)]
    if rank:
        found |= {name: model.get_parameter(name) * 0 for name in cut.biases}
    return found


def _run(
    model: nn.Module,
    run: Callable[[nn.Module], torch.Tensor],
    cut: Candidate,
    weights: Mapping[str, torch.Tensor],
    whole: _Record | None,
    rank: tuple[int, int] | None = None,
) -> tuple[_Record, dict[str, torch.Tensor]]:
    """Run forward and backward; with ``whole`` given, summing is standing in its values.

    ``rank`` is which of how many it is.
    """
    record = _Record()
    ends = {*cut.exits, *(cut.entries if cut.kind == "vocabulary" else ())}
    handles = [
        model.get_submodule(fqn).register_forward_pre_hook(
            _entry(record, whole), prepend=True, with_kwargs=True
        )
        for fqn in cut.entries
    ]
    handles += [
        model.get_submodule(fqn).register_forward_hook(_exit(record, whole)) for fqn in ends
    ]
    # Behind the hooks of exits: what ranks read is the sum.
    handles += [
        model.get_submodule(fqn).register_forward_hook(_gathered(record, whole))
        for fqn in cut.reentered
    ]
    for fqn, each in cut.whole.items():
        module = model.get_submodule(fqn)
        handles.append(module.register_forward_hook(_gathered(record, whole)))
        if rank is not None:
            handles.append(
                module.register_forward_pre_hook(_kept(each.dim, *rank), with_kwargs=True)
            )
    try:
        wrapped = _Call(model, weights)
        output = run(wrapped)
        direction = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(
            (output.flatten() * direction).sum(), list(parameters.values()), allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    named = zip(parameters, gradients, strict=True)
    return record, {n: g for n, g in named if g is not None}  # pyright: ignore[reportUnnecessaryComparison]: unused ones have none


class _Call(nn.Module):
    """A model with some parameters replaced; its attributes are the model's."""

    def __init__(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._functional = lambda *args, **kwargs: functional_call(
            model, dict(weights), args, kwargs, tie_weights=False
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._functional(*args, **kwargs)


def _watch(record: _Record, whole: _Record | None) -> Callable[[Any], Any]:
    """Return what has a tensor's gradient noted, and replaced by that of ``whole``, if given."""

    def watch(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        position = record.inputs
        record.inputs += 1
        watched = leaf.view_as(leaf)

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            record.gradients[position] = gradient
            return gradient if whole is None else whole.gradients[position]

        watched.register_hook(hook)
        return watched

    return watch


def _gathered(record: _Record, whole: _Record | None) -> Callable[..., Any]:
    watch = _watch(record, whole)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(watch, output)

    return hook


def _kept(dim: int, rank: int, size: int) -> Callable[..., Any]:
    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        watched = leaf.view_as(leaf)
        watched.register_hook(lambda gradient: gradient * mask(gradient, Shard(dim), rank, size))
        return watched

    def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(keep, (args, kwargs))

    return pre_hook


def _entry(record: _Record, whole: _Record | None) -> Callable[..., Any]:
    watch = _watch(record, whole)

    def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(watch, (args, kwargs))

    return pre_hook


def _exit(record: _Record, whole: _Record | None) -> Callable[..., Any]:
    def total(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        position = len(record.outputs)
        record.outputs.append(leaf.detach().clone())  # what follows may write into it
        if whole is None:
            return leaf
        return leaf + (whole.outputs[position] - leaf).detach()

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(total, output)

    return hook
