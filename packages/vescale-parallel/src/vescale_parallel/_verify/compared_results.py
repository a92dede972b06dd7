"""Results on ranks, and side effects, beside those of one device: the same but for rounding?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate

from vescale_parallel._tensor_parallel.shard_module import rank_part

from .modes.side_effects import HandedOver, Read, SideEffects
from .region import Contradiction, Findings, How, Results


def largest_of(whole: Tensor) -> float:
    """Return the largest finite magnitude of a result, by which its parts are judged.

    Masks are of flags, or have numbers that are infinite.
    """
    magnitudes = whole.abs() if whole.is_complex() else whole.double().abs()
    magnitudes = magnitudes[magnitudes.isfinite()]
    return float(magnitudes.max()) if magnitudes.numel() else 0.0


def close(found: Tensor, expected: Tensor, largest: float) -> bool:
    """Return whether a part is what it should be; ``largest`` is that of the whole."""
    if found.shape != expected.shape or found.is_complex() != expected.is_complex():
        return False
    if not found.is_complex():
        found, expected = found.double(), expected.double()
    return torch.allclose(
        found, expected, rtol=1e-9, atol=1e-10 * (largest + 1e-3), equal_nan=False
    )


def compare_results(
    fqn: str, expected: Results, runs: Sequence[Results], how: How, size: int
) -> None:
    """Raise if ranks return something else, or inputs have other gradients.

    Raises:
        Contradiction: With what differs.
    """
    assert how.output is not None
    for rank, run in enumerate(runs):
        if run.floats != expected.floats:
            raise Contradiction(fqn, "a rank's part returns something else")
        for out, whole, placement in zip(run.tensors, expected.tensors, how.output, strict=True):
            if (out is None) != (whole is None):
                raise Contradiction(fqn, "a rank's part returns something else")
            if out is None or whole is None:
                continue
            if not close(out, part_of(whole, placement, size, rank), largest_of(whole)):
                raise Contradiction(fqn, "what it returns differs")
        for grad, whole, placement in zip(
            run.input_grads, expected.input_grads, how.inputs, strict=True
        ):
            if not _same_gradient(grad, whole, placement, size, rank):
                raise Contradiction(fqn, "the gradient of an input differs")


def compare_gradients(
    fqn: str,
    expected: Results,
    runs: Sequence[Results],
    placements: Mapping[str, Placement],
    found: Findings,
) -> set[str]:
    """Note what the gradients of parameters are; return whole ones whose gradients are zero."""
    undecided = set[str]()
    size, largest_in = len(runs), _largest_in_modules(expected.grads)
    for name, whole in expected.grads.items():
        full = f"{fqn}.{name}".strip(".")
        grads = [run.grads[name] for run in runs]
        if whole is None:
            if any(grad is not None and bool(grad.any()) for grad in grads):
                raise Contradiction(fqn, f"the gradient of {full!r} differs")
            continue
        placement = placements.get(full, Replicate())
        is_whole = placement == Replicate()
        parts = [part_of(whole, placement, size, rank) for rank in range(size)]
        given = [
            torch.zeros_like(p) if g is None else g for p, g in zip(parts, grads, strict=True)
        ]
        if bool(whole.any()):
            found.reached.add(full)
        largest = largest_in[_owner(name)]
        as_it_is = all(close(grad, part, largest) for grad, part in zip(given, parts, strict=True))
        as_sum = is_whole and close(torch.stack(given).sum(0), whole, largest)
        if not as_it_is and not as_sum:
            raise Contradiction(fqn, f"the gradient of {full!r} differs")
        # One that is zero but for rounding says neither: of norms of queries where all tokens of
        # an example are the same one, and attention looks at all of them alike.
        if is_whole and as_it_is and as_sum:
            undecided.add(full)
        elif is_whole:
            one, other = found.whole, found.partial
            _note(*((one, other) if as_it_is else (other, one)), full, fqn)
    return undecided - found.whole - found.partial


def _largest_in_modules(grads: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the largest magnitude of the gradients of every module's own parameters.

    Gradients of a module are sums of the same numbers, and rounding is as large as these. That of
    a bias of keys is zero and all rounding: softmax does not change if a number is added to all
    scores.
    """
    found: dict[str, float] = {}
    for name, grad in grads.items():
        largest = 0.0 if grad is None else largest_of(grad)
        found[_owner(name)] = max(found.get(_owner(name), 0.0), largest)
    return found


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _note(found: set[str], other: set[str], name: str, fqn: str) -> None:
    if name in other:
        raise Contradiction(
            fqn, f"the gradient of {name!r} is a sum over ranks in a block alone and not in all"
        )
    found.add(name)


