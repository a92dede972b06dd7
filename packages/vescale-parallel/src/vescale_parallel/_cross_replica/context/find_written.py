"""What a model writes to buffers and attributes, and how one device's is made of ranks' values.

The whole model runs twice, and each rank once. The second run and those of ranks begin with
multiples of what the first one left: so a sum on top of what was there is told from one in its
place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from vescale_parallel._model.copies import tensors_in_attributes
from vescale_parallel._model.fqns import generalize
from vescale_parallel._verify.compared_results import close, largest_of

from .leaving import part_of_whole
from .slices import SequenceSlices
from .written import Combination, Place, held_by, write

# By module, name, and place among the tensors that are in the structure of that name.
Held = tuple[str, str, int]
State = dict[Held, Tensor]
Stacks = Collection[str]


def state_of(model: nn.Module, wanted: Collection[Held] | None = None) -> State:
    """Return copies of the tensors that modules hold in buffers and attributes."""
    found: State = {}
    counts = Counter[tuple[str, str]]()
    for fqn, name, x in _held(model):
        at = fqn, name, counts[fqn, name]
        counts[fqn, name] += 1
        if type(x) in (Tensor, nn.Buffer) and (wanted is None or at in wanted):
            found[at] = x.detach().clone()
    return found


def _held(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for fqn, module in model.named_modules():
        yield from ((fqn, name, x) for name, x in module._buffers.items() if x is not None)
    yield from tensors_in_attributes(model)


class Writes:
    """What runs of the whole model wrote, one after the other.

    Attributes:
        once: After the first one, what is not as it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = state_of(model)
        self.once: State = {}

    def note(self, model: nn.Module) -> None:
        """Note what the first run wrote."""
        self.once = {
            at: x
            for at, x in state_of(model).items()
            if at not in self._before or not is_close(self._before[at], x)
        }

    @property
    def multiples(self) -> State:
        """What a second run begins with, unlike what it writes if it adds nothing."""
        return {at: x + x if x.dtype != torch.bool else x for at, x in self.once.items()}

    def combinations(
        self, model: nn.Module, parts: Sequence[State], slices: SequenceSlices, stacks: Stacks
    ) -> dict[Place, Combination]:
        """Return how what a second run wrote is made of what ranks wrote, from the same state."""
        return laws_of(self.multiples, state_of(model, self.once), parts, slices, stacks)


def begin_with(model: nn.Module, state: State) -> None:
    """Write what another run left, as far as it is no part of a structure."""
    for (fqn, name, _), x in state.items():
        module = model.get_submodule(fqn)
        is_held = held_by(module, name) is not None
        if is_held or vars(module).get(name) is None:
            write(module, name, x.clone())


def laws_of(
    before: State,
    whole: State,
    parts: Sequence[State],
    slices: SequenceSlices,
    stacks: Stacks,
) -> dict[Place, Combination]:
    """Return how what differs in ranks' blocks becomes that of the whole, where there is a way."""
    inside, combinations = tuple(f"{stack}." for stack in stacks), dict[Place, Combination]()
    for at, expected in whole.items():
        fqn, name, _ = at
        found = [part[at] for part in parts if at in part]
        if not f"{fqn}.".startswith(inside) or len(found) < len(parts):
            continue
        if all(is_close(x, expected) for x in found):
            continue
        combination = _combination(before.get(at), expected, found, slices)
        if combination is not None:
            combinations.setdefault((generalize(fqn), name), combination)
    return combinations


def _combination(
    before: Tensor | None, whole: Tensor, found: Sequence[Tensor], slices: SequenceSlices
) -> Combination | None:
    if any(x.shape != whole.shape for x in found):
        return _gathering(whole, found, slices)
    if whole.dtype == torch.bool:
        return None
    begin = torch.zeros_like(whole) if before is None else before
    if begin.shape != whole.shape:
        return None
    if is_close(_total(found), whole):
        return Combination("sum")
    if is_close(begin + _total([x - begin for x in found]), whole):
        return Combination("added")
    if not whole.is_floating_point():
        return None
    shares = [size / slices.length for size in slices.sizes]
    mean = _total([x * share for x, share in zip(found, shares, strict=True)])
    return Combination("mean") if is_close(mean, whole) else None


def _gathering(
    whole: Tensor, found: Sequence[Tensor], slices: SequenceSlices
) -> Combination | None:
    combinations = set[Combination]()
    for rank, x in enumerate(found):
        if x.dim() != whole.dim():
            return None
        try:
            where = part_of_whole(tuple(whole.shape), x, slices, rank, "")
        except ValueError:
            return None
        if where is not None:
            combinations.add(Combination("gathered", *where))
    return combinations.pop() if len(combinations) == 1 else None


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([*parts]).sum(0, dtype=parts[0].dtype)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether numbers agree up to rounding, and others are the same."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    return torch.equal(found, expected) or close(found, expected, largest_of(expected))


def first_other(whole: State, state: State, stacks: Stacks) -> tuple[str, str] | None:
    """Return the module and the name of the first value that is not one device's.

    What is behind the blocks may hold sliced tensors, which are no state.
    """
    inside = tuple(f"{stack}." for stack in stacks)
    for at, expected in whole.items():
        found = state.get(at)
        is_other = (
            f"{at[0]}.".startswith(inside) if found is None else not is_close(found, expected)
        )
        if is_other:
            return at[0], at[1]
    return None
