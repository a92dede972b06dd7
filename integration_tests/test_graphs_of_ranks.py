"""Graphs in batches: nodes, and edges that say where their ends are; every rank has its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, ZERO
from .programs import Run, right
from .test_bad_input import check

GRAPHS, FEATURES, EDGES, CLASSES = 4, 5, 3, 3  # graphs of a batch


class Convolution(nn.Module):
    """Adds up what edges bring to a node, as layers of graph networks do."""

    def __init__(self, inputs: int, norm: bool) -> None:
        super().__init__()
        self.of_edges, self.own = nn.Linear(inputs + EDGES, 8), nn.Linear(inputs, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        sources, targets = edge_index
        messages = self.of_edges(torch.cat([x.index_select(0, sources), edge_attr], 1))
        y = self.own(x)
        return self.norm(y.index_add(0, targets, messages)).relu()


class GraphNet(nn.Module):
    """Classifies graphs, or nodes."""

    def __init__(
        self, *, norm: bool = False, of_nodes: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.first, self.second = Convolution(FEATURES, norm), Convolution(8, norm)
        self.drop, self.head, self.of_nodes = nn.Dropout(dropout), nn.Linear(8, CLASSES), of_nodes

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        x = self.second(self.first(x, edge_index, edge_attr), edge_index, edge_attr)
        if not self.of_nodes:
            sums = x.new_zeros(int(batch.max()) + 1, x.shape[1]).index_add(0, batch, x)
            x = sums / batch.bincount()[:, None]
        return self.head(self.drop(x))


class OfObject(GraphNet):
    """Is called with one object that holds a batch of graphs, and returns its loss."""

    def forward(self, graphs: Any) -> Tensor:  # type: ignore[override]
        logits = super().forward(graphs.x, graphs.edge_index, graphs.edge_attr, graphs.batch)
        return F.cross_entropy(logits, graphs.y)


class SquaredOfObject(OfObject):
    """Its loss is no mean over targets, whose number ranks could tell each other."""

    def forward(self, graphs: Any) -> Tensor:
        x = self.first(graphs.x, graphs.edge_index, graphs.edge_attr)
        return self.second(x, graphs.edge_index, graphs.edge_attr).square().mean()


def graphs_of(num_nodes: list[int], of_nodes: bool = False) -> SimpleNamespace:
    """Return graphs of so many nodes as one."""
    edges = [torch.randint(n, (2, 2 * n)) for n in num_nodes]
    firsts = torch.tensor([0, *num_nodes]).cumsum(0)
    batch = torch.arange(len(num_nodes)).repeat_interleave(torch.tensor(num_nodes))
    total = int(firsts[-1])
    return SimpleNamespace(
        x=torch.randn(total, FEATURES, dtype=torch.float64),
        edge_index=torch.cat([e + first for e, first in zip(edges, firsts[:-1], strict=True)], 1),
        edge_attr=torch.randn(2 * total, EDGES, dtype=torch.float64),
        batch=batch,
        y=torch.randint(CLASSES, (total if of_nodes else len(num_nodes),)),
    )


def part_of(graphs: SimpleNamespace, part: int, parts: int) -> SimpleNamespace:
    """Return a rank's graphs of those of all ranks, as its loader would."""
    count = int(graphs.batch[-1]) + 1
    chosen = graphs.batch * parts // count == part
    edges = chosen[graphs.edge_index[0]]
    first = int(chosen.nonzero()[0])
    of_targets = (
        chosen
        if len(graphs.y) == len(chosen)
        else slice(part * count // parts, (part + 1) * count // parts)
    )
    return SimpleNamespace(
        x=graphs.x[chosen],
        edge_index=graphs.edge_index[:, edges] - first,
        edge_attr=graphs.edge_attr[edges],
        batch=graphs.batch[chosen] - graphs.batch[first],
        y=graphs.y[of_targets],
    )


def train(run: Run, model: nn.Module, sizes: list[int], of_nodes: bool = False) -> None:
    parallel, optimizer = run.start(model)
    parts = (run.constraints or {}).get(DP, 1)
    rank = int(torch.distributed.get_rank()) if parts > 1 else 0
    for _ in range(3):
        graphs = part_of(graphs_of(sizes, of_nodes), rank, parts)
        if isinstance(model, OfObject):
            loss = parallel(graphs)
        else:
            logits = parallel(graphs.x, graphs.edge_index, graphs.edge_attr, graphs.batch)
            loss = F.cross_entropy(logits, graphs.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in parallel.named_parameters():
        assert name
        run.keep(parameter)


def tensors(run: Run) -> None:
    train(run, GraphNet(), [3, 6, 4, 5])


def equally_large(run: Run) -> None:
    train(run, GraphNet(), [5] * GRAPHS)


def an_object(run: Run) -> None:
    train(run, OfObject(), [3, 6, 4, 5])


def nodes_of_an_object(run: Run) -> None:
    """Ranks have other numbers of nodes, each of which counts."""
    train(run, OfObject(of_nodes=True), [3, 6, 4, 7], of_nodes=True)


@pytest.mark.by_day(
    "0-equally_large",
    "0-an_object",
    "0-nodes_of_an_object",
    "3-tensors",
    "3-equally_large",
    "3-an_object",
    "3-nodes_of_an_object",
)
@pytest.mark.parametrize("program", [tensors, equally_large, an_object, nodes_of_an_object])
@pytest.mark.parametrize("stage", [0, 3])
def test_every_rank_has_graphs_of_its_own(
    world2: World, program: Callable[[Run], None], stage: int
) -> None:
    right(world2, program, {DP: 2, ZERO: stage})


def refused(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "norm":
        train(Run({DP: 2}), OfObject(norm=True), [3, 6, 4, 5])
    elif kind == "dropout":
        train(Run({DP: 2}), OfObject(dropout=0.5), [3, 6, 4, 5])
    elif kind == "nodes":
        train(Run({DP: 2}), SquaredOfObject(), [3, 6, 4, 5])
    else:
        train(Run({DP: 2, "batch.gradient_accumulation": 2}), GraphNet(), [5] * GRAPHS)


def test_nodes_that_meet_in_a_norm_are_refused(world2: World) -> None:
    check(
        world2,
        ValueError,
        r"edge_index.*ends of edges.*'first\.norm'.*data_parallel",
        refused,
        "norm",
    )


def test_means_over_unknown_numbers_of_nodes_are_refused(world2: World) -> None:
    message = "edge_index.*a loss that is not known to be a mean over targets.*in the loop"
    check(world2, ValueError, message, refused, "nodes")


def test_graphs_are_not_cut_into_micro_batches(world2: World) -> None:
    check(world2, ValueError, "batch of graphs.*gradient_accumulation cuts its", refused, "parts")


def test_dropout_of_graphs_is_drawn_by_each_rank_with_a_warning(world2: World) -> None:
    check(world2, UserWarning, "at 'drop.<random:0>'.*a stream of its own", refused, "dropout")
