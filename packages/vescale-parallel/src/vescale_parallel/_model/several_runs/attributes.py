"""Plain attributes that forward changes, where forward runs more often than on one device.

[Note: attributes of several runs] Counters, running means and generators of a module's own may be
plain attributes. Every run of a step begins with them as they were before, as it does with
buffers, and what the latest run left stays: a counter counts calls of the model. Lists and dicts
are put back in place, since others may hold them; tensors are put back themselves, as copies if
they were written to. Objects of a program's own classes, a schedule of a temperature for example,
are put back likewise, but not what they hold in turn. Hooks that forward adds, and notes in an
attribute that it did, are taken away with it: the next run would add them once more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vescale_parallel._torch_private import version_of

from .added_hooks import Hooks, HooksBefore

Place = tuple[str, str]
_At = TypeVar("_At")
_What = TypeVar("_What")
_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING = object()
_LIBRARIES = ("torch", "transformers", "numpy", "vescale")
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (bool, int, float, complex, str, type(None))
_VALUES = (*_PLAIN, tuple, Tensor, *_CONTAINERS)


def generator_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return what gets and what sets the state of a generator; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


class _Held:
    """One attribute as it is now: the object, and what is in it if that may change in place."""

    def __init__(self, value: Any, *, copied: bool) -> None:
        self.value, self._inside, self._version, self.was_written = value, None, 0, False
        if isinstance(value, Tensor):
            self._version = version_of(value)
            if copied and not value.requires_grad:
                with torch.inference_mode(False), torch.no_grad():
                    self._inside = value.clone()
        elif isinstance(value, _CONTAINERS):
            self._inside = value.copy()
        elif (generator := generator_of(value)) is not None:
            self._inside = generator[0]()
        else:
            self._inside = dict(vars(value))

    @property
    def is_written(self) -> bool:
        """Whether a tensor was written to since."""
        return isinstance(self.value, Tensor) and version_of(self.value) != self._version

    @property
    def is_copied(self) -> bool:
        """Whether there is a copy of what may change in place."""
        return self._inside is not None

    def is_other(self) -> bool:
        """Whether what is in it is no longer what it was."""
        if isinstance(self.value, _CONTAINERS):
            return _differs(self.value, self._inside)
        generator = generator_of(self.value)
        if generator is not None:
            return pickle.dumps(generator[0]()) != pickle.dumps(self._inside)
        if isinstance(self.value, Tensor):
            return self.is_written
        return _differs(vars(self.value), self._inside)

    def put_inside(self) -> None:
        """Give the object what was in it."""
        inside: Any = self._inside
        if isinstance(self.value, Tensor):
            if self.is_written and inside is not None:
                # Another tensor: backward may have kept what this run left.
                self.was_written, self.value = True, inside.clone()
                self._version = version_of(self.value)
        elif isinstance(self.value, _CONTAINERS):
            if _differs(self.value, inside):
                _fill(self.value, inside)
        elif (generator := generator_of(self.value)) is not None:
            generator[1](inside)
        elif _differs(held := vars(self.value), inside):
            held.update(inside)
            for name in [name for name in held if name not in inside]:
                del held[name]


def _fill(container: Any, inside: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(inside)


def _differs(container: Any, inside: Any) -> bool:
    if len(container) != len(inside):
        return True
    if isinstance(container, set):
        return container != inside
    if isinstance(container, dict):
        if list(container) != list(inside):
            return True
        container, inside = container.values(), inside.values()
    return not _are_same(container, inside)


def _are_same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether objects are the same, one by one; of as many."""
    return all(map(operator.is_, one, other))


@dataclass(frozen=True)
class _Change:
    """What a run left in an attribute; :data:`_MISSING` if it is gone."""

    now: Any
    held: _Held | None


