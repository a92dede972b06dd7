"""Modules that stack experts and are called with as many rows for each: found, and proven.

Llama 4 gives each expert all tokens, times their scores; one-hot products give each its capacity.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.random_copies import InDouble, random_copy
from vescale_parallel._trace.generators import untouched_generators

from .calls_seen import tensors_seen
from .experts import by_expert, call_counting, close, counts_of, laid_out, num_alike, subsets
from .left_behind import draws_in_training


@dataclass(frozen=True)
class BatchedRows:
    """How a module is called with as many rows of each expert.

    Attributes:
        num_dims: Of its input.
        attributes: Its integers that count experts.
        draws: Whether it draws random numbers in training.
    """

    num_dims: int
    attributes: tuple[str, ...]
    draws: bool


MOST_NUMEL = 2**26  # of a module that is run
Made = tuple[Tensor, ...]


def num_batched(module: nn.Module, owner: nn.Module) -> int:
    """Return how many experts a module stacks that takes one tensor; 0 if it is none.

    The module that calls it has a router: a parameter with a dim of as many.
    """
    count = num_alike(module)
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError:
        return 0
    own = {id(p) for p in module.parameters()}
    routers = (p for p in owner.parameters() if id(p) not in own)
    return count if count > 1 and any(count in p.shape for p in routers) else 0


def proven_batched(owner: nn.Module, name: str, size: int) -> BatchedRows | str:
    """Return how a module is called, or why it has no experts that ranks can share.

    Proven is that an expert's rows are made of its rows alone, with its part of the stacks, each
    by itself: in float64 on random numbers, with all gradients.

    Args:
        owner: Calls the module.
        name: Of the module.
        size: Ranks that are to share its experts.
    """
    if sum(p.numel() for p in owner.parameters()) > MOST_NUMEL:
        return "it is too large to be tried, and the model has no configuration of a smaller one"
    module = owner.get_submodule(name)
    count = num_alike(module)
    with untouched_generators(seed=0), InDouble():
        widths = dict.fromkeys(dim for p in module.parameters() for dim in p.shape[1:])
        seen = tensors_seen(owner, name, widths)
        if not seen:
            return f"{type(owner).__name__}, which has it, does not take rows of features alone"
        rows, whole = seen[0], random_copy(module)
        if rows.shape[0] % count if rows.dim() == 2 else rows.shape[0] != count:
            return f"it is called with a tensor of shape {tuple(rows.shape)}"
        rows_ENH = torch.randn_like(by_expert(rows, count))
        try:
            with torch.no_grad():
                made = whole(laid_out(rows_ENH, rows.dim()))
            if made.shape[:-1] != laid_out(rows_ENH, rows.dim()).shape[:-1]:
                return "it does not return a row for each row of each expert"
            expected = _with_gradients(whole, rows_ENH, _as_one(whole, rows.dim()))
            draws = draws_in_training(whole, (laid_out(rows_ENH, rows.dim()),))
        # What a user's module raises is why it is not understood.
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        attributes = _integers(whole, rows_ENH, rows.dim(), expected, size)
        if isinstance(attributes, str):
            return attributes
        return BatchedRows(rows.dim(), attributes, draws)


def _integers(
    module: nn.Module, rows_ENH: Tensor, num_dims: int, expected: Made, size: int
) -> tuple[str, ...] | str:
    why = ""
    for names in subsets([*counts_of(module, len(rows_ENH))]):
        try:
            run = _as_ranks(module, num_dims, names, size)
            made = _with_gradients(module, rows_ENH, run)
        except Exception as error:  # these integers were not those, or not all of them
            raised = f"with some of its experts alone it raises {type(error).__name__}"
            why = why or f"{raised}: {error}"
            continue
        if all(map(close, made, expected)):
            return names
        why = "what it makes of an expert's row depends on other rows or experts"
    return why


def _as_one(module: nn.Module, num_dims: int) -> Callable[[Tensor], Tensor]:
    def run(rows_ENH: Tensor) -> Tensor:
        return by_expert(module(laid_out(rows_ENH, num_dims)), len(rows_ENH))

    return run


def _as_ranks(
    module: nn.Module, num_dims: int, names: Sequence[str], size: int
) -> Callable[[Tensor], Tensor]:
    """Return what runs a module's experts part by part, on every second of their rows."""

    def run(rows_ENH: Tensor) -> Tensor:
        whole: dict[str, Any] = dict(module._parameters)
        local, made = len(rows_ENH) // size, list[Tensor]()
        places = torch.arange(rows_ENH.shape[1])
        order = torch.cat([places[::2], places[1::2]]).argsort()
        for rank in range(size):
            own = slice(rank * local, (rank + 1) * local)
            halves = list[Tensor]()
            try:
                # What forward finds: tensors that autograd leads back to the parameters.
                parts = {name: p[own] for name, p in whole.items()}
                object.__setattr__(module, "_parameters", parts)
                for half in (rows_ENH[own, ::2], rows_ENH[own, 1::2]):
                    given = laid_out(half, num_dims)
                    done = call_counting(module, module.forward, names, local, given)
                    halves.append(by_expert(done, local))
            finally:
                object.__setattr__(module, "_parameters", whole)
            made.append(torch.cat(halves, 1)[:, order])
        return torch.cat(made)

    return run


def _with_gradients(module: nn.Module, rows: Tensor, run: Callable[[Tensor], Tensor]) -> Made:
    rows = rows.clone().requires_grad_()
    made = run(rows)
    probe = torch.linspace(-1, 1, made.numel(), dtype=torch.float64).view(made.shape)
    grads = torch.autograd.grad((made * probe).sum(), [rows, *module.parameters()])
    return made.detach(), *grads
