"""What every kind of candidate asks of an axis: who owns it, and where it is in its owners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.distributed.tensor import Placement

from vescale_parallel._model.fqns import generalize
from vescale_parallel._tensor_parallel.sharding_spec import Parts, shard_of_parts
from vescale_parallel._trace.axes import Axes, Dim, Graph, Obstacle, RefusedError, Trace, Value


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

    def placements(self, atom: int, owners: list[Value]) -> dict[str, Placement]:
        """Return the placement that shards an atom, of every parameter that has it."""
        found: dict[str, Placement] = {}
        for value in owners:
            dims = [d for d, dim in enumerate(value.dims) if atom in self.axes.atoms(dim)]
            if len(dims) > 1:
                raise RefusedError(f"is in {len(dims)} dimensions of {value.parameter}")
            parts = self.parts(atom, value.dims[dims[0]], value)
            found |= dict.fromkeys(self.names[value.index], shard_of_parts(dims[0], parts))
        return found

    def parts(self, atom: int, dim: Dim, value: Value) -> Parts:
        """Return the parts of a dimension of each of which an atom is the major axis.

        Raises:
            RefusedError: If some do not have it, or one has it twice.
        """
        lengths = self._part_lengths(atom, dim, value)
        return len(lengths) if len(set(lengths)) == 1 else lengths

    def _part_lengths(self, atom: int, dim: Dim, value: Value) -> tuple[int, ...]:
        axes = self.axes
        factors = axes.factors(dim)
        having = [k for k, axis in enumerate(factors) if atom in axes.atoms((axis,))]
        if len(having) > 1:
            raise RefusedError(f"is twice in one dimension of {value.parameter}")
        (at,) = having
        outer, inner = axes.length(factors[:at]), axes.length(factors[at + 1 :])
        segments = axes.segments(factors[at])
        if segments is None:
            return (axes.sizes[factors[at]] * inner,) * outer
        if not all(atom in axes.atoms(segment.dim) for segment in segments):
            raise RefusedError(f"is in some segments only of {value.parameter}")
        lengths = [n for each in segments for n in self._part_lengths(atom, each.dim, value)]
        return tuple(length * inner for length in lengths) * outer


def _is_matrix(value: Value) -> bool:
    return sum(map(bool, value.dims)) > 1
