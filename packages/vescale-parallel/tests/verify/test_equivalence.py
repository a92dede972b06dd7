"""Proving a sharding plan by running it, and finding the borders of its regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel import propose_sharding
from vescale_parallel._auto_sharding.candidate import Group
from vescale_parallel._auto_sharding.place_collectives import place_collectives
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._trace import dry_run
from vescale_parallel._verify import compared_runs, dry_runs, equivalence, rank_dry_run
from vescale_parallel._verify.dry_runs import DryRuns
from vescale_parallel._verify.equivalence import Compared, Contradiction, check_plan

from .one_device import proposed


class Attention(nn.Module):
    """Counts heads with an integer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x_BSF: Tensor) -> Tensor:
        batch, length, _ = x_BSF.shape
        q, k, v = (
            part.view(batch, length, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(x_BSF).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class BiasedKeys(nn.Module):
    """The gradient of its keys' bias is zero, and what rounding leaves of that."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x_BSF: Tensor) -> Tensor:
        q, k, v = (
            each(F.layer_norm(x_BSF, (64,))).unflatten(-1, (-1, 16)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return x_BSF + 1e4 * self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A residual around attention, and a gate that is whole inside of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()
        self.up, self.scale, self.down = nn.Linear(8, 12), nn.Linear(8, 1), nn.Linear(12, 8)

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attention(self.norm(x_BSF))
        return x_BSF + self.down(self.up(x_BSF).relu() * self.scale(x_BSF).sigmoid())


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x_BSF: Tensor) -> Tensor:
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return x_BSF


class Scanned(Block):
    """Mixes positions between its layers, where the sequence would be cut."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return super().forward(x_BSF).cumsum(1)


class Ungated(Block):
    """Attention of which nothing is cut, and features."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attention(self.norm(x_BSF))
        return x_BSF + self.down(self.up(x_BSF).relu())


class Masked(Block):
    """Fills with the least number of its dtype, which the default dtype has not."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        least = torch.full((), torch.finfo(x_BSF.dtype).min, device=x_BSF.device)
        return torch.maximum(super().forward(x_BSF), least)


ATTENTION = Group(
    parameters={
        "blocks.*.attention.qkv.weight": InterleavedShard(0, 3),
        "blocks.*.attention.out.weight": Shard(1),
    },
    entries=("blocks.*.attention.qkv",),
    exits=("blocks.*.attention.out",),
)
FEATURES = Group(
    parameters={"blocks.*.up.weight": Shard(0), "blocks.*.down.weight": Shard(1)},
    entries=("blocks.*.up",),
    exits=("blocks.*.down",),
)
# Of one module, its names left out.
OWN_ATTENTION = {
    "qkv.weight": "InterleavedShard(0, 3)",
    "out.weight": "Shard(1)",
    "<attr:num_heads>": "Shard(0)",
}
BATCH = (torch.randn(2, 6, 8),)


def run(plan: dict[str, str], model: nn.Module | None = None, size: int = 2) -> frozenset[str]:
    model = Model() if model is None else model
    return check_plan(DryRuns(model, BATCH), shard(plan, model, size)).partial_grads


def test_gradients_that_are_rounding_alone_are_not_told_apart() -> None:
    model, batch = Model(BiasedKeys), (torch.randn(2, 32, 64),)
    plan = {f"blocks.*.{name}.{what}": "Shard(0)" for name in "qkv" for what in ("weight", "bias")}
    plan["blocks.*.out.weight"] = "Shard(1)"
    assert check_plan(DryRuns(model, batch), shard(plan, model, 2)).partial_grads == frozenset()


def test_numbers_of_float64_are_made_in_float64() -> None:
    plan = {**ATTENTION.placed, "blocks.*.attention.<attr:num_heads>": "Shard(0)"}
    assert run(plan, Model(Masked)) == frozenset()
    assert torch.get_default_dtype() == torch.float32


def test_a_right_plan_is_proven_and_tells_whose_gradients_are_addends() -> None:
    plan = {**ATTENTION.placed, "blocks.*.attention.<attr:num_heads>": "Shard(0)"}
    assert run(plan) == frozenset()
    found = run({**FEATURES.placed, "blocks.*.scale.<enter>": "Replicate()"})
    assert found == {f"blocks.{i}.scale.{name}" for i in range(3) for name in ("weight", "bias")}


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "an integer that counts all heads": (ATTENTION.placed, "what it returns differs"),
    "a gate of which gradients are partial values": (
        FEATURES.placed, "the gradient of .* differs",
    ),
    "a sum that is missing": ({"blocks.*.up.weight": "Shard(0)"}, "does not run"),
    "a residual inside of the region": (
        {**FEATURES.placed, "blocks.*.<enter>": "Replicate()"}, "differs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_contradicted(name: str) -> None:
    plan, why = WRONG[name]
    with pytest.raises(Contradiction, match=why):
        run(plan)


def test_borders_and_integers_are_found() -> None:
    found = place_collectives(DryRuns(Model(), BATCH), [ATTENTION, FEATURES], 2, sequence=False)
    assert found.plan["blocks.*.attention.<attr:num_heads>"] == "Shard(0)"
    assert ATTENTION.placed.items() <= found.plan.items()
    # The gate reads what enters the region, but no border around its layers alone is right.
    assert list(found.left_whole) == ["blocks.*.up.weight, blocks.*.down.weight"]


def test_activations_between_blocks_are_cut_along_the_sequence() -> None:
    plan = place_collectives(DryRuns(Model(), BATCH), [ATTENTION], 2, sequence=True).plan
    assert plan["blocks.0.<in>"] == "Replicate() -> Shard(1)"
    assert plan["blocks.2.<out>"] == "Shard(1) -> Replicate()"
    assert plan["blocks.*.attention.out.<leave>"] == "Shard(1)"
    assert plan["blocks.*.norm.weight.<grad>"] == "Partial()"
    assert run(plan) >= {"blocks.0.norm.weight", "blocks.1.up.weight"}


def test_the_sequence_is_gathered_around_layers_that_stay_whole() -> None:
    plan = place_collectives(DryRuns(Model(Ungated), BATCH), [FEATURES], 2, sequence=True).plan
    assert plan["blocks.*.attention.<in>"] == "Shard(1) -> Replicate()"
    assert plan["blocks.*.attention.<out>"] == "Replicate() -> Shard(1)"
    found = run(plan, Model(Ungated))
    assert "blocks.0.norm.weight" in found
    assert "blocks.0.attention.qkv.weight" not in found


def test_a_block_that_mixes_positions_cannot_be_cut_along_the_sequence() -> None:
    with pytest.raises(
        ValueError, match="no way was found to shard activations between the blocks"
    ):
        place_collectives(DryRuns(Model(Scanned), BATCH), [ATTENTION], 2, sequence=True)


def test_nothing_is_drawn_and_nothing_changed() -> None:
    model, state = Model(), torch.get_rng_state()
    before: dict[str, Any] = {name: p.clone() for name, p in model.named_parameters()}
    place_collectives(DryRuns(model, BATCH), [ATTENTION], 2, sequence=True)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


class Wide(nn.Module):
    """A block with more elements than a result is run on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 1 << 22), nn.Linear(1 << 22, 8)

    def forward(self, x_BSF: Tensor) -> Tensor:
        return x_BSF + self.down(self.up(x_BSF).relu())


def test_blocks_that_are_too_large_to_be_run_stay_whole_with_the_reason() -> None:
    with torch.device("meta"):
        model = Model(Wide)
    found = propose_sharding(model, "auto", 2, example_batch=BATCH)
    assert found.plan == {}
    assert any("too large to be run" in why for why in found.left_whole.values())


def test_the_model_is_run_once_beside_one_block_of_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []
    made: list[str] = []
    held = [compared_runs.compare, dry_run.dry_run_whole, rank_dry_run.dry_run_rank]

    def compare(make: Any, *args: Any, **kwargs: Any) -> None:
        compared.append(make().fqn)
        held[0](make, *args, **kwargs)

    def whole(*args: Any, **kwargs: Any) -> Any:
        made.append("whole")
        return held[1](*args, **kwargs)

    def part(*args: Any, **kwargs: Any) -> Any:
        made.append("part")
        return held[2](*args, **kwargs)

    monkeypatch.setattr(equivalence, "compare", compare)
    monkeypatch.setattr(dry_runs, "dry_run_whole", whole)
    monkeypatch.setattr(dry_runs, "dry_run_rank", part)
    run({**FEATURES.placed, "blocks.*.scale.<enter>": "Replicate()"})
    assert compared == ["blocks.0", ""]
    assert made == ["whole", "part"]


def test_what_a_plan_does_not_change_of_blocks_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_again: list[str] = []
    held = compared_runs.compare

    def compare(make: Any, *args: Any, **kwargs: Any) -> None:
        run_again.append(make().fqn)
        held(make, *args, **kwargs)

    monkeypatch.setattr(equivalence, "compare", compare)
    model, compared = Model(), Compared()
    runs, features = (
        DryRuns(model, BATCH),
        {**FEATURES.placed, "blocks.*.scale.<enter>": "Replicate()"},
    )
    own = {f"blocks.0.attention.{key}": value for key, value in OWN_ATTENTION.items()}
    expected = [run(plan) for plan in (features, {**features, **own})]
    run_again.clear()
    first = check_plan(runs, shard(features, model, 2), compared=compared)
    second = check_plan(runs, shard({**features, **own}, model, 2), compared=compared)
    assert [first.partial_grads, second.partial_grads] == expected
    # The second plan says something else of one block, and the model is run under both.
    assert run_again == ["blocks.0", "", "blocks.0", ""]


X = torch.linspace(-1, 1, 2 * 4 * 8).sin().view(2, 4, 8)


class Averaged(nn.Module):
    """Normalizes channels, the last dim, over the batch and the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x_BSF: Tensor) -> Tensor:
        return x_BSF + self.down(self.up(self.norm(x_BSF.mT).mT).relu())


def test_statistics_of_a_part_of_the_sequence_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel\.sequence.*'norm' normalizes"):
        propose_sharding(Model(Averaged), "auto", 2, sequence=True, example_batch=X)


def test_statistics_of_whole_activations_are_proven() -> None:
    model, state = Model(Averaged), torch.get_rng_state()
    found = propose_sharding(model, "auto", 2, example_batch=X)
    assert "blocks.*.up.weight" in found.plan
    assert torch.equal(torch.get_rng_state(), state)


class Shared(Model):
    """A block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


def test_a_block_of_two_names_sums_once() -> None:
    found = proposed(Shared, (X.double(),), 2)
    assert {f"blocks.{i}.attention.qkv.weight" for i in (0, 2)} <= found.plan.keys()


def test_a_plan_that_says_different_things_of_one_module_is_refused() -> None:
    plan = {"blocks.0.up.weight": "Shard(0)", "blocks.2.up.weight": "Shard(1)"}
    model = Shared()
    with pytest.raises(ValueError, match=r"'blocks\.2\.up\.weight' is 'blocks\.0\.up\.weight'"):
        check_plan(DryRuns(model, X), shard(plan, model, 2))
