"""What calls of one form slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from vescale_parallel._trace.extents import Extent
from vescale_parallel._trace.memory_order import NotedOrder, Order

from .behind import Behind
from .draws import DrawKey, DrawnDim, ExtentOf, WholeDraw
from .leaving import Leaving
from .shown import Shown
from .slices import SequenceSlices, sequence_dim
from .written import Combination, Place

_ROWS = 3  # of activations (batch, sequence, features)
_FEWEST = 2  # positions of a slice: some code takes one position for a step of generation
LEAVE_OUT = "leave context_parallel out of the plan"


class ShortSequenceError(ValueError):
    """A sequence has too few positions to be shared out."""


@dataclass(frozen=True)
class Slicing:
    """What calls of one form slice.

    Attributes:
        stacks: Those whose blocks compute on slices; others run as they are.
        attending: Modules in them that call attention, the innermost ones.
        draws: What one device drew between the beginning and the end of a stack.
        in_attention: Which draw a module has attention make.
        dims: Of the tensors that blocks are given, by block, place among its arguments and number
            of dims: the one along the sequence, None of what stays whole.
        drawn: Of what ranks draw, likewise.
        leaving: What blocks return, or is collected in them, beside their activations.
        behind: What runs on slices behind the last stack.
        written: How what modules in them write becomes that of whole sequences.
        returned_at: By stack, the place among what a block returns of the activation that the next
            one is given, where it is not the first.
        last: Name of the stack that ran last, behind which no blocks read what it returns; None if
            it ran more than once.
        unequal: Of the modules that attend, those with keys of another length than queries.
        across: Whether a module attends to another sequence than its own.
        shown: Which modules in them compute on sliced tensors, as attention that is written out.
    """

    stacks: frozenset[str] = frozenset()
    attending: frozenset[str] = frozenset()
    draws: Mapping[DrawKey, WholeDraw] = field(default_factory=dict[DrawKey, WholeDraw])
    in_attention: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    dims: dict[tuple[str, int, int], int | None] = field(
        default_factory=dict[tuple[str, int, int], "int | None"]
    )
    drawn: dict[DrawKey, DrawnDim] = field(default_factory=dict[DrawKey, DrawnDim])
    leaving: Leaving = field(default_factory=Leaving)
    behind: Behind = field(default_factory=Behind)
    written: Mapping[Place, Combination] = field(default_factory=dict[Place, Combination])
    returned_at: Mapping[str, int] = field(default_factory=dict[str, int])
    last: str | None = None
    unequal: frozenset[str] = frozenset()
    across: dict[str, bool] = field(default_factory=dict[str, bool])
    shown: Shown = field(default_factory=Shown)

    @cached_property
    def drawing(self) -> frozenset[str]:
        """Modules that draw."""
        return frozenset(fqn for fqn, *_ in self.draws)

    def drawn_now(
        self,
        key: DrawKey,
        shape: tuple[int, ...],
        order: Order,
        extent_of: ExtentOf,
        *,
        in_blocks: bool,
    ) -> tuple[dict[int, Extent], NotedOrder] | None:
        """Return what of one device's numbers a rank's are, by dim, and how these lie in memory.

        None if activations are whole, or it draws alike.

        Raises:
            ValueError: If they are not drawn as when the model was compared with one device.
        """
        whole, fqn = self.draws.get(key), key[0]
        if whole is None and in_blocks:
            raise ValueError(
                f"context_parallel: {fqn!r} draws random numbers of shape {shape}, which it "
                "did not when the model was compared with one device"
            )
        if whole is None:
            return None
        if key not in self.drawn:
            self.drawn[key] = DrawnDim.between(whole, shape, order, extent_of)
        noted = self.drawn[key]
        extents = noted.extents(shape, extent_of, fqn)
        return (extents, noted.order) if extents else None

    def activation(self, stack: str, leaves: Sequence[Any]) -> int | None:
        """Return the place of the activation among what a block of a stack returns."""
        at = self.returned_at.get(stack)
        if at is not None and at < len(leaves) and is_activation(leaves[at]):
            return at
        return activation_of(leaves)

    def dim(
        self,
        fqn: str,
        place: int,
        x: Any,
        length: int,
        is_whole: bool = False,
        *,
        is_compared: bool = True,
    ) -> int | None:
        """Return the dim that a block slices of what it is given; none of what ``is_whole``.

        A comparison tells whether a guess was right, so later calls make none: ``is_compared``.

        Raises:
            ValueError: If that dim is not as long as the sequence, as it was, or would be sliced
                and was not given when the model was compared.
        """
        if not isinstance(x, Tensor):
            return None
        guess = None if is_whole else sequence_dim(x, length)
        at = fqn, place, x.dim()
        if guess is not None and at not in self.dims and not is_compared:
            raise ValueError(
                f"context_parallel: {fqn!r} is given a tensor along the sequence, of shape "
                f"{tuple(x.shape)}, which it was not given when the model was compared with one "
                "device, as a mask that is made only of batches with padding; make it in every "
                f"call, or give it to the model as an argument, or {LEAVE_OUT}"
            )
        found = self.dims.setdefault(at, guess)
        if found is not None and x.shape[found] != length:
            raise ValueError(
                f"context_parallel: expected {fqn!r} to be called with a tensor of {length} "
                f"positions in dim {found}, as it was when the model was compared with one "
                f"device, got shape {tuple(x.shape)}"
            )
        return found


def activation_of(leaves: Iterable[Any]) -> int | None:
    """Return the place of the first activation among leaves, None if there is none."""
    return next((at for at, x in enumerate(leaves) if is_activation(x)), None)


def given_activation(fqn: str, leaves: Sequence[Any]) -> int:
    """Return the place of the activation among what a block is given.

    Raises:
        ValueError: If there is none that has positions.
    """
    index = activation_of(leaves)
    if index is None or leaves[index].dim() < _ROWS:
        raise ValueError(
            f"context_parallel: expected {fqn!r} to be called with activations (batch, "
            "sequence, features)"
        )
    return index


def is_too_short(leaves: Sequence[Any], size: int, *, is_compared: bool) -> bool:
    """Whether what a first block is given has too few positions for ranks to share them.

    Raises:
        ShortSequenceError: If so where the model is compared with one device.
    """
    index, fewest = activation_of(leaves), _FEWEST * size
    if index is None or leaves[index].dim() < _ROWS or leaves[index].shape[1] >= fewest:
        return False
    if is_compared:
        raise ShortSequenceError(
            f"context_parallel.size {size} needs sequences of {fewest} positions or more, got "
            f"activations of shape {tuple(leaves[index].shape)}"
        )
    return True


def needs_gradient(x: Any) -> bool:
    """Whether a block may be given by an encoder what it has besides its activation.

    Tables that are sliced are made of positions, and need no gradients.
    """
    return isinstance(x, Tensor) and x.requires_grad


def is_activation(x: Any) -> bool:
    """Whether something may be activations."""
    return isinstance(x, Tensor) and x.is_floating_point()


def check_returned(fqn: str | None, x: Tensor, slices: SequenceSlices, rank: int) -> None:
    """Refuse activations that the last block returned, if they are of other positions.

    Raises:
        ValueError: If they are not as many as this rank's.
    """
    shape, own = tuple(x.shape), slices.sizes[rank]
    if shape[1:2] != (own,):
        raise ValueError(
            f"context_parallel: {fqn!r} returned activations of shape {shape}, not this rank's "
            f"{own} of {slices.length} positions"
        )
