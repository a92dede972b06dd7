"""Placeholders: tensors without storage for what another pipeline stage computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import own_variable
from vescale_parallel._model.shape_questions import SHAPE_QUESTIONS
from vescale_parallel._torch_private import pytree

from .values import Name, Values, versions_of, without_shape_questions, writes

_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class PlaceholderUsedError(ValueError):
    """Something reads a tensor that another stage has, where this is not allowed."""


class Placeholder(Tensor):
    """Zeros without memory, of the shape of a tensor that this stage does not have.

    What is computed from a placeholder is one too. Code before a stage's first own block may
    compute with them, since all that it leaves to the block is replaced or refused. From
    then on any use is an error: it would put zeros into a result.

    Attributes:
        usable: Whether computing with placeholders is allowed now; of the whole rank, since
            one model runs at a time.
        of_run: The values of the run of forward that it is of; None of a parameter.
        known_as: See [Note: names of values]; None if it depends on parameters alone.
        stands_for: What the stage before sent, if it could not become that: a checkpoint keeps it,
            and runs a block on it again.
    """

    usable: bool = True
    of_run: Values | None = None
    known_as: Name | None = None
    stands_for: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in SHAPE_QUESTIONS:
            return cls.on_tensors(func, types, args, given)
        args = without_shape_questions(func, args, _is_one, _plain)
        leaves = pytree.tree_leaves((args, given))
        held = [leaf for leaf in leaves if isinstance(leaf, Placeholder)]
        if not held:
            return func(*args, **given)
        if not cls.usable:
            raise PlaceholderUsedError(
                f"{getattr(func, '__name__', func)} uses a tensor that another pipeline stage "
                "computes and that was not seen to be needed here when its cuts were decided, or "
                "a parameter that code around modules uses between blocks, or one of a part of a "
                "block that forward calls outside of the block. Of a parameter, and of such a "
                "part, list the blocks behind which it is used in "
                "pipeline_parallel.called_behind, or have that be seen: give generate_plan an "
                "example_batch, or parallelize a dataset. Hand anything else from block to block "
                "as an argument"
            )
        if func in _DIFFERENTIATING:
            raise PlaceholderUsedError(
                "forward differentiates what blocks of a pipeline compute (torch.autograd.grad or "
                "backward within forward), and no gradient crosses stages before their backward "
                "passes. Differentiate within a block, or use pipeline_parallel.size 1"
            )
        if writes(func) and isinstance(args[0], Placeholder):
            return _written(args[0], func, types, args, given, held)
        versions = [*versions_of(leaves)]
        result = cls.on_tensors(func, types, args, given)
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Placeholder)]
        new = [leaf for leaf in found if not any(leaf is each for each in held)]
        changed = [leaf for leaf, before in versions if leaf._version != before]
        name_results(func, held, [*new, *(taint(leaf) for leaf in changed)])
        for leaf in changed:
            if isinstance(leaf, Placeholder) and leaf.of_run is not None:
                leaf.of_run.written.append(leaf)
        return result

    @classmethod
    def on_tensors(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function on the zeros that placeholders are; tensors it returns are some too.

        Without a graph: it would refer to the placeholders, so that they could not become what
        the stage before sends.
        """
        with torch.no_grad():
            return super().__torch_function__(func, types, tuple(args), dict(kwargs))  # pyright: ignore[reportArgumentType]: types is a collection


own_variable(Placeholder, "usable")


def placeholder(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    values: Values | None = None,
    name: Name | None = None,
) -> Placeholder:
    """Return a placeholder of a shape."""
    made = torch.zeros((), dtype=dtype, device=device).expand(shape).as_subclass(Placeholder)
    if values is not None and name is not None:
        rename(made, values, name)
    return made


def rename(held: Placeholder, values: Values, name: Name) -> None:
    """Let a placeholder be a value."""
    held.of_run, held.known_as = values, name
    values.made(name, held)


def taint(tensor: Tensor) -> Placeholder:
    """Make a placeholder of a plain tensor, to which what another stage has was written."""
    tensor.__class__ = Placeholder
    assert isinstance(tensor, Placeholder)
    return tensor


def become(held: Tensor, given: Tensor) -> bool:
    """Let whoever refers to a placeholder refer to a tensor; False if torch cannot."""
    try:
        torch.utils.swap_tensors(held, given)
    except RuntimeError:
        return False
    return True


def as_sent(tree: Any) -> Any:
    """Return what a block is called with again in backward, as it was sent in forward."""

    def sent(leaf: Any) -> Any:
        is_kept = isinstance(leaf, Placeholder) and leaf.stands_for is not None
        return leaf.stands_for if is_kept else leaf

    return pytree.tree_map(sent, tree)


def name_results(
    func: Callable[..., Any], held: Sequence[Placeholder], found: Sequence[Placeholder]
) -> None:
    """Name what a function made of placeholders, and note that these were needed."""
    named = [each for each in held if each.of_run is not None and each.known_as is not None]
    if not named:
        return
    values = named[0].of_run
    assert values is not None
    names = [each.known_as for each in named if each.known_as is not None]
    for name in names:
        values.used(name)
    call = values.of_function(func, names)
    for place, each in enumerate(found):
        rename(each, values, (*call, place))


def _is_one(leaf: object) -> bool:
    return isinstance(leaf, Placeholder)


def _plain(held: Tensor) -> Tensor:
    return _zeros(held).expand(held.shape)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)


def _written(
    target: Placeholder,
    func: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any],
    given: dict[str, Any],
    held: Sequence[Placeholder],
) -> Any:
    """Write to a placeholder: it has no memory, but other values from now on."""
    copied = _plain(target).contiguous()
    result = Placeholder.on_tensors(func, types, (copied, *args[1:]), given)
    name_results(func, held, [target])
    return None if result is None else target
