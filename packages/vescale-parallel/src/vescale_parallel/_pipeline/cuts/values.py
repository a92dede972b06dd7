"""What crosses a cut of a pipeline, by names that all stages have for it.

[Note: names of values]
A tensor that one stage computes is a placeholder on the next ones, so that both need a name for
it. What a module with parameters returns is called by that module, the number of its call and the
place in its output. What code between modules computes from such tensors is called by the
function, the names of what it was given, and how often that was called so far. Tensors of the
batch alone have no name: every stage computes them.

[Note: what crosses a cut]
Before the first pass with a new form of call the last stage runs forward with placeholders for
all that has parameters, and sees when each is made and used. The cut before a block is crossed by
what that block is called with, told by its place among the arguments, and by what was made before
and is used later, told by its name. All else is made from the batch again, or is not needed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._loss.output import is_loss
from vescale_parallel._torch_private import pytree

# Functions that look at the shape of one argument only, by its place. What they return is right on
# every stage.
_SHAPE_OF: dict[Callable[..., Any], int] = {
    **dict.fromkeys((torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like), 0),
    **dict.fromkeys((Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full), 0),
    **dict.fromkeys((Tensor.new_tensor,), 0),
    **dict.fromkeys((Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.type_as), 1),
}
_WRITES_BY_NAME = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")

Name = tuple[Any, ...]
# What crosses one cut: a place among the arguments of the block behind it, or a name.
Crossing = tuple[int | Name, ...]
# Of every block that a stage may begin with.
Cuts = Mapping[int, Crossing]
_NEVER, _AT_THE_END = -1, 1 << 60


class Values:
    """The named values of one run of forward.

    Args:
        wanted: Names of those that are kept.

    Attributes:
        tensors: Those kept, by name.
        blocks_called: Number of blocks that have been called.
    """

    def __init__(self, wanted: Collection[Name] = ()) -> None:
        self.wanted = frozenset(wanted)
        self.tensors: dict[Name, Tensor] = {}
        self.blocks_called = 0
        self._calls: Counter[Name] = Counter()
        # Plain tensors that code wrote placeholders' values to.
        self.written: list[Tensor] = []

    @property
    def has_derived(self) -> bool:
        """Whether something is wanted that code between modules computes."""
        return any(name[0] == "function" for name in self.wanted)

    def of_call(self, fqn: str) -> Name:
        """Return the name of the next call of a module; of its results ``(*name, place)``."""
        return ("module", fqn, self._number(("module", fqn)))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the numbers of calls as they are: what runs only finds out shapes."""
        calls = self._calls.copy()
        try:
            yield
        finally:
            self._calls = calls

    def of_function(self, func: Callable[..., Any], given: Sequence[Name]) -> Name:
        """Return the name of a call of a function on named values."""
        kind = ("function", _name_of(func), *given)
        return (*kind, self._number(kind))

    def made(self, name: Name, tensor: Tensor) -> None:
        """Note that a value was computed."""
        if name in self.wanted:
            self.tensors[name] = tensor

    def used(self, name: Name) -> None:
        """Note that a value is needed now."""

    def block_called(self, index: int, leaves: Sequence[Any]) -> None:
        """Note what a block is called with."""

    def release(self) -> None:
        """Make plain tensors of what became placeholders because code wrote to it."""
        for tensor in self.written:
            tensor.__class__ = Tensor
        self.written = []

    def _number(self, kind: Name) -> int:
        self._calls[kind] += 1
        return self._calls[kind] - 1


class ObservedValues(Values):
    """Sees what would cross a cut before any block, see [Note: what crosses a cut]."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Name, int] = {}
        self._used: dict[Name, int] = {}
        self._arguments: dict[int, list[tuple[int, Name]]] = {}

    def made(self, name: Name, tensor: Tensor) -> None:
        """Note when a value was computed."""
        self._made[name] = self.blocks_called

    def used(self, name: Name) -> None:
        """Note when a value is needed, which is when a block behind all cuts until now runs."""
        self._used[name] = self.blocks_called

    def block_called(self, index: int, leaves: Sequence[Any]) -> None:
        """Note which arguments of a block are values, each once."""
        found: dict[int, tuple[int, Name]] = {}
        for place, leaf in enumerate(leaves):
            name = getattr(leaf, "known_as", None)
            # Distinct tensors: one that is given twice crosses once.
            if name is not None and id(leaf) not in found:
                found[id(leaf)] = (place, name)
        self._arguments[index] = [*found.values()]

    def cuts(self, output: Any, *, losses_only: bool) -> Cuts:
        """Return what crosses the cut before every block.

        ``output`` is what forward returned, of which scalars or all will be looked at.
        """
        used = dict(self._used)
        for leaf in pytree.tree_leaves(output):
            name = getattr(leaf, "known_as", None)
            if name is not None and (is_loss(leaf) or not losses_only):
                used[name] = _AT_THE_END
        return {index: self._crossing(index, used) for index in self._arguments}

    def _crossing(self, index: int, used: Mapping[Name, int]) -> Crossing:
        places = self._arguments[index]
        given = {name for _, name in places}
        others = [
            name
            for name, when in self._made.items()
            # What a block itself is called with is needed when it counts as called.
            if when <= index < used.get(name, _NEVER) and name not in given
        ]
        return (*(place for place, _ in places), *others)


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    # Of a property: Tensor.T.__get__.
    owner = getattr(func, "__self__", None)
    return f"{getattr(owner, '__name__', '')}.{name}" if name.startswith("__") else name


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes to its first argument."""
    name = getattr(func, "__name__", "")
    return name in _WRITES_BY_NAME or (name.endswith("_") and not name.endswith("__"))


def versions_of(leaves: Sequence[Any]) -> Iterator[tuple[Tensor, int]]:
    """Yield plain tensors with the number of writes to them so far."""
    for leaf in leaves:
        if type(leaf) is Tensor and not leaf.is_inference():
            yield leaf, leaf._version


def without_shape_questions(
    func: Callable[..., Any],
    args: Sequence[Any],
    is_value: Callable[[object], bool],
    plain: Callable[[Tensor], object] = lambda tensor: None,
) -> Sequence[Any]:
    """Return the arguments of a function, with ``plain`` of what it asks the shape of alone."""
    place = _SHAPE_OF.get(func)
    if place is None or place >= len(args) or not is_value(args[place]):
        return args
    return (*args[:place], plain(args[place]), *args[place + 1 :])
