"""What are the values of a part of a deferred tensor? Only what they depend on is computed.

A read looks for the last write that touched the part wanted, translates the part into one of
that write's output, and from there into parts of its inputs. Operators that are known to compute
every element on its own, exactly rounded whatever its neighbours, are followed; in front of any
other one the read stops and has that one storage evaluated whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_deferred._tape.op_schema import aten, op_schema
from vescale_deferred._tape.tape import Entry, Snapshot, Tape, Write
from vescale_deferred._torch_private import plainly
from vescale_dtensor.random import Draws, PhiloxDraws, Point, RandomTensor, Window, memory_order

from .replay import replay, run_op
from .strided_overlap import Factor, NotSliceable, Part, broadcast, overlap, select

# Temporaries are about this large, several at a time.
_BAND_NUMEL = 1 << 22
# A search for a true element may be over soon; pieces fit into the cache.
_FIRST_SEARCHED_NUMEL, _SEARCHED_NUMEL = 1 << 14, 1 << 19
# A chain of writes this long is replayed.
_MAX_DEPTH = 60

_ZEROS = aten("zero_ zeros zeros_like new_zeros")
_ONES = aten("ones ones_like new_ones")
_FULL = aten("fill_ full full_like")  # the value comes second
_UNINITIALISED = aten("empty empty_like empty_strided new_empty new_empty_strided")
_COPIES = aten("copy_ clone _to_copy")
# Every element on its own, and rounded as IEEE 754 prescribes: vectorised or not makes no
# difference. exp, sin, log or pow are not of this kind.
_POINTWISE = aten(
    "add sub mul div neg abs sign sqrt floor ceil round trunc clamp clamp_min clamp_max maximum "
    "minimum relu masked_fill eq ne lt le gt ge logical_and logical_or logical_not "
    "logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor"
)
_POINTWISE_IN_PLACE = frozenset(f"{name}_" for name in _POINTWISE)


def replay_part(snapshot: Snapshot) -> Tensor:
    """Return the values at the window of ``snapshot``, in memory of their own.

    Besides the result there are temporaries of a few times 16 MiB, and where an operator is not
    sliceable the storages it needs.
    """
    window = snapshot.window
    out = torch.empty(window.shape, dtype=window.dtype, device=snapshot.tape.device)
    with plainly():
        reader = _Reader()
        for band, index in _bands(window):
            reader.forget_values()
            reader.read(replace(snapshot, window=band), out[index])
    return out


def any_true(snapshot: Snapshot) -> bool:
    """Return whether any element of a boolean tensor is true, without holding all of them."""
    with plainly():
        reader = _Reader()
        for band, _ in _bands(snapshot.window, _FIRST_SEARCHED_NUMEL, _SEARCHED_NUMEL):
            reader.forget_values()
            out = torch.empty(band.shape, dtype=torch.bool, device=snapshot.tape.device)
            reader.read(replace(snapshot, window=band), out)
            if bool(out.any()):
                return True
    return False


def _bands(
    window: Window, first_numel: int = _BAND_NUMEL, largest_numel: int = _BAND_NUMEL
) -> Iterator[tuple[Window, tuple[int | slice, ...]]]:
    """Cut a window along its first dims into pieces, with their index in it.

    Each is twice as large as the one before, within the bounds.
    """
    row_numel = window.numel // window.shape[0] if window.numel and window.shape else 0
    if window.numel <= first_numel:
        yield window, ()
    elif row_numel > largest_numel:
        for position in range(window.shape[0]):
            offset = window.offset + position * window.stride[0]
            row = Window(window.shape[1:], window.stride[1:], offset, window.dtype)
            for band, index in _bands(row, first_numel, largest_numel):
                yield band, (position, *index)
    else:
        begin, numel = 0, first_numel
        while begin < window.shape[0]:
            num_rows = min(max(numel // row_numel, 1), window.shape[0] - begin)
            offset = window.offset + begin * window.stride[0]
            shape = (num_rows, *window.shape[1:])
            band = Window(shape, window.stride, offset, window.dtype)
            yield band, (slice(begin, begin + num_rows),)
            begin += num_rows
            numel = min(2 * numel, largest_numel)


class _Reader:
    """Computes parts of tensors, each once."""

    def __init__(self) -> None:
        self._values: dict[tuple[Tape, int, Window], Tensor] = {}
        self._storages: dict[tuple[Tape, int], torch.UntypedStorage] = {}
        self._random: dict[int, RandomTensor | PhiloxDraws] = {}
        self._depth = 0

    def forget_values(self) -> None:
        """Drop the parts computed so far, but not the storages evaluated whole."""
        self._values.clear()

    def read(self, snapshot: Snapshot, out: Tensor) -> None:
        """Put the values of ``snapshot`` into ``out``."""
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                raise NotSliceable
            self._read_last_write(snapshot, out)
        except NotSliceable:
            key = snapshot.tape, snapshot.version
            if key not in self._storages:
                self._storages[key] = replay([snapshot])[0].untyped_storage()
            out.copy_(snapshot.window.on(self._storages[key]))
        finally:
            self._depth -= 1

    def _read_last_write(self, snapshot: Snapshot, out: Tensor) -> None:
        window = snapshot.window
        expanded = [s == 0 and n > 1 for s, n in zip(window.stride, window.shape, strict=True)]
        if any(expanded):
            # An expanded tensor has one element for many indices: read it once, then broadcast.
            shape = tuple(1 if e else n for e, n in zip(expanded, window.shape, strict=True))
            once = Window(shape, window.stride, window.offset, window.dtype)
            out.copy_(self._value(Snapshot(snapshot.tape, snapshot.version, once)))
            return
        for version in range(snapshot.version - 1, -1, -1):
            entry = snapshot.tape.entries[version]
            shared = overlap(entry.window, window)
            if shared is None:
                continue
            if not shared.is_all_of_second:
                # What this write left alone is of an earlier version; then put the write on top.
                self.read(Snapshot(snapshot.tape, version, window), out)
            target = select(Window.of(out), shared.in_second).on(out.untyped_storage())
            self._evaluate(entry, shared.in_first, target)
            return

    def _value(self, snapshot: Snapshot) -> Tensor:
        window = snapshot.window
        key = snapshot.tape, snapshot.version, window
        if key not in self._values:
            out = torch.empty(window.shape, dtype=window.dtype, device=snapshot.tape.device)
            self.read(snapshot, out)
            self._values[key] = out
        return self._values[key]

    def _evaluate(self, entry: Entry, part: Part, target: Tensor) -> None:
        """Put ``part`` of what a write wrote into ``target``."""
        write, written = entry.write, entry.window
        if write.func is None:
            target.copy_(_cut(write.args[0], written.shape, part))
            return
        name = op_schema(write.func).name
        if write.point is not None:
            self._draw(write, written, part, target)
        elif name in _ZEROS | _ONES:
            target.fill_(int(name in _ONES))
        elif name in _FULL:
            value = write.args[1]
            target.fill_(self._value(value) if isinstance(value, Snapshot) else value)
        elif name in _COPIES:
            original = write.args[1] if name == "aten::copy_" else write.args[0]
            target.copy_(self._argument(original, written.shape, part))
        elif name == "aten::where":
            self._choose(write, written.shape, part, target)
        elif name in _POINTWISE | _POINTWISE_IN_PLACE and _is_exact(write):
            self._compute(name, write, written.shape, part, target)
        elif name in ("aten::cat", "aten::stack"):
            self._join(write, part, target, is_stack=name == "aten::stack")
        elif name not in _UNINITIALISED:
            raise NotSliceable

    def _argument(self, argument: Any, shape: tuple[int, ...], part: Part) -> Any:
        """Return the part of an argument that broadcasts to ``shape``; numbers as they are."""
        if isinstance(argument, Snapshot):
            window = argument.window
            # A tensor without dims stays one: it counts less in type promotion.
            if window.shape:
                window = select(broadcast(window, shape), part)
            return self._value(Snapshot(argument.tape, argument.version, window))
        return _cut(argument, shape, part) if isinstance(argument, Tensor) else argument

    def _compute(
        self, name: str, write: Write, shape: tuple[int, ...], part: Part, target: Tensor
    ) -> None:
        args = [self._argument(argument, shape, part) for argument in write.args]
        if name.endswith("_"):
            args[0] = args[0].clone()  # others may read the same part
        target.copy_(run_op(write, tuple(args), write.kwargs))

    def _choose(self, write: Write, shape: tuple[int, ...], part: Part, target: Tensor) -> None:
        """Compute ``where``, and only what is chosen if that is the same for all elements."""
        condition = self._argument(write.args[0], shape, part)
        num_chosen = int(condition.count_nonzero())
        if 0 < num_chosen < condition.numel():
            self._compute("aten::where", write, shape, part, target)
            return
        chosen = self._argument(write.args[1 if num_chosen else 2], shape, part)
        if isinstance(chosen, Tensor):
            target.copy_(chosen)
        else:
            target.fill_(chosen)

    def _draw(self, write: Write, written: Window, part: Part, target: Tensor) -> None:
        if write.draws is None:
            raise NotSliceable
        # A kernel draws in an order of its own: select the part in that, not in memory.
        order = Window(written.shape, _drawing_order(write.draws, written), 0, written.dtype)
        if write.index not in self._random:
            self._random[write.index] = _drawn(write, write.draws, written)
        self._random[write.index].draw(select(order, part), target)

    def _join(self, write: Write, part: Part, target: Tensor, *, is_stack: bool) -> None:
        """Put a part of a concatenation together from parts of what was concatenated."""
        tensors: list[Any] = write.args[0]
        shapes = [_shape(tensor) for tensor in tensors]
        if len({len(shape) for shape in shapes}) > 1 or not all(map(math.prod, shapes)):
            raise NotSliceable
        rank = len(shapes[0]) + is_stack
        dim = (write.args[1] if len(write.args) > 1 else 0) % rank
        along = [position for position, factor in enumerate(part) if factor.dim == dim]
        # Only one range along the concatenated dim, and one that takes every index of it, can
        # be cut at the borders of the tensors.
        if len(along) > 1 or any(part[position].multiplier != 1 for position in along):
            raise NotSliceable
        if not along:  # the output has one index along the dim
            along, part = [len(part)], (*part, Factor(dim, 1, 0, 1))
            target = target.unsqueeze(-1)
        at = along[0]
        wanted = part[at]
        base = 0
        for tensor, shape in zip(tensors, shapes, strict=True):
            size = 1 if is_stack else shape[dim]
            low = max(wanted.start, base)
            high = min(wanted.start + wanted.count, base + size)
            if low < high:
                inner = Factor(dim, 1, low - base, high - low)
                piece = target.narrow(at, low - wanted.start, high - low)
                own = _without_dim(part, at) if is_stack else _with(part, at, inner)
                piece.copy_(self._argument(tensor, shape, own))
            base += size


def _drawn(
    write: Write, draws: Draws | PhiloxDraws, written: Window
) -> RandomTensor | PhiloxDraws:
    if isinstance(draws, PhiloxDraws):
        return draws
    assert isinstance(write.point, Point)
    return RandomTensor(written.numel, draws, write.point)


def _drawing_order(draws: Draws | PhiloxDraws, written: Window) -> tuple[int, ...]:
    """Return how far apart neighbours along each dim are drawn: by memory, or row after row."""
    if isinstance(draws, PhiloxDraws):
        return draws.strides
    if draws.tail is None:
        return memory_order(written)
    if not written.is_contiguous:
        raise NotSliceable
    return written.stride


def _cut(value: Tensor, shape: tuple[int, ...], part: Part) -> Tensor:
    """Return a part of a constant that broadcasts to ``shape``."""
    if not value.dim():
        return value
    return select(broadcast(Window.of(value), shape), part).on(value.untyped_storage())


def _is_exact(write: Write) -> bool:
    """Whether the operator does one rounding an element; alpha, for one, makes that two."""
    has_options = any(value is not None and value != 1 for value in write.kwargs.values())
    return not has_options and len(write.outputs) <= 1


def _shape(tensor: Snapshot | Tensor) -> tuple[int, ...]:
    return tensor.window.shape if isinstance(tensor, Snapshot) else tuple(tensor.shape)


def _with(part: Part, at: int, factor: Factor) -> Part:
    return (*part[:at], factor, *part[at + 1 :])


def _without_dim(part: Part, at: int) -> Part:
    """Return the part of one of the tensors that were stacked: the dim at ``at`` is not theirs."""
    dim = part[at].dim
    return tuple(
        Factor(-1, 0, 0, 1)
        if position == at
        else replace(factor, dim=factor.dim - (factor.dim > dim))
        for position, factor in enumerate(part)
    )
