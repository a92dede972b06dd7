"""An embedding of which each rank has some rows of the table."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement

from .chunks import part_sizes
from .conversions import Boundary
from .sharding_spec import shard_dim


def shard_embedding_rows(
    module: nn.Embedding, boundary: Boundary, leaves: Placement | None, stack: str
) -> None:
    """Look up the rows that are here, sum over ranks.

    Around forward and not in hooks, so that hooks of users see whole tokens and embeddings,
    whether they were added before or after.
    """
    ranks, own, dim = boundary.ranks, module.forward, shard_dim(leaves)
    sizes = part_sizes(module.num_embeddings, ranks.size)
    first, num_rows = sum(sizes[: ranks.rank]), sizes[ranks.rank]
    if module.padding_idx is not None:
        padding = module.padding_idx - first
        module.padding_idx = padding if 0 <= padding < num_rows else None

    @functools.wraps(own)
    def lookup(*args: Any, **kwargs: Any) -> Tensor:
        name = None if args else next(iter(kwargs))
        ids: Tensor = args[0] if name is None else kwargs[name]
        is_row = (ids >= 0) & (ids < sum(sizes))
        # What is no row on any rank stays, for the lookup to refuse.
        elsewhere = is_row & ((ids < first) | (ids >= first + num_rows))
        local = (ids - first).masked_fill(elsewhere, 0)
        if name is None:
            output = own(local, *args[1:], **kwargs)
        else:
            output = own(**{**kwargs, name: local})
        here = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return boundary.leave(here, dim, stack)

    module.forward = lookup