class Attributes:
    """The plain attributes of the modules below one, which its forward may change.

    The first time all tensors are copied, later those that were written to.
    """

    def __init__(self, module: nn.Module, fqn: str = "") -> None:
        start = f"{fqn}." if fqn else ""
        self.modules = [
            (f"{start}{name}".strip("."), vars(each)) for name, each in module.named_modules()
        ]
        self.written: set[Place] | None = None
        self.sizes: list[int] = []
        self.places: list[tuple[Place, dict[str, Any]]] = []
        # Every micro-batch looks at all modules: of lists like these that needs no loops.
        self.of_modules = [held for _, held in self.modules]
        self.names: list[str] = []
        self.of_places: list[dict[str, Any]] = []

    def now(self) -> AttributesBefore:
        """Note the attributes as they are before a run."""
        sizes = [*map(len, self.of_modules)]
        if sizes != self.sizes:
            self.sizes = sizes
            self.places = [
                ((fqn, name), held)
                for fqn, held in self.modules
                for name, value in held.items()
                if name not in _OF_TORCH and not isinstance(value, _CODE)
            ]
            self.names = [name for (_, name), _ in self.places]
            self.of_places = [held for _, held in self.places]
        return AttributesBefore(self)

    def learn(self, written: set[Place]) -> None:
        """Note which tensors runs write to."""
        self.written = written if self.written is None else self.written | written


class AttributesBefore:
    """Attributes as they were before a run of forward."""

    def __init__(self, of: Attributes) -> None:
        self._modules, self._sizes, self._places = of.modules, of.sizes, of.places
        self._of_modules, self._names, self._of_places = of.of_modules, of.names, of.of_places
        self._hooks = HooksBefore(self._modules)
        self._values = self._now()
        self._held = {
            index: _Held(value, copied=of.written is None or of.places[index][0] in of.written)
            for index, value in enumerate(self._values)
            if _is_filled(type(value))
        }

    def _now(self) -> list[Any]:
        return [*map(dict.get, self._of_places, self._names, itertools.repeat(_MISSING))]

    @property
    def written(self) -> set[Place]:
        """Tensors that runs wrote to."""
        return {
            self._places[index][0]
            for index, held in self._held.items()
            if held.was_written or held.is_written
        }

    def put_back(self) -> None:
        """Have modules hold what they held.

        Raises:
            ValueError: If a tensor was written to of which there is no copy.
        """
        for index, held in self._held.items():
            if held.is_written and not held.is_copied:
                fqn, name = self._places[index][0]
                raise ValueError(
                    f"the attribute {name!r} of {fqn or 'the model'!r} was written to by forward, "
                    "and was not by the first call. With recompute, batch.gradient_accumulation "
                    "or pipeline_parallel.size > 1 forward runs several times a step, each time "
                    "from the same attributes; write to it in the first call as well, or outside "
                    "of forward"
                )
            held.put_inside()
            self._values[index] = held.value
        for index in _others(self._now(), self._values):
            if self._values[index] is not _MISSING:
                self._of_places[index][self._names[index]] = self._values[index]
        for (_, name), attributes in self._new():
            del attributes[name]
        self._hooks.take_away()

    def added_hooks(self) -> Mapping[str, Hooks]:
        """Return the hooks that were added since, by the modules' names."""
        return self._hooks.added()

    def add_hooks(self, hooks: Mapping[str, Hooks]) -> None:
        """Add hooks that were taken away."""
        self._hooks.add(hooks)

    def changes(self) -> dict[Place, _Change]:
        """Return what is not as it was."""
        found: dict[Place, _Change] = {}
        now = self._now()
        for index in _others(now, self._values):
            left, value = now[index], self._values[index]
            are_plain = isinstance(left, _PLAIN) and isinstance(value, _PLAIN)
            if not are_plain or left != value:
                found[self._places[index][0]] = _changed_to(left)
        for index, held in self._held.items():
            if now[index] is self._values[index] and held.is_other():
                found[self._places[index][0]] = _changed_to(now[index])
        return found | {at: _changed_to(attributes[at[1]]) for at, attributes in self._new()}

    def apply(self, changes: Mapping[Place, _Change]) -> None:
        """Have modules hold what runs left."""
        modules = dict(self._modules)
        for (fqn, name), change in changes.items():
            if change.now is _MISSING:
                modules[fqn].pop(name, None)
                continue
            if change.held is not None:
                change.held.put_inside()
            modules[fqn][name] = change.now

    def _new(self) -> list[tuple[Place, dict[str, Any]]]:
        if [*map(len, self._of_modules)] == self._sizes:
            return []
        pairs = zip(self._modules, self._sizes, strict=True)
        grown = [(fqn, held) for (fqn, held), size in pairs if len(held) != size]
        known = {at for at, _ in self._places}
        return [
            ((fqn, name), held)
            for fqn, held in grown
            for name, value in held.items()
            if name not in _OF_TORCH and (fqn, name) not in known and isinstance(value, _VALUES)
        ]

    @contextlib.contextmanager
    def back(self, attributes: Attributes) -> Iterator[None]:
        """Have forward find the attributes as they were, without a change to the present ones."""
        present, hooks = attributes.now(), self.added_hooks()
        self.put_back()
        try:
            yield
        finally:
            present.put_back()
            self.add_hooks(hooks)


