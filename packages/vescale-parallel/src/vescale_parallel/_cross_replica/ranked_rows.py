"""Operators that rank rows, or take the first few of them: what values may not show.

The mean of the 64 largest losses is, of the few rows that are tried, the mean of all: of halves it
is that of halves. And of the upper half of the losses, halves may have one each by chance. So rows
that are sorted, and rows that are cut off behind a number that no part reaches, are said to meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from .parts import NUM_PARTS

# The position of the dim among the arguments of operators that rank elements.
_RANKING = {"sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2}
_RANKING_ALONG_FIRST = {"msort"}


@dataclass(frozen=True)
class Picked:
    """One operator that picked elements along a dim.

    Attributes:
        operator: Its name.
        length: Of the dim.
        most: How many elements it takes at most, None if it ranks all.
        is_own: Whether the module's own code called it, not that of a module that it calls.
    """

    operator: str
    length: int
    most: int | None
    is_own: bool


@dataclass
class PickedRows(TorchFunctionMode):
    """Notes operators that pick elements, while code runs.

    Attributes:
        is_own: Tells whether the module's own code is running.
        found: What was noted.
    """

    is_own: Callable[[], bool]
    found: list[Picked] = field(default_factory=list[Picked])

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and x.dim():
            if name == "__getitem__":
                self._note_slices(x, args[1])
            elif x.is_floating_point() and name in _RANKING:
                place = _RANKING[name]
                dim = args[place] if len(args) > place else kwargs.get("dim", -1)
                self._note(name, x, dim if isinstance(dim, int) else -1, None)
            elif x.is_floating_point() and name in _RANKING_ALONG_FIRST:
                self._note(name, x, 0, None)
        return func(*args, **kwargs)

    def _note_slices(self, x: Tensor, index: Any) -> None:
        for dim, each in enumerate(index if isinstance(index, tuple) else (index,)):
            if not isinstance(each, slice):
                if each is None or each is Ellipsis or isinstance(each, Tensor):
                    return  # of what comes behind it the dim is another
                continue
            if isinstance(each.stop, int) and dim < x.dim():
                self._note("a slice", x, dim, each.stop)

    def _note(self, operator: str, x: Tensor, dim: int, most: int | None) -> None:
        self.found.append(Picked(operator, x.shape[dim], most, self.is_own()))


def picks_rows(whole: Sequence[Picked], part: Sequence[Picked], *, own: bool) -> str | None:
    """Return how a run on all rows and one on a part picked from their rows, None if neither did.

    Args:
        whole: What was picked of all rows.
        part: Of a part.
        own: Leave out what was picked by modules that the module calls.
    """
    for of_all, of_part in zip(whole, part, strict=False):
        if of_all.length != NUM_PARTS * of_part.length or (own and not of_all.is_own):
            continue
        if of_all.operator != of_part.operator or of_all.most != of_part.most:
            continue
        if of_all.most is None:
            return f"{of_all.operator} ranks rows"
        if of_all.most >= of_all.length:
            return f"{of_all.operator} takes {of_all.most} rows at most"
    return None
