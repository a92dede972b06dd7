"""What a model is made of, and where a pipeline may cut it."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from vescale_parallel import (
    ParallelPlan,
    block_stacks,
    modules_outside_blocks,
    pipeline_blocks,
    with_constraints,
)
from vescale_parallel._model.blocks import blocks_of, sequence_stacks
from vescale_parallel._model.fqns import generalize
from vescale_parallel._pipeline.stage_assignment import stage_map
from vescale_parallel._tensor_parallel.sharding_spec import resolve


class Tower(nn.Module):
    """Embedding, blocks, head; the norm is defined before the blocks but used after them."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Tower()
        self.probe = nn.Linear(2, 2)


def pipelined(**constraints: object) -> ParallelPlan:
    given_constraints = {f"pipeline_parallel.{key}": v for key, v in constraints.items()}
    return with_constraints(ParallelPlan(), given_constraints)


def test_blocks_are_found_below_wrappers() -> None:
    assert pipeline_blocks(Wrapped()) == tuple(f"inner.blocks.{i}" for i in range(4))


def test_lists_of_mixed_or_single_modules_are_no_blocks() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
    assert block_stacks(mixed) == []
    assert block_stacks(nn.ModuleList([nn.Linear(2, 2)])) == []
    with pytest.raises(ValueError, match="Sequential has none of two or more blocks"):
        pipeline_blocks(mixed)


def test_of_lists_that_nothing_calls_what_is_called_is_a_block() -> None:
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]) for _ in range(2))
    named = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(2, 2)}) for _ in range(2))
    model = nn.ModuleDict({"pairs": pairs, "named": named, "plain": nn.Sequential(*_linears())})
    called = ["pairs.0.0", "pairs.1.0", "named.0.a", "named.1.a", "plain.0", "plain.1"]
    assert blocks_of(model) == tuple(called)
    assert pipeline_blocks(model) == tuple(called)
    assert pipeline_blocks(pairs) == ("0.0", "1.0")


def test_a_block_that_nothing_calls_has_no_parameters_beside_those_of_its_modules() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

    message = "'0' is a Holder with parameters of its own, which nothing calls; give it a forward"
    with pytest.raises(ValueError, match=message):
        pipeline_blocks(nn.ModuleList([Holder(), Holder()]))


def _linears() -> list[nn.Linear]:
    return [nn.Linear(2, 2), nn.Linear(2, 2)]


