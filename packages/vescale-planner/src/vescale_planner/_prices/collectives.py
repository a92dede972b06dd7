"""How long collectives take: bytes over the links that carry them, and the latency of rounds.

[Note: levels] A group has ``k`` ranks on each of ``nodes`` nodes. Every byte that a node lacks
enters it once, over the links of its ``k`` ranks together, and is passed on inside, meanwhile:

    all-gather of N bytes = max((n - 1) / n * N / inside, (nodes - 1) / nodes * N / (k * outside))

as in NCCL's rings, of which every network card has one (NCCL user guide, "busbw" of nccl-tests,
PERFORMANCE.md). ``outside`` is what one rank has of its node's cards, all of them added up, since
the other groups of the node communicate at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vescale_planner.cluster import Cluster

from .columns import Counts, Values

# What a step of a ring takes of the time of a message: NCCL's are 2 and 4 microseconds ("LL128",
# with what a card is asked for), its messages of the presets 5 and 15.
_STEP_INSIDE, _STEP_ACROSS = 2 / 5, 4 / 15

# One number, or one for each of many candidates.
_Bytes = float | Values
_Ranks = int | Counts
_Messages = float | Values


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how far apart neighbours are in the world."""

    ranks: _Ranks
    stride: _Ranks = 1

    def per_node(self, cluster: Cluster) -> Counts:
        """Return how many of them share a node."""
        return np.maximum(1, np.minimum(self.ranks, cluster.ranks_per_node // self.stride))

    def nodes(self, cluster: Cluster) -> Counts:
        """Return how many nodes they are on."""
        return -(-self.ranks // self.per_node(cluster))


def all_gather(
    nbytes: _Bytes, group: Group, cluster: Cluster, *, messages: _Messages = 1
) -> Values:
    """Return the seconds of an all-gather, or a reduce-scatter in the backend's order.

    Args:
        nbytes: Of what every rank has afterwards, or had before.
        group: Who communicates.
        cluster: The machines.
        messages: Collectives that these bytes are divided over.
    """
    return _transfer(nbytes, group, cluster) + messages * _latency_of_ring(group, cluster)


def all_reduce(
    nbytes: _Bytes, group: Group, cluster: Cluster, *, messages: _Messages = 1
) -> Values:
    """Return the seconds of a sum that all ranks get: of twice the bytes, up and down a tree."""
    return 2 * (_transfer(nbytes, group, cluster) + messages * _latency_of_tree(group, cluster))


def _transfer(nbytes: _Bytes, group: Group, cluster: Cluster) -> Values:
    """Return the seconds of an all-gather's bytes alone, see [Note: levels]."""
    ranks, per_node, nodes = group.ranks, group.per_node(cluster), group.nodes(cluster)
    inside = (ranks - 1) / ranks * nbytes / cluster.inside_bytes_per_second
    across = (nodes - 1) / nodes * nbytes / (per_node * cluster.outside_bytes_per_second)
    return np.maximum(np.where(per_node > 1, inside, 0.0), across)


def exchange(nbytes: _Bytes, group: Group, cluster: Cluster, *, messages: _Messages = 1) -> Values:
    """Return the seconds of an all-to-all: what sums in rank order are made of.

    Every rank sends each other one its row, so ``(n - k) / n`` of the bytes leave the node over
    the rank's own share of the cards: nothing is added up on the way. All go directly, at once.
    """
    ranks, per_node = group.ranks, group.per_node(cluster)
    inside = (per_node - 1) / ranks * nbytes / cluster.inside_bytes_per_second
    across = (ranks - per_node) / ranks * nbytes / cluster.outside_bytes_per_second
    return np.maximum(inside, across) + messages * _latency_of_one(group, cluster)


def send(nbytes: _Bytes, group: Group, cluster: Cluster) -> Values:
    """Return the seconds of a message to the next rank of a group, over its slowest link."""
    is_inside = group.nodes(cluster) == 1
    speed = np.where(is_inside, cluster.inside_bytes_per_second, cluster.outside_bytes_per_second)
    return nbytes / speed + _latency_of_one(group, cluster)


def _latency_of_one(group: Group, cluster: Cluster) -> Values:
    is_inside = group.nodes(cluster) == 1
    return np.where(is_inside, cluster.intra_latency_seconds, cluster.inter_latency_seconds)


def _latency_of_tree(group: Group, cluster: Cluster) -> Values:
    """Return the seconds of as many rounds as a tree has, inside nodes and between them."""
    inside = np.ceil(np.log2(group.per_node(cluster))) * cluster.intra_latency_seconds
    return inside + np.ceil(np.log2(group.nodes(cluster))) * cluster.inter_latency_seconds


def _latency_of_ring(group: Group, cluster: Cluster) -> Values:
    """Return the seconds of as many steps as a ring has, which takes over from a tree's rounds.

    NCCL gathers and scatters in rings but where a node has one rank (2.30, src/graph/tuning.cc).
    """
    nodes = group.nodes(cluster)
    inside = (group.ranks - nodes) * _STEP_INSIDE * cluster.intra_latency_seconds
    steps = inside + (nodes - 1) * _STEP_ACROSS * cluster.inter_latency_seconds
    return np.maximum(_latency_of_tree(group, cluster), steps)
