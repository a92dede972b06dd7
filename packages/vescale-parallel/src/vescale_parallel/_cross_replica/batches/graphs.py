"""Graphs in a batch: nodes, and edges that say where their ends are among them.

[Note: graphs of ranks] The nodes of all graphs of a batch are the rows of one tensor, and edges
are pairs of places in it, (2 x edges). So neither can be cut along its first dim, nor can what
ranks have be put together without counting on where the edges' ends are. What data-parallel ranks
do is known all the same: each has graphs of its own, and one device would be given all of them as
one batch. Whether its numbers are those of the ranks is seen as it is of rows: the model is run on
this rank's graphs, on the same with other features, and on both as one batch, in which nodes,
graphs and edges of the second ones are counted on from those of the first. Whether tensors are
what they are taken for need not be known: if they are not, the runs differ, or fail.

No parts of one rank's graphs are made, and rows of ranks are not put together: micro-batches, and
code in which nodes of several graphs meet, batch norm for example, are refused by name.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.borders import RowCoupling
from vescale_parallel._cross_replica.check import CannotRunError, row_coupling
from vescale_parallel._cross_replica.dims.row_counts import (
    is_edges,
    last_end,
    node_counts,
    num_nodes_of,
    tensors_of_call,
)
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._cross_replica.parts import NUM_ROWS, equal
from vescale_parallel._cross_replica.runs import NotFewerRowsError, RowCheckError, seeded
from vescale_parallel._model.copies import tensors_within
from vescale_parallel._model.leaf_names import leaf_names
from vescale_parallel._model.random_copies import InDouble, in_double, sharing_copy
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.modes.without_chance import WithoutChance


class GraphsMeetError(NotFewerRowsError):
    """Graphs of a batch depend on each other, or it cannot be run to see."""


def coupling_of_call(
    subject: Callable[[], nn.Module],
    given: Given,
    of_rows: Callable[[], RowCoupling],
    *,
    losses_only: bool,
) -> RowCoupling:
    """Return where graphs depend on each other, or rows of a call without graphs.

    Args:
        subject: Makes the model to run: on the CPU, with values in float64.
        given: What it is called with.
        of_rows: Finds the same of rows.
        losses_only: As for :func:`.row_coupling`.

    Raises:
        GraphsMeetError: If there are graphs that depend on each other.
    """
    if num_nodes_of(given) is None:
        return of_rows()
    try:
        model = subject()
    except RowCheckError:
        return of_rows()
    graphs = _coupling_of_graphs(model, given, losses_only)
    if isinstance(graphs, RowCoupling):
        return graphs
    try:
        rows = of_rows()
    except RowCheckError as error:
        raise GraphsMeetError(_refusal(given, graphs)) from error
    if rows.regions and _takes_edges_for_rows(given, rows.num_rows(*given)):
        raise GraphsMeetError(_refusal(given, graphs))
    return rows


def _coupling_of_graphs(model: nn.Module, given: Given, losses_only: bool) -> RowCoupling | str:
    """Return what is known of graphs that do not depend on each other, or why others do."""
    found: list[str] = []
    for whole, *halves in graph_batches(given):
        try:
            coupling = row_coupling(model, whole, halves, losses_only=losses_only)
        except RowCheckError as error:
            found.append(f"that could not be seen: {error}")
            continue
        if not coupling.regions:
            return replace(coupling, given=None, of_graphs=True)
        found.append(f"they do in {_where_graphs_meet(model, whole, halves)}")
    return found[0]


def _where_graphs_meet(model: nn.Module, whole: Given, halves: Sequence[Given]) -> str:
    """Return the first module to return something else for all graphs, or what else it is.

    The modules that :func:`.row_coupling` names are run on parts of what they had for all rows,
    in which the ends of edges are not counted from the first node.
    """
    runs = [_returned_tensors(model, each) for each in (whole, *halves)]
    for (fqn, both), *parts in zip(*runs, strict=False):
        first, other = (part for _, part in parts)
        if not both.dim():
            continue
        is_cut = both.shape[0] == first.shape[0] + other.shape[0]
        if is_cut and not equal(torch.cat([first, other]), both):
            return repr(fqn or "the model")
    return "a loss that is not known to be a mean over targets, or in a buffer"


def _returned_tensors(model: nn.Module, given: Given) -> list[tuple[str, Tensor]]:
    """Return what modules return that return one tensor, those that a module calls before it."""
    found: list[tuple[str, Tensor]] = []
    subject = sharing_copy(model)
    for fqn, module in subject.named_modules():

        def note(module: nn.Module, args: Any, output: Any, fqn: str = fqn) -> None:
            if isinstance(output, Tensor):
                found.append((fqn, output.detach().clone()))

        module.register_forward_hook(note)
    args, kwargs = given
    with contextlib.suppress(Exception), seeded(), torch.no_grad(), InDouble(), WithoutChance():
        subject(*args, **kwargs)
    return found


def graph_batches(given: Given, *, alike: bool = False) -> Iterator[list[Given]]:
    """Yield a batch of all graphs twice, and both halves of it, for likely numbers of nodes.

    The second half has other features and targets, or with ``alike`` the same ones.
    """
    tensors = [*tensors_of_call(given)]
    first = {id(x): in_double(x) for x in tensors}
    for num_nodes in node_counts(tensors):
        places = {id(x): _places(x, num_nodes) for x in tensors}
        generator = torch.Generator().manual_seed(0)
        others = {
            at: x if alike or places[at] is not None else _other_values(x, generator)
            for at, x in first.items()
        }
        lengths = _lengths(tensors, num_nodes)
        both = {at: _joined(x, others[at], places[at], lengths) for at, x in first.items()}
        yield [_with_tensors(given, each) for each in (both, first, others)]


def _takes_edges_for_rows(given: Given, num_rows: int) -> bool:
    """Whether a check on so many rows may have taken nodes or edges of graphs for rows.

    Nodes are not, if it ran on a few of them though edges have their ends at later ones.
    """
    edges = [x for x in tensors_of_call(given) if is_edges(x)]
    return any(num_rows == x.shape[1] or last_end(x) < NUM_ROWS for x in edges)


def _refusal(given: Given, why: str) -> str:
    return (
        f"{_named_edges(given)} of this call are the ends of edges between nodes, the rows of "
        "another tensor: a batch of graphs. It is not cut; each data-parallel rank has graphs of "
        "its own, which gives one device's numbers where graphs do not depend on each other, but "
        f"{why}. Use norms of one node or one graph (nn.LayerNorm) in place of those of a batch, "
        "return F.cross_entropy of targets, or results and compute the loss in the loop, in place "
        "of other losses, or use data_parallel.size 1"
    )


def refused_parts(in_parts_by: str) -> str:
    """Return why a call with graphs is not run in micro-batches."""
    return (
        "the model is called with a batch of graphs, nodes and the ends of edges, but "
        f"{in_parts_by} cuts its tensors along their first dim, which takes the edges' nodes "
        "away. Use pipeline_parallel.microbatches 1 or batch.gradient_accumulation 1, and for "
        "more graphs in a step call model and backward several times"
    )


class _Places(NamedTuple):
    """How numbers that are places of nodes or graphs go on behind those of others.

    Attributes:
        dim: Along which places follow each other.
        offset: What is added to them.
        skipped: How many of the first ones are left out.
    """

    dim: int
    offset: int
    skipped: int = 0


def _places(x: Tensor, num_nodes: int) -> _Places | None:
    """Return how a tensor of places goes on, None for features, targets and other tensors."""
    if is_edges(x):
        return _Places(1, num_nodes)
    if x.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool or not x.numel():
        return None
    steps = x.diff()
    if int(x[0]) != 0 or not bool((steps >= 0).all()):
        return None
    if int(x[-1]) == num_nodes:  # where graphs begin, and where the last one ends
        return _Places(0, num_nodes, 1)
    if len(x) == num_nodes and bool((steps <= 1).all()):
        return _Places(0, int(x[-1]) + 1)  # which graph every node is of
    return None


def _joined(first: Tensor, other: Tensor, places: _Places | None, lengths: set[int]) -> Tensor:
    if places is not None:
        return torch.cat([first, other[places.skipped :] + places.offset], places.dim)
    return torch.cat([first, other]) if first.dim() and len(first) in lengths else first


def _lengths(tensors: Sequence[Tensor], num_nodes: int) -> set[int]:
    """Return how many nodes, edges and graphs there are."""
    found = {num_nodes, *(x.shape[1] for x in tensors if is_edges(x))}
    for x in tensors:
        places = _places(x, num_nodes)
        if places is not None and places.dim == 0:
            found.add(len(x) - 1 if places.skipped else places.offset)
    return found


def _other_values(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.is_floating_point():
        return x * (1 + 0.1 * torch.rand(x.shape, generator=generator, dtype=x.dtype))
    return x.roll(1, 0) if x.dim() else x


def _with_tensors(given: Given, tensors: Mapping[int, Tensor]) -> Given:
    """Return the same call with other tensors."""

    def other(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tensors[id(leaf)]
        if next(tensors_within(leaf), None) is None:
            return leaf
        try:
            return copy.deepcopy(leaf, dict(tensors))
        # Arbitrary user objects.
        except Exception as error:
            raise CannotRunError(f"{type(leaf).__name__} cannot be copied: {error}") from error

    return pytree.tree_map(other, given)


def _named_edges(given: Given) -> str:
    """Return the names of the tensors that hold edges."""
    args, kwargs = given
    names = [*(f"argument {each}" for each in leaf_names(args)), *leaf_names(kwargs)]
    found: list[str] = []
    for name, leaf in zip(names, pytree.tree_leaves(given), strict=True):
        if isinstance(leaf, Tensor):
            found += [name] if is_edges(leaf) else []
            continue
        found += [f"{name}.{each}" for each in _names_within(leaf)]
    return ", ".join(map(repr, found))


def _names_within(thing: Any) -> list[str]:
    """Return the attributes of an object, or keys of mappings in them, that hold edges."""
    held: dict[str, Any] = dict(vars(thing)) if hasattr(thing, "__dict__") else {}
    for each in [thing, *held.values()]:
        if isinstance(each, Mapping):
            held |= {str(name): x for name, x in cast("Mapping[Any, Any]", each).items()}
    return [name for name, x in held.items() if isinstance(x, Tensor) and is_edges(x)]
