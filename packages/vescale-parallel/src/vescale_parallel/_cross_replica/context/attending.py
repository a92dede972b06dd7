"""Which blocks may compute on slices of a sequence, by what one forward of the whole does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.copies import discard, snapshot
from vescale_parallel._model.random_copies import InDouble, sharing_copy
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.region import Region

from .behind import Behind
from .blocks import name_of
from .draws import DrawKey, WholeDraw
from .leaving import Leaving
from .shown import shown_modules
from .slicing import Slicing
from .watch import ForwardWatch


class NotSlicedError(ValueError):
    """A model computes something else on slices, or cannot be compared.

    Attributes:
        raised: What its code raised, to be said after what to do about it.
        where: The module whose code it is, as far as is known.
    """

    def __init__(self, why: str, raised: str = "", where: str = "") -> None:
        super().__init__(why)
        self.raised, self.where = raised, where


def attending_stacks(region: Region, base: nn.Module) -> tuple[Slicing, ForwardWatch]:
    """Return the stacks in which all blocks attend, the modules that do, and what is drawn.

    Raises:
        NotSlicedError: If there are none, or of a draw that cannot be told from another one.
    """
    watch = ForwardWatch()
    inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in region.inputs]
    args, kwargs = snapshot(pytree.tree_unflatten(inputs, region.spec))
    watched = sharing_copy(base)
    try:
        with InDouble():
            watch.run(watched, args, kwargs)
    # Arbitrary user code: whatever it raises means that it cannot be compared.
    except Exception as error:
        raise NotSlicedError(
            f"it cannot be compared with one device: {type(error).__name__}: {error}"
        ) from error
    finally:
        discard(watched)
    found = [
        stack for stack in block_stacks(base) if {*stack} <= watch.attending | {*watch.multiplying}
    ]
    if not found:
        raise NotSlicedError(
            "found no list of two or more blocks that all attend, by "
            "F.scaled_dot_product_attention, transformers' attention interface, or a product of "
            "queries with keys, by which a rank attends to all of the sequence"
        )
    stacks = frozenset(map(name_of, found))
    inside = tuple(f"{stack}." for stack in stacks)
    attending = frozenset(fqn for fqn in watch.modules if fqn.startswith(inside))
    once = {fqn: next(iter(at)) for fqn, at in watch.in_attention.items() if len(at) == 1}
    leaving, behind = Leaving(watch.returned), watch.behind.behind()
    behind = behind if behind.stack in stacks else Behind()
    blocks = (block for stack in found for block in stack if block not in watch.attending)
    written = {fqn for block in blocks for fqn in watch.multiplying[block]}
    shown = shown_modules(written, watch.token_wise, watch.given, base)
    draws = _draws(watch, stacks)
    found = Slicing(stacks, attending, draws, once, leaving=leaving, behind=behind, shown=shown)
    found = replace(found, last=watch.last, unequal=frozenset(watch.unequal))
    return found, watch


def shown_too(
    where: str, slicing: Slicing, watch: ForwardWatch, base: nn.Module
) -> Slicing | None:
    """Return the same with more modules shown whole sequences, in all blocks of a stack.

    Those that attend, as of T5, which makes biases of the length that attention is given. And if
    they are shown already, those around them, which may make masks for them, up to their blocks.
    None if it is none of these.

    Args:
        where: The module that is not one device's on slices.
        slicing: With which it is not.
        watch: Of a forward of the whole model.
        base: The model.
    """
    stack = next((each for each in slicing.stacks if where.startswith(f"{each}.")), None)
    found = (fqn for fqn in slicing.attending if f"{where}.".startswith(f"{fqn}."))
    where = next(found, where)
    while where in slicing.shown.modules:
        where = where.rpartition(".")[0]
    is_around = any(each.startswith(f"{where}.") for each in slicing.shown.modules)
    if stack is None or not where.startswith(f"{stack}."):
        return None
    if where not in slicing.attending and not is_around:
        return None
    within = where.removeprefix(f"{stack}.").partition(".")[2]
    alike = {
        fqn
        for fqn in watch.token_wise
        if fqn.startswith(f"{stack}.")
        and fqn.removeprefix(f"{stack}.").partition(".")[2] == within
    }
    shown = shown_modules(slicing.shown.modules | alike, watch.token_wise, watch.given, base)
    noted: dict[str, Any] = {"dims": {}, "drawn": {}, "across": {}}
    return replace(slicing, shown=shown, leaving=Leaving(watch.returned), **noted)


def _draws(watch: ForwardWatch, stacks: frozenset[str]) -> dict[DrawKey, WholeDraw]:
    draws: dict[DrawKey, WholeDraw] = {}
    for stack in sorted(stacks & {*watch.draws}):
        for key, whole in watch.draws[stack].items():
            if whole is None:
                raise NotSlicedError(
                    f"{key[0]!r} draws random numbers of several shapes in one call of the model, "
                    "of which it cannot be told what ranks have"
                )
            draws[key] = whole
    return draws