def test_lists_of_blocks_follow_each_other_unless_one_is_small() -> None:
    class Two(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.encoder = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.decoder = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    encoder, decoder = (tuple(f"{each}coder.{i}" for i in range(3)) for each in ("en", "de"))
    assert pipeline_blocks(Two(8)) == (*encoder, *decoder)
    assert pipeline_blocks(Two(2)) == encoder


def test_blocks_of_classes_in_turns_are_blocks() -> None:
    turns = nn.ModuleList(nn.LayerNorm(2) if i % 2 else nn.Linear(2, 2) for i in range(4))
    assert pipeline_blocks(nn.ModuleDict({"turns": turns})) == tuple(
        f"turns.{i}" for i in range(4)
    )
    assert block_stacks(turns) == []


def test_parameters_belong_to_the_stages_that_use_them() -> None:
    found = stage_map(pipelined(size=2, microbatches=2), Tower())
    assert found is not None
    assert found.starts == [0, 2]
    assert found.stages_of(["embed.weight"]) == (0,)
    assert found.stages_of(["blocks.1.weight"]) == (0,)
    assert found.stages_of(["blocks.2.weight"]) == (1,)
    assert found.stages_of(["embed.weight", "head.weight"]) == (0, 1)
    assert found.stages_of(["scale"]) == (0, 1)


def test_tail_modules_move_to_the_last_stage() -> None:
    assert modules_outside_blocks(Tower())["norm"] == "before"
    plain = stage_map(pipelined(size=2), Tower())
    moved = stage_map(pipelined(size=2, tail_modules=["norm"]), Tower())
    assert plain is not None
    assert moved is not None
    assert plain.stages_of(["norm.weight"]) == (0,)
    assert moved.stages_of(["norm.weight"]) == (1,)


def test_split_points_decide_where_stages_start() -> None:
    found = stage_map(pipelined(size=3, split_points=["blocks.1", "blocks.2"]), Tower())
    assert found is not None
    assert found.starts == [0, 1, 2]


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"size": 5}, "at most 4 pipeline stages, one per block of Tower, got 5"),
        ({"size": 2, "split_points": ["blocks.9"]}, "'blocks.9' is no block of Tower"),
        (
            {"size": 3, "split_points": ["blocks.1"]},
            "expected 2 .* for 3 stages, got 1",
        ),
        ({"size": 3, "split_points": ["blocks.2", "blocks.1"]}, "in the order of the blocks"),
        ({"size": 2, "split_points": ["blocks.0"]}, "none the first block"),
        ({"size": 2, "tail_modules": ["nrom"]}, "'nrom' is no module with parameters outside"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(constraints: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_map(pipelined(**constraints), Tower())


def test_sharding_patterns_stand_for_names() -> None:
    found = resolve(
        {
            "blocks.*.weight": "Shard(0)",
            "head.<out>": "Replicate()",
            "norm.weight.<grad>": "Partial()",
            "blocks.1.<attr:in_features>": "Shard(0)",
            "blocks.2.<attr:in_features>": "Shard(0) of weight",
            "norm.<whole>": "Shard(2)",
            "norm.<whole:gate>": "Shard(1)",
            "*.<read:weight>": "(Shard(0), Replicate())",
        },
        Tower(),
    )
    assert sorted(found.parameters) == [f"blocks.{i}.weight" for i in range(4)]
    assert list(found.outputs) == ["head"]
    assert list(found.grads) == ["norm.weight"]
    assert dict(found.attributes) == {
        ("blocks.1", "in_features"): None,
        ("blocks.2", "in_features"): "weight",
    }
    assert dict(found.whole) == {("norm", ""): Shard(2), ("norm", "gate"): Shard(1)}
    # The list of blocks has no weight of its own.
    assert {fqn for fqn, _ in found.read_parts} == {"embed", "norm", "head"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.wieght": "Shard(0)"}, r"'blocks.\*.wieght' matches nothing in the model"),
        ({"blocks.weight": "Shard(0)"}, "matches nothing"),
        ({"head.weight": "Shard"}, r"expected 'Shard\(d\)'.*got 'Shard'"),
        ({"<read:head.weight>": "Replicate()"}, "expected a placement for each part"),
        ({"<read:head.weight>": "(Shard(0), Shard(0))"}, "for those read whole"),
        ({"head.<both>": "Replicate()"}, "expected <in>, <out>, <enter>, <leave>, <reenter>"),
    ],
)
def test_a_sharding_plan_that_means_nothing_is_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(plan, Tower())


def test_numbers_in_names_are_generalized() -> None:
    assert generalize("model.layers.12.mlp.0.weight") == "model.layers.*.mlp.*.weight"


class _Called(nn.Module):
    def __init__(self, **lists: nn.Module) -> None:
        super().__init__()
        for name, each in lists.items():
            self.add_module(name, each)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_module_around_layers_of_several_kinds_is_one_block_unless_it_has_blocks() -> None:
    layers = nn.ModuleList(each for _ in range(2) for each in (nn.Linear(2, 2), nn.LayerNorm(2)))
    nested = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]) for _ in range(2))
    for lists in (layers, nested):
        assert sequence_stacks(_Called(body=_Called(layers=lists))) == [("body",)]
        assert sequence_stacks(_Called(layers=lists)) == []
    stages = nn.ModuleList(
        each
        for _ in range(2)
        for each in (
            nn.Linear(2, 2),
            _Called(blocks=nn.ModuleList(nn.Linear(2, 2) for _ in range(2))),
        )
    )
    model = _Called(body=_Called(stages=stages))
    assert sequence_stacks(model) == block_stacks(model) != []
