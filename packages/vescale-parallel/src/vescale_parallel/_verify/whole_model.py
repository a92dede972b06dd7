"""The whole model as a region to be run, equal blocks in the middle of a stack left out."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.inputs import bind
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import ModuleCall

from .region import How, Region, given_input


def passed_over(
    model: nn.Module, calls: Mapping[str, ModuleCall], kinds: Mapping[str, object]
) -> dict[str, list[str]]:
    """Return blocks that need not run for what is outside of them to be compared.

    ``kinds`` says of every block what makes it equal to another. They are returned by the block
    that runs before them.

    Each is equal to a block that runs, neither first, second nor last of its stack, and returns
    an activation like the one it gets, which it may pass on.
    """
    found: dict[str, list[str]] = {}
    for stack in block_stacks(model):
        seen: set[object] = set()
        before = ""
        for index, fqn in enumerate(stack):
            kind = kinds.get(fqn)
            fits = fqn in calls and _is_like_its_input(calls[fqn])
            inner = 2 <= index < len(stack) - 1
            if inner and fits and before in calls and kind is not None and kind in seen:
                found.setdefault(before, []).append(fqn)
            else:
                before = fqn
            seen.add(kind)
    return found


def _is_like_its_input(call: ModuleCall) -> bool:
    given, returned = _activation((call.args, dict(call.kwargs))), _activation(call.output)
    return given is not None and returned is not None and given.shape == returned.shape


def _activation(tree: Any) -> Tensor | None:
    leaves = pytree.tree_leaves(tree)
    return next((x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()), None)


def whole_region(
    model: nn.Module, batch: Any, over: Mapping[str, Sequence[str]], *, training: bool = False
) -> Region:
    """Return a model with an example as its inputs.

    Floats of the example are used if they are not made up, as zeros are. ``over`` is what
    :func:`passed_over` gave.
    """
    leaves, spec = pytree.tree_flatten(bind(model, batch))
    inputs = [given_input(leaf) for leaf in leaves]
    how = How(tuple(Replicate() if isinstance(x, Tensor) else None for x in leaves), None)
    skipped = [fqn for fqns in over.values() for fqn in fqns]
    kept = _parameters_besides(model, skipped)
    parameters = (p for fqn in skipped for p in model.get_submodule(fqn).parameters())
    empty = frozenset(id(p) for p in parameters if id(p) not in kept)

    def prepare(copied: nn.Module) -> None:
        for before, fqns in over.items():
            _pass_on(copied, before, fqns)

    return Region(model, "", inputs, spec, how, empty, prepare, training)


def _parameters_besides(model: nn.Module, skipped: Sequence[str]) -> set[int]:
    inside = tuple(f"{fqn}." for fqn in skipped)
    return {
        id(p)
        for fqn, p in model.named_parameters(remove_duplicate=False)
        if not inside or not fqn.startswith(inside)
    }


def _pass_on(model: nn.Module, before: str, fqns: Sequence[str]) -> None:
    """Have blocks return what the one before returned, with their own input as its activation."""
    returned: list[Any] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        returned[:] = [output]

    model.get_submodule(before).register_forward_hook(note)
    for fqn in fqns:
        module = model.get_submodule(fqn)

        @functools.wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten(returned[0])
            first = _activation(returned[0])
            given = _activation((args, kwargs))
            new = [
                given if x is first else x.detach() if isinstance(x, Tensor) else x for x in leaves
            ]
            return pytree.tree_unflatten(new, spec)

        module.forward = forward
