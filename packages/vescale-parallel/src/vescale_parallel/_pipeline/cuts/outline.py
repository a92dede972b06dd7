"""What a module does to the forms of its arguments, found out without its parameters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.dims.rows_by_tokens import sizes_of_elements
from vescale_parallel._model.copies import copied_without_hooks, on_meta, snapshot
from vescale_parallel._model.hook_readers import modules_in_closures
from vescale_parallel._model.kept_outside import nothing_kept_outside
from vescale_parallel._model.structures import open_objects
from vescale_parallel._torch_private import TorchDispatchMode, pytree
from vescale_parallel._trace.generators import untouched_generators

from .hooks import without_global_hooks

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Argument:
    """A tensor that a module is given, by its place among these, and returns."""

    place: int


@dataclass(frozen=True)
class Outline:
    """What a module does to the forms of tensors.

    Attributes:
        output: With tensors on the meta device, and :class:`Argument` for what it was given.
        written: Places of the tensors it is given that it writes to.
        lent: Modules outside of it that it calls, which it is given, by name: one for each call.
    """

    output: Any
    written: Sequence[int]
    lent: Sequence[str] = ()


def outline_of(
    skeleton: nn.Module,
    fqn: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lent: list[str] | None = None,
) -> Outline:
    """Run a module without parameters' values.

    On the meta device; a module whose code reads values, that of experts for example, on zeros.

    Args:
        skeleton: A copy of the module on the meta device.
        fqn: Its name.
        args: What it is called with.
        kwargs: Likewise.
        lent: Where modules that it is given note their calls; emptied before each attempt.

    Raises:
        ValueError: If it runs on neither.
    """
    given, noted = (args, dict(kwargs)), [] if lent is None else lent
    with (
        without_global_hooks(),
        nothing_kept_outside(skeleton),
        # Nothing has a gradient here, which torch's checkpoint warns of.
        warnings.catch_warnings(action="ignore"),
    ):
        return _found(skeleton, fqn, given, noted)


def _found(skeleton: nn.Module, fqn: str, given: Given, lent: list[str]) -> Outline:
    failed: Exception | None = None
    # Then with tensors that code makes by itself, an index say, on that device, too.
    for default in (contextlib.nullcontext(), torch.device("meta")):
        try:
            # Tensors of inference mode do not tell that they are written to.
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                _GroupedShapes(),
                untouched_generators(),
                default,
            ):
                lent.clear()
                return _tried(skeleton, given, on_meta)
        except Exception as error:
            failed = failed or error
    try:
        held = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        device = held[0].device if held else torch.device("cpu")
        with torch.inference_mode(False), torch.no_grad(), device:
            copied = _of_zeros(skeleton, device)
            devices = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices), untouched_generators():
                lent.clear()
                found = _tried(copied, given, _same_values)
            return Outline(pytree.tree_map_only(Tensor, on_meta, found.output), found.written)
    except Exception as error:  # with values, so more of its own than of shapes
        failed = error
    for name, held in modules_in_closures(skeleton):
        raise ValueError(
            f"{name!r} of {fqn!r} is a function that calls a {type(held).__name__} which is no "
            f"submodule of {fqn!r}: no stage of a pipeline would know that its parameters belong "
            f"there. Make it one, as {fqn}.adapter = ..., and have the function call that"
        ) from failed
    raise ValueError(
        f"pipeline parallelism could not find out the shape that {fqn!r} returns "
        f"without running it: {type(failed).__name__}: {failed}"
    ) from failed


def kind_of(leaf: object) -> object:
    """Return what of an argument the shape of the result may depend on."""
    if isinstance(leaf, Tensor):
        # Sizes of images, which code reads to cut padding off.
        sizes = sizes_of_elements(leaf)
        return leaf.shape, leaf.dtype, None if sizes is None else tuple(leaf.flatten().tolist())
    # By value as far as equal ones can be told, True from 1 as well.
    return (type(leaf), leaf) if isinstance(leaf, bool | int | float | str) else type(leaf)


def _tried(module: nn.Module, given: Given, form: Callable[[Tensor], Tensor]) -> Outline:
    """Run a module on tensors in another form, and on copies of objects that it may change.

    A cache, of which one attempt would otherwise begin with what one that failed has left there.
    """
    copies = snapshot(given)
    leaves = zip(pytree.tree_leaves(copies), pytree.tree_leaves(given), strict=True)
    originals = {id(copy): original for copy, original in leaves if copy is not original}
    found = _run(module, *pytree.tree_map_only(Tensor, form, copies))
    output = pytree.tree_map(lambda leaf: originals.get(id(leaf), leaf), found.output)
    return Outline(output, found.written)


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outline:
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    output = module(*args, **kwargs)
    open_objects(output)
    places = {id(x): place for place, x in enumerate(given)}

    def told(leaf: Tensor) -> Any:
        return Argument(places[id(leaf)]) if id(leaf) in places else leaf

    written = [place for place, x in enumerate(given) if x._version]
    return Outline(pytree.tree_map_only(Tensor, told, output), written)


def _of_zeros(skeleton: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module with zeros: those of parameters share one element."""

    def parameter(like: nn.Parameter) -> nn.Parameter:
        one = torch.zeros((), dtype=like.dtype, device=device)
        return nn.Parameter(one.expand(like.shape), requires_grad=False)

    def buffer(like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, device=device)

    return copied_without_hooks(skeleton, parameter, buffer)


def _same_values(tensor: Tensor) -> Tensor:
    """Return a plain tensor that may be written to: zeros for what another stage has."""
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if type(tensor) is Tensor:
        return made.copy_(tensor).detach().clone()
    return made


class _GroupedShapes(TorchDispatchMode):
    """Answers for grouped matrix products, whose shape function insists on bfloat16."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right = args[:2]
        shape = [left.shape[-2], right.shape[-1]]
        if left.dim() == right.dim():
            offsets: Any = args[2] if len(args) > 2 else (kwargs or {}).get("offs")
            shape.insert(0, left.shape[0] if left.dim() == 3 else len(offsets))
        return left.new_empty(shape, dtype=(kwargs or {}).get("out_dtype") or left.dtype)
