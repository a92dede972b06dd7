"""What ranks that share experts send each other."""

from __future__ import annotations

import numpy as np

from vescale_planner._partition import LocalPart
from vescale_planner.cluster import Cluster

from .collectives import Group, exchange
from .columns import Columns, Counts, Values


def dispatches(
    p: LocalPart, columns: Columns, cluster: Cluster, passes: Values | Counts
) -> Values:
    """Return the all-to-alls of one micro-batch of a part: nothing hides them.

    Rows of every token go to its experts and come back, in each direction of a pass (GShard,
    Lepikhin et al. 2021, sec. 3.2; docs/decisions/0017-experts-are-shared-by-data-ranks.md), so

        2 x (passes - 1) x exchange of (top-k x hidden x itemsize) bytes a token

    where forward and its recomputation are one pass each, and backward, of two, sends once. A rank
    has its own experts among them, so ``(ep - 1) / ep`` of the rows leave it if all experts get as
    many, which is assumed. How many rows each gets is told first, in a few bytes. Tensor-parallel
    ranks send all of their tokens each (decision 32). That the host waits for the numbers is left
    out, as is how experts of one rank may get more.
    """
    ranks = columns.layout.ep
    if ranks == 1 or not p.part.num_exchanges:
        return np.zeros_like(columns.rows_of_part)
    group, times = Group(ranks, columns.stride_of_experts), passes - 1
    sent = p.part.sent_bytes * columns.rows_of_part
    rows = 2 * times * exchange(sent, group, cluster, messages=p.part.num_exchanges)
    told = (passes - 2) * exchange(np.zeros_like(sent), group, cluster)
    return rows + told * p.part.num_exchanges
