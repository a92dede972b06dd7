"""What a block does to the forms of its arguments, found without leaving anything in these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._pipeline.cuts.outline import Argument, outline_of


class Cache:
    """What a model makes in its forward, and its blocks put rows into."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []


class Routed(nn.Module):
    """Needs values to run, as routers of experts do, behind what it has put into the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, cache: Cache) -> Any:
        cache.rows.append(self.linear(x))
        kept = torch.cat(cache.rows)
        counts = kept.argmax(-1).bincount(minlength=3).tolist()
        return torch.cat(kept.split(counts)), x, cache


def test_a_block_that_needs_values_and_a_cache_is_run_on_a_copy_of_it() -> None:
    skeleton, cache = Routed().to("meta"), Cache()
    found = outline_of(skeleton, "layers.0", (torch.ones(4, 3),), {"cache": cache})
    made, given, returned = found.output
    assert (made.shape, made.device.type) == ((4, 3), "meta")
    assert given == Argument(0)
    assert returned is cache
    assert not cache.rows
