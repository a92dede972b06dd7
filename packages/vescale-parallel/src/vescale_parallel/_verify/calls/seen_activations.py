"""What modules are given and return, on one device and on ranks, leaf by leaf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar, get_args

from torch import Tensor, nn

from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.structures import flattened
from vescale_parallel._tensor_parallel.hooks.axis import Slot
from vescale_parallel._torch_private import pytree

SLOTS: tuple[Slot, ...] = get_args(Slot)
_Place = tuple[str, Slot]
_Call = tuple[str, Slot, int]  # module, slot and the number of the call
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Judges(Protocol[T_co]):
    """Says how a leaf lies over ranks, None if in an unknown way.

    Of one device and of every rank: what it is, and its gradient, None of none.
    """

    def __call__(
        self, whole: Tensor, parts: Sequence[Tensor], grads: Sequence[Tensor | None], slot: Slot
    ) -> T_co | None: ...


def judged(
    asked: Collection[str],
    whole: SeenActivations,
    ranks: Sequence[SeenActivations],
    judge: Judges[T],
) -> dict[_Place, tuple[T | None, ...]]:
    """Return how leaves lie over ranks, in all calls of modules; None where calls differ.

    Args:
        asked: The modules; one that was scaled away is as all those are that it is like.
        whole: What was seen on one device.
        ranks: What was seen on each rank.
        judge: Says it of a leaf.
    """
    of_calls: dict[_Place, list[tuple[T | None, ...]]] = {}
    for call, values in whole.values.items():
        fqn, slot, _ = call
        others = [rank.values.get(call, ()) for rank in ranks]
        grads = [each.grads.get(call, {}) for each in (whole, *ranks)]
        found: list[T | None] = []
        if all(len(other) == len(values) for other in others):
            for at, value in enumerate(values):
                parts = [part for other in others if (part := other[at]) is not None]
                of_leaf = [grad.get(at) for grad in grads]
                if value is None or len(parts) < len(ranks):
                    found.append(None)
                else:
                    found.append(judge(value, parts, of_leaf, slot))
        of_calls.setdefault((fqn, slot), []).append(tuple(found))
    alike: dict[_Place, list[tuple[T | None, ...]]] = {}
    for (fqn, slot), calls in of_calls.items():
        alike.setdefault((generalize(fqn), slot), []).extend(calls)
    return {
        (fqn, slot): _of_all_calls(of_calls.get((fqn, slot)) or alike[generalize(fqn), slot])
        for fqn in asked
        for slot in SLOTS
        if (generalize(fqn), slot) in alike
    }


def _of_all_calls(found: Sequence[tuple[T | None, ...]]) -> tuple[T | None, ...]:
    if len({len(each) for each in found}) > 1:
        return ()
    leaves = zip(*found, strict=True)
    return tuple(of_leaf[0] if len({*of_leaf}) == 1 else None for of_leaf in leaves)


def like_blocks(asked: Collection[str], names: Collection[str]) -> set[str]:
    """Return modules that were asked for, or blocks like those that were scaled away."""
    missing = {generalize(fqn) for fqn in asked if fqn not in names}
    return {fqn for fqn in names if fqn in asked or generalize(fqn) in missing}


class SeenActivations:
    """What hooks of modules are given, and its gradients.

    Args:
        fqns: The modules.
        backward: Those with backward hooks.
        part: Returns what this rank has of a tensor.

    Attributes:
        values: Leaves of every call, None of what is no tensor.
        grads: Of those that a gradient reached.
    """

    def __init__(
        self,
        fqns: Iterable[str],
        backward: Iterable[str],
        part: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        self._fqns, self._backward, self._part = sorted(fqns), frozenset(backward), part
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
        leaves = [self._part(x) if isinstance(x, Tensor) else None for x in flattened(tree)[0]]
        self.values[call] = [None if x is None else x.detach().clone() for x in leaves]
        for at, x in enumerate(leaves):
            if x is not None and x.requires_grad:
                x.register_hook(functools.partial(self._note_gradient, call, at))

    def _note_gradient(self, call: _Call, at: int, grad: Tensor) -> None:
        self.grads.setdefault(call, {})[at] = grad.detach()


def _view(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad and type(x) is Tensor else x
