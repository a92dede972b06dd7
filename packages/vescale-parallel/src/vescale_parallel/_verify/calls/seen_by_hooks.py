"""How what hooks are given lies over tensor-parallel ranks: found by running it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.structures import flattened
from vescale_parallel._tensor_parallel.chunks import (
    Parts,
    lengths_within,
    number_or_lengths,
    parts_of,
)
from vescale_parallel._tensor_parallel.hooks.axis import Slot
from vescale_parallel._tensor_parallel.hooks.whole_activations import Layout, Layouts
from vescale_parallel._tensor_parallel.shard_module import placement_between, rank_part
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.compared_results import close, largest_of
from vescale_parallel._verify.compared_runs import heard
from vescale_parallel._verify.region import Region

SLOTS: tuple[Slot, ...] = get_args(Slot)
_Place = tuple[str, Slot]
_Leaves = tuple[Layout | None, ...]
_Call = tuple[str, Slot, int]  # module, slot and the number of the call


def layouts_of(
    make: Callable[[], Region],
    sharding: TensorSharding,
    fqns: Iterable[str],
    backward: Iterable[str],
    real: TensorSharding,
) -> Layouts:
    """Return how what hooks are given lies over ranks.

    Args:
        make: Returns a model as a region to be run.
        sharding: Its plan.
        fqns: Modules with hooks.
        backward: Those with backward hooks.
        real: The plan of the model that was scaled down, or the same one.

    Raises:
        Contradiction: If a rank's part raises.
        DryRunError: If the model cannot be run.
    """
    asked, asked_backward = {*fqns}, {*backward}

    def listener(region: Region, *, is_whole: bool) -> _Activations:
        names = [fqn for fqn, _ in region.module.named_modules()]
        return _Activations(_like(asked, names), _like(asked_backward, names))

    whole, ranks = heard(make, sharding, listener)
    packed = _packed(sharding, real)
    of_calls: dict[_Place, list[_Leaves]] = {}
    for call, values in whole.values.items():
        others = [rank.values.get(call, ()) for rank in ranks]
        grads = [each.grads.get(call, {}) for each in (whole, *ranks)]
        found: _Leaves = ()
        if all(len(other) == len(values) for other in others):
            found = tuple(
                _layout(value, [other[at] for other in others], [g.get(at) for g in grads], packed)
                for at, value in enumerate(values)
            )
        of_calls.setdefault((call[0], call[1]), []).append(found)
    alike: dict[_Place, list[_Leaves]] = {}
    for (fqn, slot), calls in of_calls.items():
        alike.setdefault((generalize(fqn), slot), []).extend(calls)
    return {
        (fqn, slot): _of_all_calls(of_calls.get((fqn, slot)) or alike[generalize(fqn), slot])
        for fqn in asked
        for slot in SLOTS
        if (generalize(fqn), slot) in alike
    }


def _like(asked: Collection[str], names: Collection[str]) -> set[str]:
    """Return modules that were asked for, or blocks like those that were scaled away."""
    missing = {generalize(fqn) for fqn in asked if fqn not in names}
    return {fqn for fqn in names if fqn in asked or generalize(fqn) in missing}


def _of_all_calls(found: Sequence[_Leaves]) -> _Leaves:
    if len({len(each) for each in found}) > 1:
        return ()
    leaves = zip(*found, strict=True)
    return tuple(layouts[0] if len({*layouts}) == 1 else None for layouts in leaves)


class _Activations:
    """What hooks of modules are given, and its gradients.

    Attributes:
        values: Leaves of every call, None of what is no tensor.
        grads: Of those that a gradient reached.
    """

    def __init__(self, fqns: Iterable[str], backward: Iterable[str]) -> None:
        self._fqns, self._backward = sorted(fqns), frozenset(backward)
        self._calls: dict[_Place, int] = {}
        self.values: dict[_Call, list[Tensor | None]] = {}
        self.grads: dict[_Call, dict[int, Tensor]] = {}

    def listen(self, module: nn.Module) -> None:
        """Listen to what modules are given before it enters regions."""
        for fqn in self._fqns:
            self._listen_before(module.get_submodule(fqn), fqn, "before")

    def listen_behind(self, module: nn.Module) -> None:
        """Listen to what forward gets, and to what is returned in the end."""
        for fqn in self._fqns:
            each = module.get_submodule(fqn)
            self._listen_before(each, fqn, "given")
            note = functools.partial(self._note, fqn)
            each.register_forward_hook(lambda _, args, output, note=note: note("returned", output))
            if fqn in self._backward:
                each.register_full_backward_hook(
                    lambda _, inputs, grads, note=note: note("grad_input", inputs)
                )
                each.register_full_backward_pre_hook(
                    lambda _, grads, note=note: note("grad_output", grads)
                )

    def _listen_before(self, module: nn.Module, fqn: str, slot: Slot) -> None:
        def note(_: nn.Module, args: Any, kwargs: Any) -> Any:
            # Of a tensor that others read, too, the gradient that comes back from here.
            own = pytree.tree_map_only(Tensor, _view, (args, kwargs))
            self._note(fqn, slot, own)
            return own

        module.register_forward_pre_hook(note, with_kwargs=True)

    def _note(self, fqn: str, slot: Slot, tree: Any) -> None:
        number = self._calls[fqn, slot] = self._calls.get((fqn, slot), 0) + 1
        call: _Call = (fqn, slot, number)
        leaves = flattened(tree)[0]
        self.values[call] = [x.detach().clone() if isinstance(x, Tensor) else None for x in leaves]
        for at, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(functools.partial(self._note_gradient, call, at))

    def _note_gradient(self, call: _Call, at: int, grad: Tensor) -> None:
        self.grads.setdefault(call, {})[at] = grad.detach()


def _view(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x


def _packed(sharding: TensorSharding, real: TensorSharding) -> dict[Parts, Parts]:
    """Return of what parts dims are made that are sharded each on its own: run, and real."""
    of_real = {generalize(fqn): parts_of(each) for fqn, each in real.placements.items()}
    found = {
        parts_of(each): of_real.get(generalize(fqn), parts_of(each))
        for fqn, each in sharding.placements.items()
    }
    return {run: there for run, there in found.items() if run != 1}


def _layout(
    whole: Tensor | None,
    parts: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    packed: Mapping[Parts, Parts],
) -> Layout | None:
    """Return how a leaf lies, given its gradient on one device and on every rank."""
    tensors = [part for part in parts if part is not None]
    if whole is None or len(tensors) < len(parts):
        return None
    value = _placement(whole, tensors, packed)
    if value is None:
        return None
    gradient = Replicate() if value == Partial() else value
    if any(grad is not None and bool(grad.any()) for grad in grads):
        zeros = (whole, *tensors)
        given = [
            torch.zeros_like(z) if g is None else g for g, z in zip(grads, zeros, strict=True)
        ]
        found = _placement(given[0], given[1:], packed)
        if found is None:
            return None
        gradient = found
    layout = Layout(_real(value, packed), _real(gradient, packed))
    return layout if layout.is_known else None


def _real(placement: Placement, packed: Mapping[Parts, Parts]) -> Placement:
    if not isinstance(placement, InterleavedShard):
        return placement
    return InterleavedShard(placement.dim, packed[placement.parts])


def _placement(
    whole: Tensor, parts: Sequence[Tensor], packed: Mapping[Parts, Parts]
) -> Placement | None:
    """Return how a tensor lies over ranks; None if in no way that is known."""
    largest, size = largest_of(whole), len(parts)
    if all(part.shape == whole.shape for part in parts):
        if all(close(part, whole, largest) for part in parts):
            return Replicate()
        is_sum = whole.is_floating_point() and close(torch.stack([*parts]).sum(0), whole, largest)
        return Partial() if is_sum else None
    shard = placement_between(whole, parts[0], size)
    if not isinstance(shard, Shard):
        return None
    for candidate, fits in ((shard, shard), *_of_parts(shard.dim, whole, packed)):
        shards = [rank_part(whole, fits, size, rank) for rank in range(size)]
        if all(close(one, other, largest) for one, other in zip(parts, shards, strict=True)):
            return candidate
    return None


def _of_parts(
    dim: int, whole: Tensor, packed: Mapping[Parts, Parts]
) -> Iterable[tuple[Placement, Placement]]:
    """Yield placements of a dim that is made of parts; and the same, by its length here."""
    length = whole.shape[dim]
    for parts in packed:
        lengths = lengths_within(parts, length)
        if sum(lengths) == length and min(lengths) > 0:
            here = number_or_lengths(lengths)
            yield InterleavedShard(dim, parts), InterleavedShard(dim, here)
