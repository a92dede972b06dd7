"""Side effects of forward on ranks beside those of one device; see [Note: side effects]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from vescale_parallel._verify.compared_results import close, largest_of

from .side_effects import HandedOver, Read, SideEffects


def other_effect(expected: SideEffects, found: SideEffects) -> str | None:
    """Return which side effect on a rank is not one device's, None if all are."""
    for one, other in zip(expected.reads, found.reads, strict=False):
        if one.line != other.line or not _is_same(one, other):
            return _of_a_part(other)
    if len(expected.reads) != len(found.reads):
        longer = max(expected.reads, found.reads, key=len)
        return _of_a_part(longer[min(len(expected.reads), len(found.reads))])
    other = other_tensor(expected, found)
    return None if other is None else f"what it puts into {other.into!r} is of a rank's part"


def other_decision(expected: SideEffects, runs: Iterable[SideEffects], *, own: bool) -> str | None:
    """Return which branch asks for a number that differs between runs, if any does.

    Of the code of the module itself, if ``own``, not of those that it calls.
    """
    for found in runs:
        for (_, whole), (read, x) in zip(_numbers(expected), _numbers(found), strict=False):
            decides = isinstance(read.value, bool) and not (own and read.fqn)
            if decides and not close(x, whole, largest_of(whole)):
                return f"{read} decides by a number that depends on all rows"
    return None


def other_number(expected: SideEffects, found: SideEffects) -> Read | None:
    """Return what read floating-point numbers that are not one device's, if any did.

    Of masks a rank may have other elements, and of each do the same: a loop over the
    experts that its tokens are sent to.
    """
    pairs = zip(_numbers(expected), _numbers(found), strict=False)
    for (_, whole), (read, x) in pairs:
        if not close(x, whole, largest_of(whole)):
            return read
    more = [*_numbers(found)][len([*_numbers(expected)]) :]
    return more[0][0] if more else None


def _numbers(effects: SideEffects) -> Iterator[tuple[Read, Tensor]]:
    for read in effects.reads:
        yield from ((read, x) for x in read.sources if read.value is None or x.numel() == 1)


def _is_same(one: Read, other: Read) -> bool:
    pairs = zip(one.sources, other.sources, strict=False)
    return (
        type(one.value) is type(other.value)
        and (not isinstance(one.value, int | float | list) or one.value == other.value)
        and len(one.sources) == len(other.sources)
        and all(close(x, whole, largest_of(whole)) for whole, x in pairs)
    )


def _of_a_part(read: Read) -> str:
    return f"{read} reads a number, which is another one of a rank's part"


def other_tensor(expected: SideEffects, found: SideEffects) -> HandedOver | None:
    """Return a tensor that was put where no module is, and that one device puts nowhere."""
    known = [each.value for each in expected.handed_over]
    for each in found.handed_over:
        if not any(close(each.value, whole, largest_of(whole)) for whole in known):
            return each
    return None
