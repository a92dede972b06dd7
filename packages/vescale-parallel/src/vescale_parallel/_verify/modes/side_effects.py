"""What forward does beside returning: numbers that it reads, tensors that it puts elsewhere.

[Note: side effects] A rank computes with its part of an activation. What it returns is made whole
or stays a part that is known as such; what Python reads of it, does not. ``x.norm().item()`` is a
number of this rank's features, and a branch that asks for it may take another way than on one
device; a balancing loss that is appended to a list of the model's file may be a mean over them.
So both are noted where a model is run whole and on ranks, and are to be the same.

A comparison leaves no number behind to compare: ``x.norm() > 9`` may be true of the whole and of
each part, for these inputs. So what is not a floating-point tensor is followed back to the ones
that it was made of, and these are compared.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vescale_parallel._model.kept_outside import KeptOutside
from vescale_parallel._model.user_line import user_line
from vescale_parallel._torch_private import pytree

# Names of functions that return what is no tensor.
_READ = frozenset(
    (
        *("item", "tolist", "numpy", "__array__", "__format__", "__contains__"),
        *("__bool__", "__int__", "__index__", "__float__", "__complex__"),
        *("is_nonzero", "equal", "allclose"),
    )
)
# Whether there are such numbers is asked to find mistakes, or to do without them one by one.
_OF_NONE = frozenset(("isnan", "isinf", "isfinite", "isposinf", "isneginf"))


@dataclass(frozen=True)
class Read:
    """A value that Python code read of a tensor.

    Attributes:
        fqn: The module whose code it is.
        line: The file and the number of the line.
        value: What it is; None if that is floating-point numbers.
        sources: These, or the floating-point tensors that it was made of.
    """

    fqn: str
    line: tuple[str, int]
    value: Any
    sources: tuple[Tensor, ...]

    def __str__(self) -> str:
        name, number = self.line
        code = linecache.getline(name, number).strip()
        return f"line {number} of {os.path.basename(name)} ({code})"


@dataclass(frozen=True)
class HandedOver:
    """A tensor that code put where no module is.

    Attributes:
        fqn: The module whose code it is.
        into: The name of what holds it.
        value: The tensor.
    """

    fqn: str
    into: str
    value: Tensor


@dataclass
class SideEffects:
    """What one forward did.

    Attributes:
        reads: What it read, in order.
        handed_over: Tensors with a graph that it put where no module is.
    """

    reads: list[Read] = field(default_factory=list[Read])
    handed_over: list[HandedOver] = field(default_factory=list[HandedOver])


@contextlib.contextmanager
def watched_side_effects(module: nn.Module) -> Iterator[SideEffects]:
    """Note what forward of a module, inside, reads of tensors, and puts where no module is."""
    found = SideEffects()
    watch = _Watch(found, module)
    hooks = [
        each.register_forward_hook(functools.partial(watch.note_handed_over, fqn))
        for fqn, each in module.named_modules()
        if watch.outside.may_change
    ]
    with watch:
        yield found
    for hook in hooks:
        hook.remove()


class _Watch(TorchFunctionMode):
    """Notes values that are read, and knows what was made while it was on.

    Args:
        found: Takes them.
        module: Which runs.
    """

    def __init__(self, found: SideEffects, module: nn.Module) -> None:
        super().__init__()
        self._found, self.outside = found, KeptOutside(module)
        self._names = {id(each): fqn for fqn, each in module.named_modules()}
        self._sources: Any = WeakIdKeyDictionary()
        self._made: Any = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _READ:
            if not _is_own(sys._getframe(1)):
                self._note(args, result)
        else:
            self._follow(name, (args, kwargs), args[0] if result is None and args else result)
        return result

    def note_handed_over(self, fqn: str, *_: Any) -> None:
        """Note what code of a module, which has returned, put where no module is."""
        for into, x in self.outside.handed_over():
            if self._made.pop(x, None) is not None:
                self._found.handed_over.append(HandedOver(fqn, into, x.detach()))

    def _note(self, args: tuple[Any, ...], result: Any) -> None:
        value, sources = result, [x.detach() for x in self._sources_of(args) if type(x) is Tensor]
        if any(map(_is_float, args)) and not isinstance(result, bool | str):
            # Of a tensor of slices, what it says of the whole.
            value, sources = None, [torch.as_tensor(result)]
        self._found.reads.append(Read(self._innermost(), user_line(), value, tuple(sources)))

    def _innermost(self) -> str:
        """Return the name of the module whose code runs."""
        frame = sys._getframe(2)
        while frame is not None:
            fqn = self._names.get(id(frame.f_locals.get("self")))
            if fqn is not None:
                return fqn
            frame = frame.f_back
        return ""

    def _follow(self, name: str, given: Any, result: Any) -> None:
        """Know what a result that holds no floating-point numbers was made of."""
        out = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
        followed = [x for x in out if isinstance(x, Tensor) and not _is_float(x)]
        if self.outside.may_change:
            self._made.update((x, True) for x in out if isinstance(x, Tensor) and x.requires_grad)
        if followed:
            leaves = pytree.tree_leaves(given)
            sources = self._sources_of(leaves if name not in _OF_NONE else [])
            self._sources.update(dict.fromkeys(followed, sources) if sources else {})

    def _sources_of(self, values: Iterable[Any]) -> tuple[Tensor, ...]:
        found: dict[int, Tensor] = {}
        for x in values:
            if isinstance(x, Tensor):
                of_x = (x,) if _is_float(x) else self._sources.get(x, ())
                found.update((id(each), each) for each in of_x)
        return tuple(found.values())


def _is_own(frame: FrameType | None) -> bool:
    """Whether this project reads, as it does while it compares, not code of the model.

    What modes do for that code, which see its calls before this one does, is not what counts.
    """
    is_own = False
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package.startswith("vescale"):
            is_own = frame.f_code.co_name != "__torch_function__"
        elif package != "torch":
            break
        frame = frame.f_back
    return is_own


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
