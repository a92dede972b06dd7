"""Bounds of random values: is a yes-or-no answer known without drawing?

``trunc_normal_`` asks again and again whether any element is out of bounds, and if so draws
again. To answer means to draw all elements, whoever owns them. But normal numbers made from
uniform ones have a largest value, and the usual bounds (100 standard deviations in transformers)
are far beyond it.
"""

from __future__ import annotations

from vescale_deferred._tape.op_schema import aten, op_schema
from vescale_deferred._tape.tape import Snapshot, Write
from vescale_dtensor.random import fill_of

# The uniform numbers behind a normal one have 53 bits at most: sqrt(-2 log 2**-53) = 8.57.
_MAX_NUM_STDS = 9.0

_COMPARISONS = aten("lt le gt ge")


def known_truth(snapshot: Snapshot) -> bool | None:
    """Return what all elements of a boolean tensor are, None if that takes evaluating them."""
    write = _only_write(snapshot)
    if write is None or write.func is None:
        return None
    name = op_schema(write.func).name
    if name in _COMPARISONS and isinstance(write.args[1], int | float):
        return _compare(name, _bounds(write.args[0]), write.args[1])
    if name in ("aten::bitwise_or", "aten::logical_or") and isinstance(write.args[1], Snapshot):
        either = known_truth(write.args[0]), known_truth(write.args[1])
        if True in either:
            return True
        return None if None in either else False
    if name == "aten::any" and len(write.args) == 1 and write.args[0].window.numel:
        return known_truth(write.args[0])
    return None


def _only_write(snapshot: Snapshot) -> Write | None:
    """Return the write that all of ``snapshot`` comes from."""
    if not snapshot.version:
        return None
    entry = snapshot.tape.entries[snapshot.version - 1]
    return entry.write if entry.covers and entry.window.numel == snapshot.window.numel else None


def _bounds(snapshot: Snapshot) -> tuple[float, float] | None:
    write = _only_write(snapshot)
    if write is None or write.func is None:
        return None
    fill = fill_of(write.func, write.args)
    if fill is None or not all(isinstance(p, int | float) for p in fill.parameters):
        return None
    match fill.method, fill.parameters:
        case "normal_", (float(mean) | int(mean), float(std) | int(std)):
            return mean - _MAX_NUM_STDS * std, mean + _MAX_NUM_STDS * std
        case _:
            return None


def _compare(name: str, bounds: tuple[float, float] | None, limit: float) -> bool | None:
    if bounds is None:
        return None
    low, high = bounds
    if name in ("aten::gt", "aten::ge"):
        low, high, limit = -high, -low, -limit
    if high < limit:
        return True
    return False if low > limit else None
