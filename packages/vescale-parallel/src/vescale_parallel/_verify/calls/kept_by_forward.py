"""How what forward keeps in attributes lies over tensor-parallel ranks: found by running it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from vescale_parallel._model.copies import tensors_in_attributes
from vescale_parallel._tensor_parallel.hooks.whole_activations import KeptLayouts, Layout
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._verify.compared_runs import heard
from vescale_parallel._verify.region import Region

from .seen_by_hooks import layout_of, packed_parts


def kept_layouts(
    make: Callable[[], Region], sharding: TensorSharding, *, real: TensorSharding
) -> KeptLayouts:
    """Return how tensors that forward leaves in attributes lie, of those that are not whole.

    Args:
        make: Returns a model as a region to be run.
        sharding: Its plan.
        real: The plan of the model that was scaled down, or the same one.

    Raises:
        Contradiction: If a rank's part raises.
        DryRunError: If the model cannot be run.
    """
    whole, ranks = heard(make, sharding, lambda region, *, is_whole: _Kept())
    packed = packed_parts(sharding, real)
    found: dict[tuple[str, str], Layout | None] = {}
    for (fqn, name, at), value in whole.values.items():
        parts = [rank.values.get((fqn, name, at)) for rank in ranks]
        tensors = [part for part in parts if part is not None]
        grads = [each.grads.get((fqn, name, at)) for each in (whole, *ranks)]
        layout = None
        if len(tensors) == len(ranks):
            layout = layout_of(value, tensors, grads, packed)
        if layout is None or not layout.is_whole:
            found[fqn, name] = layout if at is None else None
    return found


class _Kept:
    """What a forward has left in attributes that was not there before, and its gradients.

    Attributes:
        values: By module, attribute, and the place in a container, None of a tensor by itself.
        grads: Of those that a gradient reached.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, int | None], Tensor] = {}
        self.grads: dict[tuple[str, str, int | None], Tensor] = {}

    def listen(self, module: nn.Module) -> None:
        """Do nothing: what is kept is looked at in the end."""

    def listen_behind(self, module: nn.Module) -> None:
        """Note what is kept when the module has run."""
        before = {id(x) for _, _, x in tensors_in_attributes(module)}
        module.register_forward_hook(lambda *_: self._note(module, before))

    def _note(self, module: nn.Module, before: set[int]) -> None:
        for key, x in _places(module):
            if id(x) in before or not x.is_floating_point():
                continue
            self.values[key] = x.detach().clone()
            if x.requires_grad:
                x.register_hook(functools.partial(self._note_gradient, key))

    def _note_gradient(self, key: tuple[str, str, int | None], grad: Tensor) -> None:
        self.grads[key] = grad.detach()


def _places(module: nn.Module) -> Iterator[tuple[tuple[str, str, int | None], Tensor]]:
    numbers: dict[tuple[str, str], int] = {}
    modules = dict(module.named_modules())
    for fqn, name, x in tensors_in_attributes(module):
        at = numbers[fqn, name] = numbers.get((fqn, name), -1) + 1
        is_alone: bool = vars(modules[fqn])[name] is x
        yield (fqn, name, None if is_alone else at), x
