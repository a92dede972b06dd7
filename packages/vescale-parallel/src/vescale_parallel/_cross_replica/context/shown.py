"""Modules in blocks that compute on sliced tensors, which have the shapes of whole sequences.

[Note: attention that is written out] A module that multiplies queries with keys by itself, or
makes masks and biases of the length of what it is given, gets sliced tensors: its code sees whole
sequences, and what it computes is that of this rank's positions. Queries stay slices, and keys and
values are gathered where they are multiplied (:mod:`.sliced.products`), so that scores are 1/n of
one device's. Modules with parameters within it, which take one tensor and return one of its
positions, get the slice, and so do what is hooked to them.

What such a module returns has to be a slice again. Recurrences and convolutions, and what gathers
all that it returns, would run whole on every rank, and are refused. The log says what else does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import package_logger
from vescale_parallel._model.structures import flattened
from vescale_parallel._torch_private import left_out, pytree

from .leaving import Place, Shapes, part_of_whole
from .sliced.between import part_of_slice
from .sliced.rules import computed
from .sliced.tensor import Along, Call, SlicedTensor, WholeError, gathered
from .slices import ContextRanks, Range, SequenceSlices

_log = package_logger("vescale.parallel")
_LEFT_OUT = "attention that is written out is to what other ranks have of the sequence, too"
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Shown:
    """Which modules compute on sliced tensors, in calls of one form.

    Attributes:
        modules: The innermost ones.
        token_wise: Modules with parameters within them, which compute on slices.
        given: Shapes of what these modules are given on one device, where the model is compared.
        dims: Which dim of it is along the sequence, see :class:`.leaving.Leaving`.
    """

    modules: frozenset[str] = frozenset()
    token_wise: frozenset[str] = frozenset()
    given: Shapes = field(default_factory=dict[Place, "tuple[int, ...]"])
    dims: dict[Place, tuple[int, bool] | None] = field(
        default_factory=dict[Place, "tuple[int, bool] | None"]
    )


class ShownModules:
    """Has modules of blocks compute on sliced tensors, on one rank.

    Args:
        ranks: Those that share sequences.
        now: Returns which modules do so in the call that runs, and the slices of its sequence.
        between: Returns which positions of a slice that long layers may return on this rank.
    """

    def __init__(
        self,
        ranks: ContextRanks,
        now: Callable[[], tuple[Shown, SequenceSlices]],
        between: Callable[[int], Range],
    ) -> None:
        self._ranks, self._now, self._between = ranks, now, between
        self._wrapped, self._told = set[str](), set[str]()
        self._hooked = set[str]()

    def show(self, model: nn.Module, shown: Shown, *, besides: Set[str]) -> None:
        """Have the next calls compute so, in place; ``besides`` are blocks, which do already."""
        self.wrap(model, shown.modules - besides)
        for fqn in sorted(shown.token_wise - self._hooked):
            module, given = model.get_submodule(fqn), list[tuple[Along, torch.Size] | None]()
            before = functools.partial(self._before, fqn, given)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(functools.partial(self._after, fqn, given))
            self._hooked.add(fqn)

    def wrap(self, model: nn.Module, fqns: Set[str]) -> None:
        """Have modules compute so, in place, in the calls in which they are shown."""
        for fqn in sorted(fqns - self._wrapped):
            module = model.get_submodule(fqn)
            module.forward = left_out(self._of_module(module.forward, fqn), _LEFT_OUT)
            self._wrapped.add(fqn)

    def _of_module(self, forward: Callable[..., Any], fqn: str) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.call(fqn, forward, args, kwargs)

        return run

    def call(self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a module makes of this rank's slices: of sliced tensors, if it is shown."""
        shown, slices = self._now()
        if fqn not in shown.modules:
            return forward(*args, **kwargs)
        leaves, spec = flattened((args, kwargs))
        if any(isinstance(x, SlicedTensor) for x in leaves):
            return forward(*args, **kwargs)  # within another one
        call = Call(_NO_LIMIT, lambda: None, fqn)
        along = Along(1, 1, slices, self._ranks, call, computed, in_blocks=True)
        leaves = [self._sliced(shown, fqn, at, x, along) for at, x in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        output = forward(*args, **kwargs)
        if any(isinstance(x, SlicedTensor) for x in leaves):
            output = _of_slices(output, along)
        call.end()
        if call.gathered_by and fqn not in self._told and self._ranks.rank == 0:
            self._told.add(fqn)
            _log.info("%s computes %s of whole sequences on every rank", fqn, _names(call))
        return output

    def _sliced(self, shown: Shown, fqn: str, at: int, x: Any, along: Along) -> Any:
        if not isinstance(x, Tensor):
            return x
        place = fqn, at, x.dim()
        if place not in shown.given:
            return _seen_never(fqn, x, along)
        if place not in shown.dims:
            whole = shown.given[place]
            shown.dims[place] = part_of_whole(whole, x, along.slices, along.ranks.rank, fqn)
        if (found := shown.dims[place]) is None:
            return x
        dim, is_folded = found
        first, end = self._between(along.own)
        if end - first != along.own and x.shape[dim] == end - first:
            return part_of_slice(x, along.at(dim))
        count, rest = divmod(x.shape[dim], along.slices.sizes[along.ranks.rank])
        if rest or (count > 1 and not is_folded):
            raise ValueError(
                f"context_parallel: expected {fqn!r} to be called with this rank's part of "
                f"{along.slices.length} positions in dim {dim}, as it was when the model was "
                f"compared with one device, got shape {tuple(x.shape)}"
            )
        return SlicedTensor.of(x, along.at(dim, count))

    def _before(self, fqn: str, given: list[Any], _: nn.Module, args: Any, kwargs: Any) -> Any:
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, SlicedTensor)]
        shown, _slices = self._now()
        if len(found) != 1 or fqn not in shown.token_wise or not found[0].is_row_wise:
            given[:] = [None]
            return None
        given[:] = [(found[0].along, found[0].local.shape)]  # what raised left its own behind
        return pytree.tree_map_only(SlicedTensor, lambda x: x.local, (args, kwargs))

    def _after(self, fqn: str, given: list[Any], _: nn.Module, args: Any, output: Any) -> Any:
        if (found := given.pop()) is None:
            return None
        along, shape = found
        if isinstance(output, Tensor) and self._is_part(output, along, shape):
            return part_of_slice(output, along)
        if not isinstance(output, Tensor) or output.shape[:-1] != shape[:-1]:
            raise ValueError(
                f"context_parallel: expected {fqn!r} to return one tensor of the positions that "
                f"it is given, {tuple(shape[:-1])}, as when the model was compared with one "
                f"device, got {getattr(output, 'shape', type(output).__name__)}"
            )
        return SlicedTensor.of(output, along)

    def _is_part(self, output: Tensor, along: Along, given: torch.Size) -> bool:
        first, end = self._between(along.slices.sizes[self._ranks.rank])
        parts = (*given[: along.dim], end - first, *given[along.dim + 1 : -1])
        return along.count == 1 and parts != given[:-1] and output.shape[:-1] == parts


