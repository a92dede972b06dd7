"""How long the planner takes collectives to be, beside what NCCL's own tuning takes them to be.

    python benchmarks/collectives.py

NCCL chooses an algorithm and a protocol by a model of its own (NCCL 2.30, ``src/graph/tuning.cc``:
``ncclTopoTuneModel`` and ``ncclTopoGetAlgoTime``): a latency, which is a constant and so much a
step, and the bytes over a bandwidth. :func:`nccl_seconds` is that model for nodes of eight H100
that are connected by NVLink, with one InfiniBand card of 400 Gbit/s each, on AMD processors, and
without SHARP. Prints one JSON object: for each collective, number of ranks and bytes both times in
microseconds, what NCCL would choose, and the ratio of the planner's time to NCCL's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from vescale_planner import Cluster
from vescale_planner._prices.collectives import Group, all_gather, all_reduce

Kind = Literal["all_gather", "all_reduce"]
RANKS = (2, 4, 8, 16, 64, 512)
SIZES = tuple(2**power for power in (16, 20, 22, 24, 26, 28, 30))
PER_NODE = 8

# Of the search over rings: eight, one a card, each of the fastest speed of which all together fit
# into the 18 links of 20.6 GB/s that a GPU has.
_CHANNELS, _CHANNEL = 8, 45.0


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Microseconds of one call and of a step, inside nodes and between them, by algorithm.

    Attributes:
        base: Of every call, of rings.
        base_tree: Likewise, of trees.
        nvlink: Of a step of a ring inside a node.
        nvlink_tree: Of a tree's.
        net: Of a ring's step between nodes.
        net_tree: Of a tree's.
    """

    base: float
    base_tree: float
    nvlink: float
    nvlink_tree: float
    net: float
    net_tree: float


PROTOCOLS = {
    "LL": Protocol(base=6.6, base_tree=6.8, nvlink=0.6, nvlink_tree=0.6, net=2.7, net_tree=5.0),
    "LL128": Protocol(
        base=14.0, base_tree=14.0, nvlink=1.9, nvlink_tree=1.25, net=4.0, net_tree=8.5
    ),
    "Simple": Protocol(
        base=8.4, base_tree=8.4, nvlink=3.4, nvlink_tree=4.0, net=14.0, net_tree=14.0
    ),
}
# What trees reach of their bandwidth, of 64 B, 128 B and so on to 256 MB.
_TREE = {
    "LL": "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1 1 1 1",
    "LL128": "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1 1",
    "Simple": ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9",
}
# GB/s that LL reaches at most, on one node, on two and on more; a tree's channel likewise.
_LL = (141.0, 22.5, 19.0)
_TREE_CHANNEL = {
    "LL": (38.7, 41.4, 36.0),
    "LL128": (36.7, 36.7, 29.0),
    "Simple": (38.7, 41.4, 36.0),
}
_RING_LL128_CHANNEL = 36.7
_NVLS_EFFICIENCY = 0.85
# Microseconds a message between nodes costs its sender.
_NET_OVERHEAD = 2.0


def nccl_seconds(kind: Kind, nbytes: int, ranks: int) -> tuple[float, str]:
    """Return the seconds that NCCL takes a collective to need, and how it would run it.

    Args:
        kind: Which; a reduce-scatter takes as long as an all-gather.
        nbytes: Of what every rank has afterwards.
        ranks: On as many nodes of eight as they need.
    """
    found = dict(_ways(kind, nbytes, ranks))
    way = min(found, key=lambda each: found[each])
    return found[way] * 1e-6, way


