"""A plan is kept for the layouts and sizes of a call, never for its numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import DTensor, GatherWarning, distribute_tensor, emulate

# Each takes a number that decides more than a factor: a norm's order, an epsilon, a filler.
PROGRAMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "layer_norm": lambda x, v: F.layer_norm(x, (8,), eps=v),
    "group_norm": lambda x, v: F.group_norm(x, 3, eps=v),
    "batch_norm": lambda x, v: F.batch_norm(x, None, None, training=True, eps=v),
    "norm over a dim": lambda x, v: torch.linalg.vector_norm(x, v + 1, dim=1),
    "norm": lambda x, v: torch.linalg.vector_norm(x, v + 1),
    "renorm": lambda x, v: x.renorm(v + 1, 0, 1.0),
    "var": lambda x, v: x.var(0, correction=v),
    "cdist": lambda x, v: torch.cdist(x[:, 0], x[:, 1], p=v + 1),
    "huber_loss": lambda x, v: F.huber_loss(x, x * 2, delta=v),
    "smooth_l1_loss": lambda x, v: F.smooth_l1_loss(x, x * 2, beta=v),
    "cross_entropy": lambda x, v: F.cross_entropy(x[:, 0], torch.arange(6), label_smoothing=v),
    "pad": lambda x, v: F.pad(x, (1, 2), value=v),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "index_fill": lambda x, v: x.index_fill(1, torch.tensor([1]), v),
    "scatter": lambda x, v: x.scatter(1, torch.zeros(6, 1, 8, dtype=torch.long), v),
    "full_like": lambda x, v: torch.full_like(x, v),
    "attention": lambda x, v: F.scaled_dot_product_attention(x, x, x, scale=v),
    "lerp": lambda x, v: x.lerp(x * 2, v),
}
LAYOUTS: list[tuple[Placement, ...]] = [
    (Shard(0), Shard(2)),
    (Shard(1), Shard(0)),
    (Replicate(), Partial()),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_another_number_is_not_taken_for_the_first(name: str) -> None:
    warnings.simplefilter("ignore", GatherWarning)
    x = torch.randn(6, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with emulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in LAYOUTS:
            for number in (0.5, 0.875, 0.25):
                result = PROGRAMS[name](distribute_tensor(x, mesh, placements), number)
                assert isinstance(result, DTensor)
                whole = result.full_tensor()
                expected = PROGRAMS[name](x, number)
                # Sums in another order: a few roundings of float64.
                torch.testing.assert_close(
                    getattr(whole, "parts", (whole,))[-1], expected, rtol=1e-11, atol=1e-13
                )