def _seen_never(fqn: str, x: Tensor, along: Along) -> Tensor:
    """Return what a module is given that it was not given when the model was compared.

    Raises:
        ValueError: If it may be a slice.
    """
    if along.own in x.shape and along.length not in x.shape and along.own != along.length:
        raise ValueError(
            f"context_parallel: {fqn!r} is given a tensor of shape {tuple(x.shape)}, which it was "
            "not given when the model was compared with one device, and which may be of this "
            f"rank's {along.own} of {along.length} positions; give it one in every call, or "
            "leave context_parallel out of the plan"
        )
    return x


def _of_slices(output: Any, along: Along) -> Any:
    """Return what a module computed, as plain tensors of this rank's slice.

    Raises:
        WholeError: If it returns no slice of activations.
    """
    leaves, spec = flattened(output)
    given = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    if given and not any(isinstance(x, SlicedTensor) for x in given):
        raise WholeError(_names(along.call) or "what it returns", along.call.module)
    leaves = [_of_stack(x, along) if isinstance(x, SlicedTensor) else x for x in leaves]
    return pytree.tree_unflatten(leaves, spec)


def _of_stack(x: SlicedTensor, along: Along) -> Tensor:
    """Return a plain tensor: a slice of the sequence of the stack, or the whole of another one."""
    if x.along.is_part or x.along.slices.is_like(along.slices):
        return x.local
    found, here = gathered(x), along.at(x.along.dim, x.along.count)
    return here.part(found, here.dim) if found.shape[here.dim] == here.length else found


def _names(call: Call) -> str:
    return ", ".join(map(repr, dict.fromkeys(call.gathered_by)))


def shown_modules(
    fqns: Set[str], token_wise: Mapping[str, bool], given: Shapes, model: nn.Module
) -> Shown:
    """Return what is shown of a model: of modules within each other, both.

    Args:
        fqns: The modules that compute on sliced tensors.
        token_wise: Of modules in blocks, whether they take and return one tensor alike.
        given: Shapes of what these were given.
        model: Is only looked at.
    """
    inside = tuple(f"{fqn}." for fqn in fqns)
    slices = frozenset(
        fqn
        for fqn, is_alike in token_wise.items()
        if is_alike and fqn.startswith(inside) and fqn not in fqns
        if any(True for _ in model.get_submodule(fqn).parameters())
    )
    shapes = {place: shape for place, shape in given.items() if place[0] in fqns}
    return Shown(frozenset(fqns), slices, shapes)
