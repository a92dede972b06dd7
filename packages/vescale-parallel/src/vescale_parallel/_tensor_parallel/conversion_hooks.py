"""Where activations are converted: before or behind what a module's forward computes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vescale_parallel._model.fqns import stack_of
from vescale_parallel._torch_private import pytree

from .chunks import part_sizes
from .conversions import Boundary
from .shard_module import whole_of
from .sharding_spec import PlacementChange, shard_dim
from .tensor_sharding import TensorSharding

Convert = Callable[[Tensor], Tensor]


def moved(move: PlacementChange, stack: str, boundary: Boundary) -> Convert:
    """Return what splits or gathers an activation, as a plan says where it changes.

    Raises:
        ValueError: If it does neither.
    """
    source, target = shard_dim(move.source), shard_dim(move.target)
    if source is None and target is not None:
        return lambda x: boundary.split(x, target, stack)
    if source is not None and target is None:
        return lambda x: boundary.gather(x, source, stack)
    raise ValueError(
        "tensor_parallel.sharding_plan: expected 'Replicate() -> Shard(d)' or "
        f"'Shard(d) -> Replicate()', got a move from {move.source!r} to {move.target!r}"
    )


def on_argument(module: nn.Module, argument: str, convert: Convert) -> None:
    """Convert one argument of every call, by its name or the first activation."""
    converted = _argument_converted(module, argument, convert)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return converted(args, kwargs)

    module.register_forward_pre_hook(before, with_kwargs=True)


def on_output(module: nn.Module, convert: Convert) -> None:
    """Convert the first activation that a module returns."""

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _output_converted(output, convert)

    module.register_forward_hook(after, prepend=True)


def shard_in_forward(
    model: nn.Module, sharding: TensorSharding, boundary: Boundary | None, *, prefix: str = ""
) -> Callable[[str, int], tuple[int, int]] | None:
    """Have the forwards of the first and the last block of stacks shard and gather the sequence.

    For sequences that others slice before, and gather behind these forwards. Of a model of which
    ``prefix`` is the FQN in that of the plan, what is outside is passed over.

    Returns:
        What tells which positions of a number of them this rank has between the blocks of a stack;
        None if that is all, without tensor-parallel ranks.
    """
    if boundary is None:
        return None
    ends, ranks = sharding.sequence_ends(), boundary.ranks
    modules = {f"{prefix}.{fqn}".strip("."): module for fqn, module in model.named_modules()}
    for first, last in ends.values():
        for (fqn, argument), move in sharding.spec.inputs.items():
            if fqn == first and fqn in modules:
                before = moved(move, stack_of(fqn), boundary)
                modules[fqn].forward = _with_argument(modules[fqn], argument, before)
        if last in modules:
            behind = moved(sharding.spec.outputs[last], stack_of(last), boundary)
            modules[last].forward = _with_output(modules[last], behind)

    def between(stack: str, length: int) -> tuple[int, int]:
        if stack not in ends:
            return 0, length
        sizes = part_sizes(length, ranks.size)
        first = sum(sizes[: ranks.rank])
        return first, first + sizes[ranks.rank]

    return between


def _with_argument(module: nn.Module, argument: str, convert: Convert) -> Callable[..., Any]:
    forward, converted = module.forward, _argument_converted(module, argument, convert)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = converted(args, kwargs)
        return forward(*args, **kwargs)

    return run


def _with_output(module: nn.Module, convert: Convert) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _output_converted(forward(*args, **kwargs), convert)

    return run


def _argument_converted(
    module: nn.Module, argument: str, convert: Convert
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    names = list(inspect.signature(module.forward).parameters)
    position = names.index(argument) if argument in names else -1

    def converted(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for index, value in enumerate(args):
            if _is_activation(value) and (not argument or index == position):
                return (*args[:index], convert(whole_of(value)), *args[index + 1 :]), kwargs
        for name, value in kwargs.items():
            if _is_activation(value) and argument in ("", name):
                return args, {**kwargs, name: convert(whole_of(value))}
        return args, kwargs

    return converted


def _output_converted(output: Any, convert: Convert) -> Any:
    leaves, spec = pytree.tree_flatten(output)
    index = next((i for i, leaf in enumerate(leaves) if _is_activation(leaf)), None)
    if index is None:
        return output
    leaves[index] = convert(leaves[index])
    return pytree.tree_unflatten(leaves, spec)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
