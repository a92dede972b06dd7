"""What every kind of candidate asks of axes: who owns them, and where they are in their owners.

[Note: axes behind each other]
A matrix may pack what is sharded along axes that have nothing to do with each other: a fused
output matrix reads heads of attention and, behind them, features of an MLP
(``out(cat([attention, mlp], -1))``), and a fused input projection makes both. Sharded along one of
them alone, the product over all of its columns would be a sum that counts the other once a rank.
So a candidate is along several axes at once, one of each part, each sharded on its own: what is
said here of "an axis" is said of any of ``atoms``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_parallel._model.fqns import generalize
from vescale_parallel._tensor_parallel.chunks import Parts, number_or_lengths, shard_of_parts
from vescale_parallel._tensor_parallel.read_by_forward.arguments import ArgumentSlice
from vescale_parallel._trace.axes import (
    Argument,
    Axes,
    Dim,
    Graph,
    Obstacle,
    RefusedError,
    Trace,
    Value,
    is_within,
)

# Axes of one candidate.
Atoms = frozenset[int]
# Choices of axes for the parts of packed parameters that are looked at.
_MAX_STEPS = 64


@dataclass(eq=False)
class Search:
    """A forward, and the ranks among which its parameters are to be sharded.

    Attributes:
        graph: The forward.
        size: Ranks.
        names: FQNs, tied ones included, of each parameter by its value's index.
        obstacles: Of each atom.
        rejected: (axis, reason) found so far.
    """

    graph: Graph
    size: int
    names: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    obstacles: dict[int, list[Obstacle]] = field(default_factory=lambda: defaultdict(list))
    rejected: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __post_init__(self) -> None:
        for fqn, value in self.trace.parameters.items():
            self.names[value.index].append(fqn)
        for obstacle in self.trace.obstacles:
            for atom in self.axes.atoms(obstacle.dim):
                self.obstacles[atom].append(obstacle)

    @property
    def trace(self) -> Trace:
        return self.graph.trace

    @property
    def axes(self) -> Axes:
        return self.graph.trace.axes

    def owners(self) -> dict[int, list[Value]]:
        """Return the atoms of matrices, and every parameter that has them."""
        atoms: dict[int, list[Value]] = defaultdict(list)
        for value in dict.fromkeys(self.trace.parameters.values()):
            if 0 in value.shape:
                continue
            for atom in self.axes.atoms(axis for dim in value.dims for axis in dim):
                atoms[atom].append(value)
        return {atom: owners for atom, owners in atoms.items() if any(map(_is_matrix, owners))}

    def together(self, atom: int, owners: Mapping[int, list[Value]]) -> Iterator[Atoms]:
        """Yield axes to be sharded with one that parameters pack: [Note: axes behind each other].

        One of each part, major ones first, or none: such parts would be read whole.
        """
        waiting = [(frozenset((atom,)), frozenset[Dim]())]
        for _ in range(_MAX_STEPS):
            if not waiting:
                return
            atoms, whole = waiting.pop()
            part = next((p for p in self._beside(atoms, owners) if p not in whole), None)
            if part is None:
                yield atoms
                continue
            others = [each for each in self._atoms_within(part) if each in owners]
            choices = [each for each in others if not self.axes.sizes[each] % self.size]
            waiting.append((atoms, whole | {part}))
            waiting += [(atoms | {each}, whole) for each in reversed(choices)]

    def _beside(self, atoms: Atoms, owners: Mapping[int, list[Value]]) -> Iterator[Dim]:
        """Yield the parts of parameters that do not have an axis, where others have it."""
        for value in dict.fromkeys(value for atom in sorted(atoms) for value in owners[atom]):
            for dim in value.dims:
                if atoms & self.axes.atoms(dim):
                    yield from self._parts_without(atoms, dim)

    def _parts_without(self, atoms: Atoms, dim: Dim) -> Iterator[Dim]:
        factors = self.axes.factors(dim)
        having = [axis for axis in factors if atoms & self.axes.atoms((axis,))]
        if not having:
            yield factors
        for axis in having:
            for segment in self.axes.segments(axis) or ():
                yield from self._parts_without(atoms, segment.dim)

    def _atoms_within(self, dim: Dim) -> list[int]:
        """Return the atoms of a dimension, major to minor."""
        found: list[int] = []
        for axis in self.axes.factors(dim):
            segments = self.axes.segments(axis)
            below = [a for s in segments or () for a in self._atoms_within(s.dim)]
            found += [axis] if segments is None else below
        return list(dict.fromkeys(found))

    def tied(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Return all names of parameters."""
        values = [self.trace.parameters[fqn].index for fqn in fqns]
        return tuple(sorted(name for index in values for name in self.names[index]))

    def check_length(self, length: int) -> None:
        if length % self.size:
            raise RefusedError(f"its length {length} is not divisible by {self.size}")

    def reject(self, atom: int, owners: list[Value], reason: str) -> None:
        first = next(filter(_is_matrix, owners))
        dim = next(d for d, dim in enumerate(first.dims) if atom in self.axes.atoms(dim))
        pattern = generalize(first.parameter or "")
        self.rejected.append((f"{pattern} dim {dim} length {self.axes.sizes[atom]}", reason))

    def placements(
        self, atoms: Atoms, owners: list[Value]
    ) -> tuple[dict[str, Placement], dict[tuple[str, str], tuple[Placement, ...]]]:
        """Return the placement that shards an axis, of every parameter that has it.

        And of those of which some parts do not have it, what reads these parts whole.
        """
        found: dict[str, Placement] = {}
        reads: dict[tuple[str, str], tuple[Placement, ...]] = {}
        for value in owners:
            dims = [d for d, dim in enumerate(value.dims) if atoms & self.axes.atoms(dim)]
            if len(dims) > 1:
                raise RefusedError(f"is in {len(dims)} dimensions of {value.parameter}")
            parts = self._parts(atoms, value.dims[dims[0]], value)
            placement = shard_of_parts(dims[0], number_or_lengths([n for n, _ in parts]))
            found |= dict.fromkeys(self.names[value.index], placement)
            if not all(has_it for _, has_it in parts):
                self._check_whole_parts(value, parts)
                reads[self._read_at(value)] = tuple(
                    Shard(dims[0]) if has_it else Replicate() for _, has_it in parts
                )
        return found, reads

    def sliced(
        self, atoms: Atoms, buffer: str, owners: list[Value]
    ) -> dict[tuple[str, str], tuple[Placement, ...]] | None:
        """Return which parts of a buffer a module reads: an element for each head, or feature.

        Or several parts, as those of a parameter below the module, of which some may be whole.
        None if it is otherwise, or other modules read it, or it is written.
        """
        value, (module, _, name) = self.trace.buffers[buffer], buffer.rpartition(".")
        dims = [d for d, dim in enumerate(value.dims) if atoms & self.axes.atoms(dim)]
        is_read = all(is_within(s.module, module) for s in self.graph.readers[value.index])
        if not module or module not in self.trace.called or not is_read or len(dims) != 1:
            return None
        # Statistics of norms are written, which their operators do not say.
        if self._is_written(value) or f"{module}.running_mean" in self.trace.buffers:
            return None
        parts = self._parts(atoms, value.dims[dims[0]], value)
        if all(has_it for _, has_it in parts):
            lengths = number_or_lengths([length for length, _ in parts])
            return {(module, name): (shard_of_parts(dims[0], lengths),)}
        for owner in owners:
            same = [self._parts(atoms, dim, owner) == parts for dim in owner.dims]
            if any(same) and is_within(self.names[owner.index][0], module):
                placements = [Shard(dims[0]) if has_it else Replicate() for _, has_it in parts]
                return {(module, name): tuple(placements)}
        return None

    def argument_slice(self, atoms: Atoms, argument: Argument) -> ArgumentSlice | None:
        """Return which part of an argument a rank reads, None if it is not one of each call's."""
        given = self.trace.given[argument]
        found = {self._slice_along(atoms, argument[0], value) for value in given}
        return found.pop() if len(found) == 1 else None

    def _slice_along(self, atoms: Atoms, module: str, value: Value) -> ArgumentSlice | None:
        dims = [d for d, dim in enumerate(value.dims) if atoms & self.axes.atoms(dim)]
        if len(dims) != 1:
            return None
        (dim,) = dims
        parts = self._parts(atoms, value.dims[dim], value)
        if not all(has_it for _, has_it in parts):
            return None
        if len(parts) == 1:
            return ArgumentSlice(dim)
        (_, first), *_ = self.trace.called[module]
        of_first = self.trace.values[first].dims
        rows = self.axes.factors(of_first[0] if of_first else ())
        is_of_rows = self.axes.factors(value.dims[dim])[: len(rows)] == rows
        is_each_row = is_of_rows and self.axes.length(rows) == len(parts)
        return ArgumentSlice(dim, each_row=True) if is_each_row else None

    def _is_written(self, value: Value) -> bool:
        """Whether steps may write into a tensor, or into a view of it."""
        views = {value.index}
        for step in self.trace.steps:
            if step.inputs and step.inputs[0].index in views:
                if step.writes:
                    return True
                views |= {each.index for each in step.outputs if each.nbytes <= value.nbytes}
        return False

    def parts(self, atoms: Atoms, dim: Dim, value: Value) -> Parts:
        """Return the parts of a dimension of each of which an atom is the major axis.

        Raises:
            RefusedError: If some do not have it, or one has it twice.
        """
        parts = self._parts(atoms, dim, value)
        if not all(has_it for _, has_it in parts):
            raise RefusedError(f"is in some segments only of {value.parameter}")
        return number_or_lengths([length for length, _ in parts])

    def _parts(self, atoms: Atoms, dim: Dim, value: Value) -> list[tuple[int, bool]]:
        """Return the lengths of parts that have an atom, and of what is between them."""
        axes = self.axes
        factors = axes.factors(dim)
        having = [k for k, axis in enumerate(factors) if atoms & axes.atoms((axis,))]
        if not having:
            return [(axes.length(factors), False)]
        if len(having) > 1:
            raise RefusedError(f"is twice in one dimension of {value.parameter}")
        (at,) = having
        outer, inner = axes.length(factors[:at]), axes.length(factors[at + 1 :])
        segments = axes.segments(factors[at])
        if segments is None:
            return [(axes.sizes[factors[at]] * inner, True)] * outer
        found: list[tuple[int, bool]] = []
        for segment in segments:
            for length, has_it in self._parts(atoms, segment.dim, value):
                if found and not has_it and not found[-1][1]:  # whole parts that are neighbours
                    found[-1] = (found[-1][0] + length * inner, False)
                else:
                    found.append((length * inner, has_it))
        return found * outer

    def _check_whole_parts(self, value: Value, parts: list[tuple[int, bool]]) -> None:
        whole = [length for length, has_it in parts if not has_it]
        if 2 * sum(whole) > sum(length for length, _ in parts):
            raise RefusedError(f"is in some segments only of {value.parameter}")
        if any(length % self.size for length in whole):
            raise RefusedError(
                f"is in some segments only of {value.parameter}, and another has a length that is "
                f"not divisible by {self.size}"
            )

    def _read_at(self, value: Value) -> tuple[str, str]:
        """Return the innermost module in which a parameter is read, and its name from there."""
        (fqn, *others) = self.names[value.index]
        module = fqn.rpartition(".")[0]
        readers = self.graph.readers[value.index]
        while not (
            module in self.trace.called and all(is_within(s.module, module) for s in readers)
        ):
            if not module:
                others.append(fqn)
                break
            module = module.rpartition(".")[0]
        if others or not module:
            raise RefusedError(
                f"is in some segments only of {value.parameter}, which several modules read"
            )
        return module, fqn.removeprefix(f"{module}.")


def _is_matrix(value: Value) -> bool:
    return sum(map(bool, value.dims)) > 1
