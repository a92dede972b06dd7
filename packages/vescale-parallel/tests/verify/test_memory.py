"""What comparing a plan with one device holds, and that it is let go."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_parallel._cross_replica.context.blocks import SlicedBlocks
from vescale_parallel._cross_replica.context.proof import proven_slicing
from vescale_parallel._rng.known_draws import Place
from vescale_parallel._rng.sharded_rng import ShardedRng
from vescale_parallel._verify import compared_runs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x_BSF: Tensor) -> Tensor:
        return x_BSF + self.down(self.up(x_BSF).relu())


class Attention(Block):
    def forward(self, x_BSF: Tensor) -> Tensor:
        heads = x_BSF.unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return super().forward(y.transpose(1, 2).flatten(2))


class Deep(nn.Module):
    def __init__(self, depth: int, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(16, 32)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSF = self.embed(ids_BS)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return self.head(x_BSF)


IDS = (torch.arange(12).view(2, 6),)


def _doubles() -> int:
    """Return the bytes of float64 tensors that Python knows of."""
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    doubles = [x for x in tensors if x.dtype is torch.float64 and x.device.type == "cpu"]
    storages = [x.untyped_storage() for x in doubles]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def _of_a_plan() -> None:
    assert propose_sharding(Deep(3), "auto", 2, example_batch=IDS).plan


class Placed(Attention):
    """Positions that a block makes itself, for which it has to be shown whole sequences."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        places = torch.arange(x_BSF.shape[1], dtype=x_BSF.dtype)
        return super().forward(x_BSF + places[:, None])


def _of_slices(kind: type[nn.Module] = Attention) -> None:
    def draws_by(blocks: SlicedBlocks) -> ShardedRng:
        return ShardedRng(Place.alone(), {}, None, blocks)

    found = proven_slicing(Deep(3, kind), {"ids_BS": IDS[0]}, 2, draws_by=draws_by, training=True)
    assert found.stacks


def _of_blocks_that_are_shown() -> None:
    _of_slices(Placed)


@pytest.mark.parametrize("compare", [_of_a_plan, _of_slices, _of_blocks_that_are_shown])
def test_a_comparison_leaves_nothing_to_the_garbage_collector(compare: Callable[[], None]) -> None:
    gc.collect()
    before = _doubles()
    gc.disable()
    try:
        compare()
        after = _doubles()
    finally:
        gc.enable()
    assert after == before


def test_blocks_that_are_passed_over_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run, held = compared_runs.run_once, list[int]()

    def noted(module: nn.Module, *args: Any) -> Any:
        storages = [p.untyped_storage() for p in module.parameters()]
        held.append(sum({x.data_ptr(): x.nbytes() for x in storages if x.nbytes() > 8}.values()))
        return run(module, *args)

    monkeypatch.setattr(compared_runs, "run_once", noted)

    def largest(depth: int) -> int:
        held.clear()
        assert propose_sharding(Deep(depth), "auto", 2, example_batch=IDS).plan
        return max(held)

    assert largest(12) == largest(4)
