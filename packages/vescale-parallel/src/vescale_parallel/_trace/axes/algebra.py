"""Named axes: what a tensor dimension is made of, and when two dimensions are the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

# Axes of one dimension, major to minor; their sizes multiply to its length. Empty is length 1.
Dim = tuple[int, ...]
# Sums within sums that are made the same, of what models do on purpose.
_DEEPEST = 8


@dataclass(frozen=True)
class Product:
    """An axis that is several, major to minor: a view split it."""

    axes: Dim


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of an axis, with axes of their own."""

    length: int
    dim: Dim


@dataclass(frozen=True)
class Sum:
    """An axis that is several behind each other: it was sliced, or concatenated."""

    segments: tuple[Segment, ...]


_NONE = Segment(1, ())


@dataclass
class Axes:
    """All axes of one forward: a union-find whose sets may turn out to be products or sums.

    [Note: products and sums]
    A dimension of a fused projection is q, k and v behind each other, and each of the three
    is heads times features. Slices and concatenations make and take apart sums, views make
    and take apart products, and everything else says that two dimensions are one
    (:meth:`unify`). What is neither a product nor a sum in the end is an atom: one decision.
    """

    sizes: list[int] = field(default_factory=list[int])
    _parents: list[int] = field(default_factory=list[int])
    _bodies: list[Product | Sum | None] = field(default_factory=list["Product | Sum | None"])
    _atoms: dict[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    _nested: int = 0

    def new(self, size: int) -> int:
        self.sizes.append(size)
        self._parents.append(len(self._parents))
        self._bodies.append(None)
        return len(self._parents) - 1

    def fresh(self, length: int) -> Dim:
        return () if length == 1 else (self.new(length),)

    def root(self, axis: int) -> int:
        while self._parents[axis] != axis:
            self._parents[axis] = self._parents[self._parents[axis]]
            axis = self._parents[axis]
        return axis

    def factors(self, dim: Iterable[int]) -> Dim:
        """Return a dimension without products: atoms and sums, major to minor."""
        found: list[int] = []
        for axis in map(self.root, dim):
            body = self._bodies[axis]
            found += self.factors(body.axes) if isinstance(body, Product) else [axis]
        return tuple(found)

    def segments(self, axis: int) -> tuple[Segment, ...] | None:
        """Return what a factor is a sum of, None if it is an atom."""
        body = self._bodies[self.root(axis)]
        return body.segments if isinstance(body, Sum) else None

    def atoms(self, dim: Iterable[int]) -> frozenset[int]:
        """Return every atom that a dimension or one of its segments is made of."""
        return frozenset[int]().union(*(self._atoms_of(axis) for axis in dim))

    def _atoms_of(self, axis: int) -> frozenset[int]:
        known = self._atoms.get(axis)
        if known is None:
            root = self.root(axis)
            match self._bodies[root]:
                case Product(axes):
                    known = self.atoms(axes)
                case Sum(segments):
                    known = frozenset[int]().union(*(self.atoms(s.dim) for s in segments))
                case None:
                    known = frozenset((root,))
            self._atoms[axis] = known
        return known

    def covers(self, atoms: Collection[int], dim: Iterable[int]) -> bool:
        """Whether every element of a dimension is along one of several atoms."""
        return any(
            axis in atoms
            or all(self.covers(atoms, s.dim) for s in self.segments(axis) or (_NONE,))
            for axis in self.factors(dim)
        )

    def length(self, dim: Iterable[int]) -> int:
        return math.prod(self.sizes[axis] for axis in dim)

    # ------------------------------------------------------------------ equality

    def unify(self, left: Iterable[int], right: Iterable[int]) -> bool:
        """Make two dimensions of equal length the same; False if they divide differently."""
        self._atoms.clear()
        a, b = list(self.factors(left)), list(self.factors(right))
        while a and b:
            a, b = [*self.factors(a[:1]), *a[1:]], [*self.factors(b[:1]), *b[1:]]
            one, other = a[0], b[0]
            if one == other or self.sizes[one] == self.sizes[other]:
                if not self._merge(one, other):
                    return False
                a, b = a[1:], b[1:]
            elif self.sizes[one] > self.sizes[other]:
                if not self._split(one, self.sizes[other]):
                    return False
            elif not self._split(other, self.sizes[one]):
                return False
        return True

    def _merge(self, one: int, other: int) -> bool:
        one, other = self.root(one), self.root(other)
        if one == other:
            return True
        if isinstance(self._bodies[one], Sum) and isinstance(self._bodies[other], Sum):
            return self._merge_sums(one, other)
        keep, drop = (other, one) if self._bodies[one] is None else (one, other)
        self._parents[drop] = keep
        return True

    def _merge_sums(self, one: int, other: int) -> bool:
        # A dimension that meets itself shifted would be divided into single elements.
        if self._nested == _DEEPEST:
            return False
        self._nested += 1
        try:
            return self._merge_segments(one, other)
        finally:
            self._nested -= 1

    def _merge_segments(self, one: int, other: int) -> bool:
        cuts = sorted({*self._boundaries(one), *self._boundaries(other)})
        if not all(self._cut(axis, at) for axis in (one, other) for at in cuts):
            return False
        pairs = list(zip(self.segments(one) or (), self.segments(other) or (), strict=True))
        self._parents[other] = one
        return all(self.unify(a.dim, b.dim) for a, b in pairs)

    def _split(self, axis: int, major: int) -> bool:
        """Turn a factor into a product whose first axis has ``major`` elements."""
        if self.sizes[axis] % major:
            return False
        segments = self.segments(axis)
        if segments is None:
            minor = self.sizes[axis] // major
            self._bodies[axis] = Product((self.new(major), self.new(minor)))
            return True
        lengths = {segment.length for segment in segments}
        if len(lengths) > 1 or (major % len(segments) and len(segments) % major):
            return False
        first, *others = (segment.dim for segment in segments)
        if not all(self.unify(first, dim) for dim in others):
            return False
        self._bodies[axis] = Product((self.new(len(segments)), *first))
        return True

    # ------------------------------------------------------------------ views

    def regroup(self, dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim] | None:
        """Return the dimensions of a reshaped tensor; None if an axis would be torn."""
        self._atoms.clear()
        rest = [axis for dim in dims for axis in self.factors(dim)]
        made: list[Dim] = []
        for length in shape:
            taken, product = list[int](), 1
            while product < length:
                if not rest:
                    return None
                rest = [*self.factors(rest[:1]), *rest[1:]]
                size = self.sizes[rest[0]]
                if product * size <= length and length % (product * size) == 0:
                    taken.append(rest.pop(0))
                    product *= size
                elif length % product or not self._split(rest[0], length // product):
                    return None
            made.append(tuple(taken))
        return made

    # ------------------------------------------------------------------ sums

    def slice(self, dim: Dim, start: int, length: int) -> Dim | None:
        """Return the axes of consecutive elements; None if they tear a minor axis apart."""
        self._atoms.clear()
        factors = self.factors(dim)
        if length == self.length(factors):
            return factors
        minor = self.length(factors[1:])
        if start % minor or length % minor:
            return None
        segment = self._slice_factor(factors[0], start // minor, length // minor)
        return None if segment is None else (*segment, *factors[1:])

    def _slice_factor(self, axis: int, start: int, length: int) -> Dim | None:
        if length == self.sizes[axis]:
            return (axis,)
        if not (self._cut(axis, start) and self._cut(axis, start + length)):
            return None
        segments = self.segments(axis) or ()
        starts = self._boundaries(axis)
        inside = zip(starts, segments, strict=True)
        return self.cat([s for at, s in inside if start <= at < start + length])

    def cat(self, segments: Sequence[Segment]) -> Dim:
        """Return the axes of dimensions behind each other."""
        segments = [segment for segment in segments if segment.length]
        if len(segments) == 1:
            return segments[0].dim
        length = sum(segment.length for segment in segments)
        dim = self.fresh(length)
        if dim:
            self._bodies[dim[0]] = Sum(tuple(segments))
        return dim

    def _boundaries(self, axis: int) -> list[int]:
        lengths = [segment.length for segment in self.segments(axis) or ()]
        return list(itertools.accumulate(lengths, initial=0))[:-1]

    def _cut(self, axis: int, at: int) -> bool:
        """Make ``at`` a boundary between two segments of a factor."""
        if at in (0, self.sizes[axis]):
            return True
        if self.segments(axis) is None:
            parts = [Segment(n, self.fresh(n)) for n in (at, self.sizes[axis] - at)]
            self._bodies[axis] = Sum(tuple(parts))
            return True
        made: list[Segment] = []
        for start, segment in zip(self._boundaries(axis), self.segments(axis) or (), strict=True):
            if start < at < start + segment.length:
                lower = self.slice(segment.dim, 0, at - start)
                upper = self.slice(segment.dim, at - start, start + segment.length - at)
                if lower is None or upper is None:
                    return False
                made += [
                    Segment(at - start, lower),
                    Segment(start + segment.length - at, upper),
                ]
            else:
                made.append(segment)
        self._bodies[axis] = Sum(tuple(made))
        return True
