"""Code that ranks or normalizes rows, takes the first few, or looks at one: often unseen.

The mean of the 64 largest losses is, of the few rows that are tried, the mean of all: of halves it
is that of halves. And of the upper half of the losses, halves may have one each by chance. So rows
that are sorted, and rows that are cut off behind a number that no part reaches, are said to meet.
So are rows for all of which code decides by the value of one, ``if int(ids[0, 0]) % 2``: the first
rows of the parts that are tried may decide alike. And rows that a batch norm is given: of random
weights they may all be one value, where points have no neighbour within a radius for example.

What all rows and a part picked is compared line of code by line of code: values decide how often
others pick before, the experts that a loop goes over, say.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_parallel._cross_replica.parts import NUM_PARTS

# The position of the dim among the arguments of operators that rank elements.
_RANKING = {"sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2}
_RANKING_ALONG_FIRST = {"msort"}
_LOOKING = {"item", "tolist", "__int__", "__float__", "__bool__", "__index__"}
_VALUE = "the value of one row"
_NORM, _TRAINING_OF_NORM = "batch_norm", 5  # and the position of its flag


@dataclass(frozen=True)
class Picked:
    """One operator that picked elements along a dim.

    Attributes:
        operator: Its name.
        length: Of the dim.
        most: How many elements it takes at most, or, of a value that is looked at, which one it
            is; None if it ranks all.
        is_own: Whether the module's own code called it, not that of a module that it calls.
        caller: The instruction that did.
    """

    operator: str
    length: int
    most: int | None
    is_own: bool
    caller: tuple[CodeType, int]


@dataclass
class PickedRows(TorchFunctionMode):
    """Notes operators that pick elements, while code runs.

    Attributes:
        is_own: Tells whether the module's own code is running.
        found: What was noted.
    """

    is_own: Callable[[], bool]
    found: list[Picked] = field(default_factory=list[Picked])
    # Elements of one row and what was made of them, with the length of the dim and the row.
    _of_rows: dict[int, tuple[Tensor, int, int]] = field(
        default_factory=dict[int, tuple[Tensor, int, int]]
    )

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        result = func(*args, **kwargs)
        if isinstance(x, Tensor):
            self._see(getattr(func, "__name__", ""), x, args, kwargs, result)
        return result

    def _see(self, name: str, x: Tensor, args: Any, kwargs: Any, result: Any) -> None:
        if name == "__getitem__" and x.dim():
            self._note_slices(x, args[1])
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if type(first) is int:
                self._of_rows[id(result)] = result, x.shape[0], first
                return
        elif name in _RANKING and x.is_floating_point() and x.dim():
            place = _RANKING[name]
            dim = args[place] if len(args) > place else kwargs.get("dim", -1)
            self._note(name, x, dim if isinstance(dim, int) else -1, None)
        elif name in _RANKING_ALONG_FIRST and x.is_floating_point() and x.dim():
            self._note(name, x, 0, None)
        elif name == _NORM:
            given = args[_TRAINING_OF_NORM] if len(args) > _TRAINING_OF_NORM else None
            if kwargs.get("training", given):
                self._note(name, x, 0, None)
        if id(x) not in self._of_rows:
            return
        _, length, row = self._of_rows[id(x)]
        if name in _LOOKING:
            self.found.append(Picked(_VALUE, length, row, self.is_own(), _caller()))
        elif isinstance(result, Tensor):
            self._of_rows[id(result)] = result, length, row

    def _note_slices(self, x: Tensor, index: Any) -> None:
        for dim, each in enumerate(index if isinstance(index, tuple) else (index,)):
            if not isinstance(each, slice):
                if each is None or each is Ellipsis or isinstance(each, Tensor):
                    return  # of what comes behind it the dim is another
                continue
            if isinstance(each.stop, int) and dim < x.dim():
                self._note("a slice", x, dim, each.stop)

    def _note(self, operator: str, x: Tensor, dim: int, most: int | None) -> None:
        self.found.append(Picked(operator, x.shape[dim], most, self.is_own(), _caller()))


def _caller() -> tuple[CodeType, int]:
    """Return the instruction that called the operator, behind this and other modes."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def picks_rows(whole: Sequence[Picked], part: Sequence[Picked], *, own: bool) -> str | None:
    """Return how a run on all rows and one on a part picked from their rows, None if neither did.

    Args:
        whole: What was picked of all rows.
        part: Of a part.
        own: Leave out what was picked by modules that the module calls.
    """
    for of_all, of_part in _pairs(whole, part):
        if of_all.length != NUM_PARTS * of_part.length or (own and not of_all.is_own):
            continue
        if of_all.most != of_part.most:
            continue
        if of_all.operator == _NORM:
            return "batch_norm normalizes over rows"
        if of_all.most is None:
            return f"{of_all.operator} ranks rows"
        if of_all.operator != _VALUE and of_all.most >= of_all.length:
            return f"{of_all.operator} takes {of_all.most} rows at most"
        if of_all.operator == _VALUE and not _looks_at_all(whole, of_all.length):
            return f"it looks at a value of row {of_all.most}"
    return None


def _pairs(whole: Sequence[Picked], part: Sequence[Picked]) -> Iterator[tuple[Picked, Picked]]:
    """Yield what the same operator of the same line picked, call by call."""
    remaining: dict[Any, deque[Picked]] = defaultdict(deque)
    for each in part:
        remaining[each.operator, each.caller].append(each)
    for each in whole:
        if of_part := remaining[each.operator, each.caller]:
            yield each, of_part.popleft()


def _looks_at_all(picked: Sequence[Picked], length: int) -> bool:
    """Whether values of every row are looked at, one after the other: each may be that row's."""
    seen = {
        each.most % length
        for each in picked
        if each.operator == _VALUE and each.length == length and each.most is not None
    }
    return len(seen) == length
