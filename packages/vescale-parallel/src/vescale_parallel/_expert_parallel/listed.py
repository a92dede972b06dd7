"""Modules that hold a list of experts, and the two passes over the forward that calls them.

[Note: two passes] Code that loops over experts wants what one makes of its rows before it comes to
the next. Ranks that have other experts would send tokens once an expert. So forward runs twice. In
the first pass placeholders note the rows that every expert is called with, and return zeros. All
of them are exchanged at once. In the second pass experts return what came back, so the module's
own code weights it and adds it up, in its own order. Gradients of rows go through the first pass,
those of weights through the second. What the module calls before its first expert, a router for
one, runs in the first pass, and gives the second one the same tensors; what it calls after its
last one ends the first pass. Hooks run once therefore. Of what runs in both, buffers and
attributes are those of the second pass, which draws the random numbers of the first once more.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .expert_draws import Back, mark
from .kept_aside import kept_aside

CallsOf = list[list[Tensor]]  # of every expert, what it is called with, or what it made of that


@dataclass(frozen=True)
class ListedExperts:
    """A module whose forward calls experts that are modules in a list of it.

    Attributes:
        fqn: Its name.
        container: That of the list, relative to it; empty if the module is the list.
        names: The experts' names in the list.
        last: Its children that it calls after the last expert only.
        width: Features of a row that an expert is called with; None for those of the module's own.
        made_width: Features of what it makes of one; None for as many.
        draws: Whether forward itself draws random numbers.
        experts_draw: Whether experts do.
    """

    fqn: str
    container: str
    names: tuple[str, ...]
    last: frozenset[str] = frozenset()
    width: int | None = None
    made_width: int | None = None
    draws: bool = False
    experts_draw: bool = False

    @property
    def num_experts(self) -> int:
        """How many."""
        return len(self.names)

    def modules_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the experts."""
        container = module.get_submodule(self.container)
        return [container.get_submodule(name) for name in self.names]

    def fqn_of(self, index: int) -> str:
        """Return the name of an expert in the model."""
        return ".".join(part for part in (self.fqn, self.container, self.names[index]) if part)


def num_on_ranks(num_experts: int, num_ranks: int) -> list[int]:
    """Return how many experts each rank has, the first ones one more where they do not divide."""
    least, more = divmod(num_experts, num_ranks)
    return [least + (rank < more) for rank in range(num_ranks)]


def rank_of(index: int, num_experts: int, num_ranks: int) -> int:
    """Return the rank that has an expert; ranks have consecutive ones."""
    ends = torch.tensor(num_on_ranks(num_experts, num_ranks)).cumsum(0)
    return int(torch.searchsorted(ends, index, right=True))


class _AllCalled(Exception):
    """Ends a first pass."""


class _Placeholder(nn.Module):
    """Takes a module's place in one pass, with its attributes if it may run."""

    def __init__(self, call: Callable[..., Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__["_called"], self.__dict__["_module"] = call, module

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("_module") is None:
            raise AttributeError(f"its forward uses {name!r} of an expert, not the expert")
        return getattr(self.__dict__["_module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(*args, **kwargs)


@dataclass(eq=False)
class FirstPass:
    """What a first pass noted.

    Attributes:
        calls: Of every expert, the rows of each call.
        kept: Of every child, what it returned before the first expert was called, and what has
            generators be where it left them.
        back: Has generators be where they were.
    """

    calls: CallsOf
    kept: dict[str, deque[tuple[Any, Back]]] = field(
        default_factory=dict[str, "deque[tuple[Any, Back]]"]
    )
    back: Back = lambda: None


def first_pass(
    module: nn.Module,
    forward: Callable[..., Any],
    experts: ListedExperts,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mark: Callable[[], Back] = mark,
) -> FirstPass:
    """Run a module with placeholders that note what its experts are called with.

    ``mark`` returns what has it draw once more what it draws from now on.
    """
    here: Callable[[], Back] = mark if experts.draws else lambda: lambda: None
    noted = FirstPass([[] for _ in experts.names], back=here())
    is_called = False

    def called(index: int) -> Callable[..., Tensor]:
        def note(*given: Any, **named: Any) -> Tensor:
            nonlocal is_called
            is_called = True
            if named or len(given) != 1 or not isinstance(given[0], Tensor):
                raise TypeError("expected experts that are called with one tensor, rows")
            noted.calls[index].append(given[0])
            *rows, width = given[0].shape
            return given[0].new_zeros(*rows, experts.made_width or width)

        return note

    def watched(name: str, child: nn.Module) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            if is_called and name in experts.last:
                raise _AllCalled
            if is_called:
                with kept_aside(child.modules()):
                    return child(*given, **named)
            made = child(*given, **named)
            noted.kept.setdefault(name, deque()).append((made, here()))
            return made

        return run

    placeholders = [_Placeholder(called(index)) for index in range(experts.num_experts)]
    with (
        _in_place_of_experts(module, experts, placeholders),
        _children(module, experts, watched),
        kept_aside([module]),
        contextlib.suppress(_AllCalled),
    ):
        forward(*args, **kwargs)
    return noted


def second_pass(
    module: nn.Module,
    forward: Callable[..., Any],
    experts: ListedExperts,
    noted: FirstPass,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a module that calls experts again, which return what they made of the rows noted."""

    def again(name: str, child: nn.Module) -> Callable[..., Any]:
        kept = noted.kept.get(name, deque())

        def run(*given: Any, **named: Any) -> Any:
            if not kept:
                return child(*given, **named)
            made, back = kept.popleft()
            back()
            return made

        return run

    noted.back()
    with _children(module, experts, again):
        return forward(*args, **kwargs)


@contextlib.contextmanager
def _in_place_of_experts(
    module: nn.Module, experts: ListedExperts, placeholders: Sequence[nn.Module]
) -> Iterator[None]:
    held = module.get_submodule(experts.container)._modules
    before = {name: held[name] for name in experts.names}
    try:
        held.update(zip(experts.names, placeholders, strict=True))
        yield
    finally:
        held.update(before)


@contextlib.contextmanager
def _children(
    module: nn.Module, experts: ListedExperts, call: Callable[[str, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Have a module's children but its experts be called otherwise."""
    aside = {experts.container.partition(".")[0]} if experts.container else {*experts.names}
    before = {
        name: child
        for name, child in module._modules.items()
        if child is not None and name not in aside
    }
    try:
        module._modules.update(
            {name: _Placeholder(call(name, child), child) for name, child in before.items()}
        )
        yield
    finally:
        module._modules.update(before)


class PlayedBack:
    """Experts that return what was made of their rows, one call after the other."""

    def __init__(self, fqn: str, made: CallsOf) -> None:
        self._fqn, self._made = fqn, [deque(each) for each in made]

    def take(self, index: int, rows: Tensor) -> Tensor:
        """Return what an expert made of its next rows.

        Raises:
            ValueError: If these are not the rows that it was called with before.
        """
        made = self._made[index].popleft() if self._made[index] else None
        if made is None or made.shape[:-1] != rows.shape[:-1]:
            raise ValueError(
                f"{self._fqn!r} calls experts with other rows when it runs a second time; with "
                "expert_parallel its forward is a function of its inputs, random numbers and what "
                "it keeps in its buffers and attributes"
            )
        return made