def _others(now: Sequence[Any], before: Sequence[Any]) -> list[int]:
    """Return the places of what is another object than before."""
    if _are_same(now, before):
        return []
    pairs = enumerate(zip(now, before, strict=True))
    return [index for index, (one, other) in pairs if one is not other]


def _changed_to(value: Any) -> _Change:
    """Return a change, with what is in a container or a generator now."""
    is_copied = _is_filled(type(value)) and not isinstance(value, Tensor)
    return _Change(value, _Held(value, copied=False) if is_copied else None)


@functools.cache
def _is_filled(kind: type) -> bool:
    """Whether objects may change in place, and can be put back."""
    generators = [random.Random, torch.Generator]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        generators += [numpy.random.RandomState, numpy.random.Generator]
    if issubclass(kind, (Tensor, *_CONTAINERS, *generators)):
        return True
    package = kind.__module__.partition(".")[0]
    is_code = issubclass(kind, (type, types.ModuleType, nn.Module, *_CODE))
    is_library = package in sys.stdlib_module_names or package.startswith(_LIBRARIES)
    return not is_library and not is_code and kind.__dictoffset__ != 0


class SeveralRuns:
    """Runs of forward in one step, from the same attributes; what the latest left stays.

    Of stages the last one that changes an attribute counts.
    """

    def __init__(self, attributes: Attributes) -> None:
        self._attributes, self._before = attributes, attributes.now()
        self.left: dict[Place, tuple[int, _Change]] = {}
        self._hooks: dict[str, tuple[int, Hooks]] = {}

    @contextlib.contextmanager
    def run(self, stage: int, *, is_kept: bool) -> Iterator[None]:
        """Run forward for a stage; ``is_kept`` says whether what it leaves counts."""
        self._before.put_back()
        try:
            yield
        finally:
            if is_kept:
                _keep(self.left, self._before.changes(), stage)
                _keep(self._hooks, self._before.added_hooks(), stage)

    def end(self) -> None:
        """Have modules hold what the runs left."""
        self._before.put_back()
        self._before.apply({at: change for at, (_, change) in self.left.items()})
        self._before.add_hooks({fqn: hooks for fqn, (_, hooks) in self._hooks.items()})
        self._attributes.learn(self._before.written)

    @property
    def generators(self) -> list[str]:
        """Names of the generators that runs drew from."""
        return sorted(
            ".".join(at).strip(".")
            for at, (_, change) in self.left.items()
            if generator_of(change.now) is not None
        )


def _keep(left: dict[_At, tuple[int, _What]], found: Mapping[_At, _What], stage: int) -> None:
    """Keep what a run left, unless a later stage has left something there."""
    for at, what in found.items():
        if at not in left or stage >= left[at][0]:
            left[at] = stage, what
