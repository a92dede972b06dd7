"""Which tensors of a call are nodes and edges of graphs, read off shapes and places."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.copies import tensors_within
from vescale_parallel._torch_private import pytree

_MOST_COUNTS = 3  # of nodes that are tried


def num_nodes_of(tree: Any) -> int | None:
    """Return how many nodes the graphs of a call have, None if it is called with none."""
    return next(iter(node_counts([*tensors_of_call(tree)])), None)


def tensors_of_call(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a call, those in objects that pytree does not open too, each once."""
    leaves = itertools.chain.from_iterable(map(tensors_within, pytree.tree_leaves(tree)))
    return iter({id(x): x for x in leaves}.values())


def node_counts(tensors: Sequence[Tensor]) -> list[int]:
    """Return how many nodes there may be, the likely number first."""
    edges = [x for x in tensors if is_edges(x)]
    if not edges:
        return []
    last = max(map(last_end, edges))
    firsts = {len(x) for x in tensors if x.dim() and not is_edges(x)}
    counts = [n for n in firsts if n > max(last, 2)]
    of_edges = {x.shape[1] for x in edges}
    return sorted(counts, key=lambda n: (n in of_edges, n))[:_MOST_COUNTS]


def is_edges(x: Tensor) -> bool:
    is_pair = x.dim() == 2 and x.shape[0] == 2 and x.dtype in (torch.int64, torch.int32)
    return is_pair and x.device.type != "meta" and (not x.numel() or int(x.min()) >= 0)


def last_end(edges: Tensor) -> int:
    return int(edges.max()) if edges.numel() else 0