def _same_gradient(
    grad: Tensor | None, whole: Tensor | None, placement: Placement | None, size: int, rank: int
) -> bool:
    """Return whether a rank has its part of an input's gradient; none is zero."""
    if whole is None:
        return grad is None or not grad.any()
    part = part_of(whole, placement, size, rank)
    return close(torch.zeros_like(part) if grad is None else grad, part, largest_of(whole))


def part_of(x: Any, placement: Placement | None, size: int, rank: int) -> Any:
    """Return what a rank has of a value; of none without a placement, all of it."""
    if not isinstance(x, Tensor) or placement is None or placement == Replicate():
        return x
    part = rank_part(x.detach(), placement, size, rank)
    return part.requires_grad_(x.requires_grad)


def compare_side_effects(fqn: str, expected: Results, runs: Sequence[Results]) -> None:
    """Raise if ranks read other numbers, or put other tensors where no module is.

    Raises:
        Contradiction: With what differs.
    """
    for run in runs:
        why = _other_effect(expected.side_effects, run.side_effects)
        if why is not None:
            raise Contradiction(fqn, why)


def _other_effect(expected: SideEffects, found: SideEffects) -> str | None:
    """Return which side effect on a rank is not one device's, None if all are."""
    for one, other in zip(expected.reads, found.reads, strict=False):
        if one.line != other.line or not _is_same(one, other):
            return _of_a_part(other)
    if len(expected.reads) != len(found.reads):
        longer = max(expected.reads, found.reads, key=len)
        return _of_a_part(longer[min(len(expected.reads), len(found.reads))])
    other = other_tensor(expected, found)
    return None if other is None else f"what it puts into {other.into!r} is of a rank's part"


def other_decision(
    expected: SideEffects, runs: Sequence[SideEffects], *, own: bool, in_lists: bool = False
) -> str | None:
    """Return which branch asks for a number that differs between runs, if any does.

    Of the code of the module itself, if ``own``, not of those that it calls. With ``in_lists`` a
    line may ask for the number of one row after the other.
    """
    row_by_row = _lines_of_rows(expected, runs) if in_lists else set[tuple[str, int]]()
    for found in runs:
        for (_, whole), (read, x) in zip(_numbers(expected), _numbers(found), strict=False):
            decides = isinstance(read.value, bool) and not (own and read.fqn)
            if decides and read.line not in row_by_row and not _same_numbers(x, whole):
                return f"{read} decides by a number that depends on all rows"
    return None


def _lines_of_rows(expected: SideEffects, runs: Sequence[SideEffects]) -> set[tuple[str, int]]:
    """Return the lines that read of all rows what they read of parts, one after the other."""
    of_all, of_parts = _by_line([expected]), _by_line(runs)
    return {
        line
        for line, whole in of_all.items()
        if len(whole) == len(of_parts.get(line, ()))
        and all(map(_same_numbers, of_parts[line], whole))
    }


def _by_line(runs: Iterable[SideEffects]) -> dict[tuple[str, int], list[Tensor]]:
    lines: dict[tuple[str, int], list[Tensor]] = {}
    for run in runs:
        for read, x in _numbers(run):
            lines.setdefault(read.line, []).append(x)
    return lines


def other_number(expected: SideEffects, found: SideEffects) -> Read | None:
    """Return what read floating-point numbers that are not one device's, if any did.

    Of masks a rank may have other elements, and of each do the same: a loop over the
    experts that its tokens are sent to.
    """
    pairs = zip(_numbers(expected), _numbers(found), strict=False)
    for (_, whole), (read, x) in pairs:
        if not _same_numbers(x, whole):
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
        and all(_same_numbers(x, whole) for whole, x in pairs)
    )


def _same_numbers(found: Tensor, whole: Tensor) -> bool:
    """Whether numbers that were read are the same; a mean of nothing is none."""
    if found.shape != whole.shape or not torch.equal(found.isfinite(), whole.isfinite()):
        return False
    found, whole = found[found.isfinite()], whole[whole.isfinite()]
    return close(found, whole, largest_of(whole))


def _of_a_part(read: Read) -> str:
    return f"{read} reads a number, which is another one of a rank's part"


def other_tensor(expected: SideEffects, found: SideEffects) -> HandedOver | None:
    """Return a tensor that was put where no module is, and that one device puts nowhere."""
    known = [each.value for each in expected.handed_over]
    for each in found.handed_over:
        if not any(_same_numbers(each.value, whole) for whole in known):
            return each
    return None