def _ways(kind: Kind, nbytes: int, ranks: int) -> Iterator[tuple[str, float]]:
    nodes = -(-ranks // PER_NODE)
    steps = (ranks - 1) * (2 if kind == "all_reduce" else 1)
    for name, protocol in PROTOCOLS.items():
        latency, bandwidth = _ring(name, protocol, kind, nbytes, ranks, nodes)
        yield f"ring {name}", latency + nbytes / (1e3 * bandwidth * ranks / steps)
        if kind == "all_reduce":
            latency, bandwidth = _tree(name, protocol, nbytes, ranks, nodes)
            yield f"tree {name}", latency + nbytes / (1e3 * bandwidth / 2)
    if nodes == 1:  # sums in the switch
        pipelined = 2.0 if kind == "all_reduce" else (ranks - 1) / ranks
        channel = _CHANNEL * _NVLS_EFFICIENCY * (_CHANNELS - 1) / _CHANNELS * pipelined
        if kind == "all_reduce":
            channel = min(channel, _CHANNEL)
        yield "NVLS", 25.0 + nbytes / (1e3 * _CHANNELS * channel * ranks / steps)


def _ring(
    name: str, protocol: Protocol, kind: Kind, nbytes: int, ranks: int, nodes: int
) -> tuple[float, float]:
    """Return microseconds before and behind the bytes, and GB/s of the busiest link."""
    rounds = 2 if kind == "all_reduce" else 1
    bandwidth = _CHANNELS * _CHANNEL
    if name == "LL":
        bandwidth = min(_LL[min(nodes, 3) - 1], bandwidth * 0.5)
    if name == "LL128":
        bandwidth = min(bandwidth * 0.92, _CHANNELS * _RING_LL128_CHANNEL)
    overhead = 0.0 if nodes == 1 else _NET_OVERHEAD * (3 if name == "Simple" else 1)
    across = rounds * (nodes - 1)
    net = protocol.net_tree if ranks == nodes else protocol.net
    inside = rounds * (ranks - 1) - across
    latency = protocol.base + inside * max(protocol.nvlink, overhead) + across * net
    is_long = nbytes / (_CHANNELS * ranks) >= 64
    if name == "Simple" and nodes > 1 and kind == "all_reduce" and is_long:
        latency *= 1.4
    return latency, bandwidth


def _tree(
    name: str, protocol: Protocol, nbytes: int, ranks: int, nodes: int
) -> tuple[float, float]:
    """Return the same of a tree over nodes, with a chain inside each."""
    at = min(nodes, 3) - 1
    bandwidth = min(_CHANNELS * _CHANNEL * 0.92, _CHANNELS * _TREE_CHANNEL["Simple"][at])
    if name == "LL":
        bandwidth = min(bandwidth / 3.8, _LL[at])
    if name == "LL128":
        reached = 7 / 9 if nodes == 1 else 120 / 128
        bandwidth = min(bandwidth * reached, _CHANNELS * _TREE_CHANNEL["LL128"][at])
    corrections = [float(text) for text in _TREE[name].split()]
    power = int(math.log2(nbytes / 64)) if nbytes >= 64 else 0
    if power < len(corrections):
        bandwidth *= corrections[power]
    inside = (ranks // nodes - 1) * protocol.nvlink_tree
    across = int(math.log2(nodes)) * protocol.net_tree
    return protocol.base_tree + 2 * (inside + across), bandwidth


def planner_seconds(kind: Kind, nbytes: int, ranks: int) -> float:
    """Return the seconds that the planner takes it to need, of ranks next to each other."""
    price: Callable[..., object] = all_reduce if kind == "all_reduce" else all_gather
    return float(price(nbytes, Group(ranks), Cluster.preset("h100")))  # pyright: ignore[reportArgumentType]: one number


def compared() -> list[dict[str, object]]:
    """Return both times of every collective, number of ranks and bytes."""
    rows: list[dict[str, object]] = []
    kinds: tuple[Kind, ...] = ("all_gather", "all_reduce")
    for kind in kinds:
        for ranks in RANKS:
            for nbytes in SIZES:
                theirs, way = nccl_seconds(kind, nbytes, ranks)
                ours = planner_seconds(kind, nbytes, ranks)
                rows.append(
                    {
                        "kind": kind,
                        "ranks": ranks,
                        "bytes": nbytes,
                        "nccl": way,
                        "nccl_us": round(theirs * 1e6, 1),
                        "planner_us": round(ours * 1e6, 1),
                        "ratio": round(ours / theirs, 3),
                    }
                )
    return rows


if __name__ == "__main__":
    print(json.dumps(compared(), indent=1))
