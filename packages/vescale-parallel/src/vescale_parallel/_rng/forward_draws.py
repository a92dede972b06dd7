"""What one forward of a model draws, between the borders of some of its modules."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import DryRunError, dry_run, equal_blocks
from vescale_parallel._trace.fake_run import FakeRun, Listener
from vescale_parallel._trace.fake_tensors import ObservationError
from vescale_parallel._trace.random_ops import DrawMode, drawn_shape

from .host_generators import Words, places, total_words, words_between
from .moves import Chosen, Filled, Moves, drawn_by, in_a_row, moves_of

_OUTSIDE = "forward outside of the blocks"
Border = tuple[str, Literal["enter", "leave"]]
Given = tuple[tuple[Any, ...], Mapping[str, Any]]


class UnknownDrawsError(ValueError):
    """It cannot be told how many random numbers a forward draws."""


@dataclass(frozen=True)
class ForwardDraws:
    """How a forward moves the generator of the CPU.

    Attributes:
        borders: Calls of the modules, in order.
        moves: Before each border, since the one before it; and after the last one.
        host: Likewise, of Python's generator and NumPy's; none if nothing is drawn there.
    """

    borders: Sequence[Border] = ()
    moves: Sequence[Moves] = ((),)
    host: Sequence[Words] = ()
    total: Moves = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", in_a_row(self.moves))

    @property
    def words_of_host(self) -> Words:
        """What is drawn of Python's generator and of NumPy's."""
        return total_words(self.host) if self.host else (0, 0)


def draws_of_forward(
    model: nn.Module, given: Given, modules: Collection[str], dtype: torch.dtype | None = None
) -> ForwardDraws:
    """Return what a forward on the CPU draws, seen on tensors without values.

    ``modules`` are those whose borders are of interest, none inside of another; ``dtype`` is
    that of the model's parameters in compute, None for their own.

    Raises:
        UnknownDrawsError: Naming the operator or the module that keeps it from being known.
        ValueError: Naming those that draw from a generator of the program's own, or so from
            Python's or NumPy's that it is not known.
    """
    recorder = _Recorder(modules)

    def prepare(copied: nn.Module) -> None:
        for parameter in copied.parameters() if dtype is not None else ():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        _watch(copied, recorder)

    def listen(run: FakeRun) -> tuple[Listener]:
        recorder.run = run
        return (recorder,)

    args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, given)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's own come when it runs
            dry_run(model, (tuple(args), dict(kwargs)), (), prepare, listen)
    except (DryRunError, ObservationError) as error:
        raise UnknownDrawsError(f"forward does not run on shapes alone: {error}") from error
    if recorder.own_generators:
        draw = recorder.own_generators[0]
        raise ValueError(
            f"{draw.name} in {draw.fqn!r} draws from a generator of its own (generator=...), "
            "which every stage and data-parallel rank of a pipeline would move by itself, and "
            "draw the same numbers for other rows; draw from torch's default generator, or "
            "before the model is called, or use pipeline_parallel.size 1"
        )
    if recorder.uncounted is not None:
        raise recorder.uncounted
    for first, others in equal_blocks(model):
        recorder.repeat(first, others)
    moves = tuple(map(_moves, recorder.drawn))
    host = tuple(recorder.host) if any(map(any, recorder.host)) else ()
    return ForwardDraws(tuple(recorder.borders), moves, host)


def _moves(drawn: Sequence[_Draw]) -> Moves:
    return in_a_row(map(_moves_of, drawn))


def _moves_of(draw: _Draw) -> Moves:
    found = [None] if draw.drawn is None else map(moves_of, draw.drawn)
    known = [each for each in found if each is not None]
    if draw.drawn is None or len(known) < len(draw.drawn):
        raise UnknownDrawsError(
            f"how many numbers {draw.name} draws, in {draw.fqn!r}, may depend on values"
        )
    return in_a_row(known)


@dataclass(frozen=True)
class _Draw:
    """An operator that draws: its name, the module that calls it, and what."""

    name: str
    fqn: str
    drawn: tuple[Filled | Chosen, ...] | None


class _Recorder(Listener):
    """Notes borders and what is drawn between them; ``run`` is what it listens to.

    Attributes:
        own_generators: Draws that are from no default generator.
        host: Words of Python's generator and NumPy's before each border, and after the last one.
        uncounted: What says that these are not known.
    """

    run: FakeRun

    def __init__(self, modules: Collection[str]) -> None:
        self.own_generators: list[_Draw] = []
        self.borders: list[Border] = []
        self.drawn: list[list[_Draw]] = [[]]
        self.host: list[Words] = []
        self.uncounted: ValueError | None = None
        self._host_at = places()
        self._modules = frozenset(modules)

    def begin(self) -> None:
        """Forward begins."""
        self._host_at = places()

    def end(self) -> None:
        """Forward has ended."""
        self._note_host(_OUTSIDE)

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._cross(fqn, "enter")

    def left(self, fqn: str, output: Any) -> None:
        self._cross(fqn, "leave")

    def raised(self, fqn: str) -> None:
        self._cross(fqn, "leave")

    def drew(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        draw = _Draw(str(func), self.run.fqn, drawn_by(func, args, kwargs))
        generators = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        if any(each is not torch.default_generator for each in generators):
            self.own_generators.append(draw)
        self.drawn[-1].append(draw)

    def repeat(self, first: str, others: Sequence[str]) -> None:
        """Have modules draw what an equal one drew, which was not run again for them."""
        drawn: list[_Draw] | None = None
        host: Words = (0, 0)
        for index, (fqn, kind) in enumerate(self.borders):
            if kind != "leave":
                continue
            if fqn == first:
                drawn, host = self.drawn[index], self.host[index]
            elif fqn in others and drawn is not None:
                self.drawn[index], self.host[index] = drawn, host

    def _cross(self, fqn: str, kind: Literal["enter", "leave"]) -> None:
        if fqn in self._modules:
            self._note_host(repr(fqn) if kind == "leave" else _OUTSIDE)
            self.borders.append((fqn, kind))
            self.drawn.append([])

    def _note_host(self, where: str) -> None:
        before, self._host_at = self._host_at, places()
        try:
            words = words_between(before, self._host_at, where)
        except ValueError as error:
            words, self.uncounted = (0, 0), error
        self.host.append(words)


def _watch(model: nn.Module, recorder: _Recorder) -> None:
    forward = model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        recorder.begin()
        with _Watching(recorder):
            output = forward(*args, **kwargs)
        recorder.end()
        return output

    model.forward = run


class _Watching(DrawMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._recorder.drew(func, args, kwargs)
        if not isinstance(args[0], Tensor) and drawn_shape(func, args) == ():
            # Code that decides by a random number, such as to leave out a layer, needs a
            # value; by custom a layer is left out if the number is small.
            return torch.tensor(1.0)
        return func(*args, **kwargs)
