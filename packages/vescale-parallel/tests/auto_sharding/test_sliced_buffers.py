"""Buffers with an element for each feature of a packed projection: a module reads a rank's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from vescale_parallel import propose_sharding
from vescale_parallel._auto_sharding.find_candidates import find_candidates
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._verify.manual_plan import checked_plan

from .masked_ranks import worst_error

Scale = Callable[[nn.Module, Tensor], Tensor]


class Scaled(nn.Module):
    """Features that a few numbers shift, which all ranks use; both are multiplied by a buffer."""

    def __init__(self, scale: Scale, length: int = 16) -> None:
        super().__init__()
        self.before, self.packed, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(12, 8)
        self.register_buffer("scales", torch.arange(1.0, length + 1.0).double()[None, None])
        self.scale = scale
        self.inner = 12

    def forward(self, x: Tensor) -> Tensor:
        packed = self.scale(self, self.packed(self.before(x)))
        features, few = packed.split([self.inner, 4], -1)
        return x + self.down(torch.tanh(features) * few.mean(-1, keepdim=True))


def written(module: nn.Module, packed: Tensor) -> Tensor:
    scales = module.get_buffer("scales")
    scales[0].add_(1)
    return packed * scales


def assigned(module: nn.Module, packed: Tensor) -> Tensor:
    module.scales = module.get_buffer("scales") + 1
    return packed * module.get_buffer("scales")


def both(module: nn.Module, packed: Tensor) -> Tensor:
    """All of them, too, as a sum."""
    return packed * module.get_buffer("scales") + module.get_buffer("scales").sum()


SCALES: dict[str, Scale] = {
    "read": lambda module, packed: packed * module.get_buffer("scales"),
    "a view": lambda module, packed: packed * module.get_buffer("scales")[0],
    "written": written,
    "assigned": assigned,
    "both": both,
}
BATCH = torch.randn(2, 3, 8, dtype=torch.float64)


def blocks(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(SCALES[name]), Scaled(SCALES[name])).double()


@pytest.mark.parametrize("name", ["read", "a view"])
def test_a_buffer_is_read_as_the_projection_is(name: str) -> None:
    model = blocks(name)
    found = find_candidates(model, BATCH, 2).chosen
    (cut,) = (cut for cut in found if "0.packed.weight" in cut.parameters)
    assert cut.reads["0", "scales"] == (Shard(2), Replicate())
    assert worst_error(model, lambda each: each(BATCH), cut) < 1e-9
    plan = propose_sharding(model, "auto", 2, example_batch=BATCH).plan
    assert plan["*.<read:scales>"] == "(Shard(2), Replicate())"
    assert plan["*.packed.weight"] == "InterleavedShard(0, (12, 4))"


@pytest.mark.parametrize("name", ["written", "assigned", "both"])
def test_layers_stay_whole_with_a_buffer_that_is_used_otherwise(name: str) -> None:
    plan = propose_sharding(blocks(name), "auto", 2, example_batch=BATCH).plan
    assert not any("packed" in pattern or "scales" in pattern for pattern in plan)


class Gated(Scaled):
    """Features and gates of two lengths, all of them sharded."""

    def __init__(self) -> None:
        super().__init__(SCALES["read"], 18)
        self.packed, self.down = nn.Linear(8, 18), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.scale(self, self.packed(self.before(x)))
        features, gates = packed.split([self.inner, self.inner // 2], -1)
        pairs = torch.tanh(features).unflatten(-1, (-1, 2)) * gates.unsqueeze(-1)
        return x + self.down(pairs.flatten(-2))


def test_a_buffer_of_parts_that_are_all_sharded_is_read_in_these() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated()).double()
    plan = propose_sharding(model, "auto", 2, example_batch=BATCH).plan
    assert plan["*.packed.weight"] == "InterleavedShard(0, (12, 6))"
    assert plan["*.<read:scales>"] == "InterleavedShard(2, (12, 6))"


def test_a_buffer_that_is_as_long_as_no_parameter_is_refused() -> None:
    model = nn.Sequential(Scaled(SCALES["read"], 15))
    plan = {
        "0.packed.weight": "InterleavedShard(0, (12, 4))",
        "0.packed.<read:weight>": "(Shard(0), Replicate())",
        "0.<read:scales>": "(Shard(2), Replicate())",
    }
    with pytest.raises(ValueError, match="as long as a parameter below '0'"):
        shard(plan, model, 2)


@pytest.mark.parametrize("name", ["scales", "packed.weight"])
def test_one_placement_is_for_a_buffer_as_long_as_a_sharded_parameter(name: str) -> None:
    model = nn.Sequential(Scaled(SCALES["read"], 15))
    plan = {"0.packed.weight": "Shard(0)", f"0.<read:{name}>": "Shard(0)"}
    with pytest.raises(ValueError, match="a parameter is read as it is sharded"):
        shard(plan, model, 2)


class Normed(nn.Module):
    """Statistics as long as sharded weights, which an operator writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def test_statistics_that_an_operator_writes_are_not_read_by_shards() -> None:
    model = nn.Sequential(Normed()).double()
    plan = {
        "0.up.weight": "Shard(0)", "0.down.weight": "Shard(1)", "0.norm.weight": "Shard(0)",
        "0.norm.bias": "Shard(0)", "0.norm.<read:running_mean>": "Shard(0)",
        "0.norm.<read:running_var>": "Shard(0)",
    }  # fmt: skip
    with pytest.raises(ValueError, match="writes to buffer 'running_"):
        shard(plan, model, 2)


def test_a_buffer_that_is_written_in_place_is_refused_by_name() -> None:
    model = nn.Sequential(Scaled(SCALES["written"])).double()
    plan = {
        "0.packed.weight": "InterleavedShard(0, (12, 4))",
        "0.packed.<read:weight>": "(Shard(0), Replicate())",
        "0.down.weight": "Shard(1)",
        "0.<read:scales>": "(Shard(2), Replicate())",
        "0.<attr:inner>": "Shard(0)",
    }
    with pytest.raises(ValueError, match="writes to buffer 'scales'"):
        checked_plan(model, shard(plan, model, 2), BATCH)
