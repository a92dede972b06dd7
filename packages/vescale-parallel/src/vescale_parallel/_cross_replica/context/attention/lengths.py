"""Code that computes otherwise for long sequences than for short ones: which modules' it is.

[Note: lengths that steer] A model is compared with one device on a short sequence. Code that asks
whether there are more than 20 positions would see those of a slice, and a comparison of 16 says
nothing of it. So where the model is watched, sizes of tensors in blocks are numbers that tell who
read them when they are compared with others, and such modules are shown whole sequences, where
they see one device's sizes whatever they ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SHAPE: Any = Tensor.shape
_ALWAYS = 2  # positions that every slice has


class Length(int):
    """How many positions there are, or a number made of that; tells when it is compared."""

    tell: Callable[[], None]
    is_made: bool

    @staticmethod
    def of(value: int, tell: Callable[[], None], *, is_made: bool = False) -> Length:
        """Return a number that calls ``tell()`` when it is compared with others."""
        made = Length(value)
        made.tell, made.is_made = tell, is_made
        return made

    def _compared(self, other: Any) -> None:
        is_like = isinstance(other, Length) or not isinstance(other, int | float)
        if not is_like and (self.is_made or other >= _ALWAYS):
            self.tell()

    def _made(self, value: Any) -> Any:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return Length.of(value, self.tell, is_made=True) if is_whole else value

    __hash__ = int.__hash__

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __bool__(self) -> bool:
        if self.is_made:
            self.tell()
        return int(self) != 0

    def __eq__(self, other: object) -> bool:
        if int(self) != other:  # what is equal is another name for it
            self._compared(other)
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        self._compared(other)
        return int(self) < other

    def __le__(self, other: int) -> bool:
        self._compared(other)
        return int(self) <= other

    def __gt__(self, other: int) -> bool:
        self._compared(other)
        return int(self) > other

    def __ge__(self, other: int) -> bool:
        self._compared(other)
        return int(self) >= other

    def __add__(self, other: int) -> Any:
        return self._made(int(self) + other)

    def __radd__(self, other: int) -> Any:
        return self._made(other + int(self))

    def __sub__(self, other: int) -> Any:
        return self._made(int(self) - other)

    def __rsub__(self, other: int) -> Any:
        return self._made(other - int(self))

    def __mul__(self, other: int) -> Any:
        return self._made(int(self) * other)

    def __rmul__(self, other: int) -> Any:
        return self._made(other * int(self))

    def __floordiv__(self, other: int) -> Any:
        return self._made(int(self) // other)

    def __mod__(self, other: int) -> Any:
        return self._made(int(self) % other)

    def __neg__(self) -> Any:
        return self._made(-int(self))


class LengthMode(TorchFunctionMode):
    """Has sizes of tensors tell who compares them.

    Args:
        now: Returns the number of positions now, 0 where there are none, and what to call if it is
            compared.
    """

    def __init__(self, now: Callable[[], tuple[int, Callable[[], None]]]) -> None:
        super().__init__()
        self._now = now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func != _SHAPE.__get__ and func is not Tensor.size:
            return found
        length, tell = self._now()
        if not length:
            return found
        if isinstance(found, int):
            return Length.of(found, tell) if found == length else found
        return torch.Size([Length.of(n, tell) if n == length else n for n in found])
