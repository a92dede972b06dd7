"""Candidates of rows that are looked up, or that the model returns one score for each of."""

from __future__ import annotations

import math

from vescale_parallel._tensor_parallel.chunks import part_sizes
from vescale_parallel._trace.axes import RefusedError, Step, Value, check_partial, is_within

from .axis_search import Search
from .candidate import Candidate


def vocabulary(search: Search, atom: int, owners: list[Value]) -> Candidate | None:
    """Return the candidate along rows of a table, None if the axis is something else.

    Raises:
        RefusedError: If it is one that cannot, or need not, be cut.
    """
    derived = _derived(search, owners)
    if derived is None:
        return None
    uses = _uses(search, derived)
    looked_up = [s for s in uses if atom in search.axes.atoms(s.looked_up)]
    carriers = search.graph.carriers[atom]
    scores = [s for s in uses if s.flops and any(v.index in carriers for v in s.outputs)]
    entries, exits = {step.module for step in scores}, {step.module for step in looked_up}
    others = [s for s in uses if any(v.index in carriers & derived for v in s.inputs)]
    if any(s not in looked_up and s.module not in entries for s in others):
        return None
    if len(entries) > 1 or not (exits or _ends(search, atom, owners, entries)):
        return None
    _check_whole_rows(search, atom, derived)
    _check_table(owners, entries, looked_up)
    check_partial(search.graph, looked_up)
    _check_modules(search, atom, owners, entries, exits)
    if not all(part_sizes(search.axes.sizes[atom], search.size)):
        raise RefusedError(f"has too few rows, {search.axes.sizes[atom]}, for {search.size} ranks")
    outputs = [value for step in (*looked_up, *scores) for value in step.outputs]
    parameters, reads = search.placements(frozenset((atom,)), owners)
    if reads:
        raise RefusedError("is in some segments only of a table")
    return Candidate(
        length=search.axes.sizes[atom],
        kind="vocabulary",
        parameters=parameters,
        entries=tuple(sorted(entries)),
        exits=tuple(sorted(exits)),
        replicated=(),
        flops=sum(step.flops for step in scores),
        communicated_bytes=sum(value.nbytes for value in outputs),
        sharded_numel=sum(math.prod(value.shape) for value in owners),
        tensors=frozenset(value.index for value in outputs),
    )


def _derived(search: Search, owners: list[Value]) -> set[int] | None:
    """Return the values that are parameters, moved or cast; None if they are computed with."""
    waiting = list(owners)
    found = {value.index for value in owners}
    while waiting:
        for step in search.graph.readers[waiting.pop().index]:
            if step.looked_up or any(value.from_batch for value in step.outputs):
                continue
            if step.linear != "first":
                return None
            fresh = [value for value in step.outputs if value.index not in found]
            found.update(value.index for value in fresh)
            waiting += fresh
    return found


def _uses(search: Search, derived: set[int]) -> list[Step]:
    """Return the steps in which parameters meet something else, or are looked up in."""
    indices = {step.index for index in derived for step in search.graph.readers[index]}
    steps = [search.trace.steps[index] for index in sorted(indices)]
    return [s for s in steps if s.looked_up or any(v.from_batch for v in s.outputs)]


def _ends(search: Search, atom: int, owners: list[Value], entries: set[str]) -> bool:
    """Whether an axis is one score for each class, of the model itself."""
    width = max(math.prod(v.shape) // search.axes.sizes[atom] for v in owners)
    in_block = any(part.isdigit() for fqn in entries for part in fqn.split("."))
    returned = bool(search.graph.carriers[atom] & search.graph.returned)
    in_loss = any(o.why.startswith("log_softmax") for o in search.obstacles.get(atom, ()))
    return bool(
        entries and (returned or in_loss) and not in_block and search.axes.sizes[atom] > width
    )


def _check_whole_rows(search: Search, atom: int, derived: set[int]) -> None:
    """Refuse tables of which code picks or sums rows itself: a rank would read other rows.

    What becomes of them may not show in an example: ``weight[pad]`` where no image is given.
    """
    carriers = search.graph.carriers[atom]
    for index in sorted(carriers & derived):
        for step in search.graph.readers[index]:
            made = {value.index for value in step.outputs}
            if not step.looked_up and made & derived and not made & carriers:
                raise RefusedError(f"some rows are read by {step.operator} in {step.module!r}")


def _check_table(owners: list[Value], entries: set[str], looked_up: list[Step]) -> None:
    """Refuse tables that save less than what summing the looked up rows costs."""
    if entries:
        return
    if not any(value.from_batch for step in looked_up for value in step.inputs):
        raise RefusedError("is looked up by position, not by what is in the batch")
    if any(value.shape[0] < math.prod(value.shape[1:]) for value in owners):
        raise RefusedError("is a table with fewer rows than columns")


def _check_modules(
    search: Search, atom: int, owners: list[Value], entries: set[str], exits: set[str]
) -> None:
    """Refuse uses that do not begin and end with a module that owns the table."""
    own = {name.rpartition(".")[0] for value in owners for name in search.names[value.index]}
    for module in sorted((entries | exits) - own):
        raise RefusedError(f"is used by a function in {module!r}, not by a module of its own")
    for obstacle in search.obstacles.get(atom, ()):
        if any(is_within(obstacle.module, module) for module in entries):
            raise RefusedError(f"{obstacle.why} in {obstacle.module!r}")
