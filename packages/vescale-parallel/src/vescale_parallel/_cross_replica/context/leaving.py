"""What leaves blocks beside their activations: scores of routers, states of each layer.

A block returns it beside its activation, or hooks within blocks collect it and a module around
them returns it, as transformers does. Where a model is run whole to be compared, the shapes of
both are noted. What is shorter on a rank by its part of the sequence is gathered there, before
code that computes on whole sequences has it. Whether that was right is seen in what the model
returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .conversions import gather_slices
from .slices import ContextRanks, SequenceSlices

# A module, the place among the leaves that it returns, and dims of what is there.
Place = tuple[str, int, int]
Shapes = Mapping[Place, tuple[int, ...]]


def shapes_of(fqn: str, leaves: Sequence[Any]) -> dict[Place, tuple[int, ...]]:
    """Return the shapes of the tensors among what a module returns."""
    tensors = ((at, x) for at, x in enumerate(leaves) if isinstance(x, Tensor))
    return {(fqn, at, x.dim()): tuple(x.shape) for at, x in tensors}


def around_one_stack(model: nn.Module, stacks: Sequence[Sequence[str]]) -> list[str]:
    """Return the modules that contain the blocks of exactly one stack, innermost first."""
    names = [fqn for fqn, _ in model.named_modules()]
    blocks = {fqn for stack in stacks for fqn in stack}
    found = list[str]()
    for fqn in reversed(names):
        prefix = f"{fqn}." if fqn else ""
        within = [stack for stack in stacks if stack[0].startswith(prefix)]
        if len(within) == 1 and not any(f"{fqn}.".startswith(f"{block}.") for block in blocks):
            found.append(fqn)
    return found


@dataclass(frozen=True)
class Leaving:
    """What modules return beside activations, in calls of one form.

    Attributes:
        whole: Shapes on one device, where the model is compared with it.
        dims: The one dim that is along the sequence, and whether within another one, as in
            (batch * sequence); None of what ranks have whole.
        collected: Of modules around blocks, by number of dims: likewise, for all that they return,
            of which there are more where there are more blocks than were compared.
    """

    whole: Shapes = field(default_factory=dict[Place, "tuple[int, ...]"])
    dims: dict[Place, tuple[int, bool] | None] = field(
        default_factory=dict[Place, "tuple[int, bool] | None"]
    )
    collected: Mapping[tuple[str, int], tuple[int, bool]] = field(
        default_factory=dict[tuple[str, int], "tuple[int, bool]"]
    )

    def gather(
        self,
        fqn: str,
        leaves: list[Any],
        slices: SequenceSlices,
        ranks: ContextRanks,
        *,
        activation: int | None = None,
        sums: bool = False,
        kept: int | None = None,
    ) -> bool:
        """Gather what a module returns of slices, in place; return whether there was anything.

        ``sums`` says that other blocks read it, see :func:`.conversions.gather_slices`. What was
        collected between blocks stays as it is if it has ``kept`` positions: tensor-parallel
        ranks have parts of it, and a model that reads these was refused.

        Raises:
            ValueError: If it is not this rank's part of what one device returned.
        """
        is_changed = False
        for at, x in enumerate(leaves):
            if not isinstance(x, Tensor) or at == activation:
                continue
            found = self._found(fqn, at, x, slices, ranks)
            if found is not None and (kept is None or x.shape[found[0]] != kept):
                leaves[at] = gathered_part(x, *found, slices, ranks, fqn, sums=sums)
                is_changed = True
        return is_changed

    def _found(
        self, fqn: str, at: int, x: Tensor, slices: SequenceSlices, ranks: ContextRanks
    ) -> tuple[int, bool] | None:
        """Return the dim of a tensor that is to be gathered, and whether it is within another."""
        collected = self.collected.get((fqn, x.dim()))
        if collected is not None:  # beside what is whole, as what left the last block
            dim, is_folded = collected
            return None if not is_folded and x.shape[dim] == slices.length else collected
        place = fqn, at, x.dim()
        if place not in self.whole:
            return None
        if place not in self.dims:
            self.dims[place] = part_of_whole(self.whole[place], x, slices, ranks.rank, fqn)
        return self.dims[place]


def part_of_whole(
    whole: tuple[int, ...], x: Tensor, slices: SequenceSlices, rank: int, fqn: str
) -> tuple[int, bool] | None:
    differing = [dim for dim, size in enumerate(x.shape) if size != whole[dim]]
    if not differing:
        return None
    dim = differing[0]
    count, rest = divmod(x.shape[dim], slices.sizes[rank])
    if len(differing) > 1 or rest or whole[dim] != count * slices.length:
        raise ValueError(
            f"context_parallel: {fqn!r} returns a tensor of shape {tuple(x.shape)}, of {whole} on "
            "one device, which is not this rank's part of the sequence in one dim"
        )
    return dim, count > 1 or dim == 0  # of one row, (batch * sequence) is as (sequence,)


def gathered_part(
    x: Tensor,
    dim: int,
    is_folded: bool,
    slices: SequenceSlices,
    ranks: ContextRanks,
    fqn: str,
    *,
    sums: bool = False,
) -> Tensor:
    own = slices.sizes[ranks.rank]
    count, rest = divmod(x.shape[dim], own)
    if rest or (count > 1 and not is_folded):
        raise ValueError(
            f"context_parallel: expected {fqn!r} to return {own} of {slices.length} positions in "
            f"dim {dim}, as it did when the model was compared with one device, got shape "
            f"{tuple(x.shape)}"
        )
    if not is_folded:
        return gather_slices(x, dim, slices, ranks, sums=sums)
    unfolded = x.unflatten(dim, (count, own))
    return gather_slices(unfolded, dim + 1, slices, ranks, sums=sums).flatten(dim, dim + 1)
