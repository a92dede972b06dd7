"""Where a model is cut, and which stage uses which parameter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from vescale_parallel import (
    ParallelPlan,
    check_pipeline,
    observed_calls,
    parallelize,
    with_constraints,
)
from vescale_parallel._pipeline.call_order import places_seen
from vescale_parallel._pipeline.cuts.partition import split_blocks, stage_starts
from vescale_parallel._pipeline.stage_assignment import StageMap, modules_outside_blocks, stage_map
from vescale_testing import World


class Model(nn.Module):
    """An embedding, five blocks in a decoder, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.decoder = nn.Module()
        self.decoder.positions = nn.Embedding(8, 4)
        self.decoder.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.decoder.norm = nn.LayerNorm(4)
        self.gate = nn.Parameter(self.embed.weight.new_ones(4))
        self.drop = nn.Dropout()
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


BLOCKS = [f"decoder.layers.{index}" for index in range(5)]


def plan_of(size: int = 2, **section: Any) -> ParallelPlan:
    constraints = {f"pipeline_parallel.{name}": value for name, value in section.items()}
    return with_constraints(ParallelPlan(), {"pipeline_parallel.size": size, **constraints})


def staged(**section: Any) -> StageMap:
    stages = stage_map(plan_of(**section), Model())
    assert stages is not None
    return stages


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_the_heaviest_part_is_as_light_as_of_any_cut(weights: list[int], parts: int) -> None:
    if parts > len(weights):
        with pytest.raises(ValueError, match="at most as many pipeline stages as blocks"):
            split_blocks(weights, parts)
        return

    def heaviest(starts: tuple[int, ...]) -> int:
        ends = (*starts[1:], len(weights))
        return max(sum(weights[a:b]) for a, b in zip(starts, ends, strict=True))

    cuts = itertools.combinations(range(1, len(weights)), parts - 1)
    starts = split_blocks(weights, parts)
    assert starts == sorted({0, *starts})
    assert len(starts) == parts
    assert heaviest(tuple(starts)) == min(heaviest((0, *cut)) for cut in cuts)


def test_parameters_outside_of_blocks_are_on_the_first_or_the_last_stage() -> None:
    assert modules_outside_blocks(Model()) == {
        "embed": "before",
        "decoder.positions": "before",
        "decoder.norm": "after",
        "head": "after",
    }
    assert staged().outside == {
        "embed": 0,
        "decoder.positions": 0,
        "decoder.norm": 1,
        "head": 1,
    }


def test_blocks_are_on_consecutive_stages() -> None:
    stages = staged(size=2, schedule="interleaved_1f1b", virtual_stages=2, microbatches=2)
    assert stages.num_stages == 4
    owners = [stages.stage_of_block(index) for index in range(5)]
    assert owners == sorted(owners)
    assert set(owners) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("fqns", "expected"),
    [
        (["decoder.layers.0.weight"], (0,)),
        (["decoder.layers.4.bias"], (1,)),
        (["embed.weight", "head.weight"], (0, 1)),
        (["head.weight", "embed.weight"], (0, 1)),
        (["decoder.layers.0.weight", "decoder.layers.1.weight"], (0,)),
        (["decoder.layers.4.weight", "embed.weight"], (0, 1)),
        (["gate"], (0, 1)),
    ],
)
def test_the_stages_of_a_weight_are_those_of_all_its_names_the_owner_first(
    fqns: list[str], expected: tuple[int, ...]
) -> None:
    assert staged(split_points=("decoder.layers.3",)).stages_of(fqns) == expected


def test_a_name_that_begins_like_a_block_is_not_in_it() -> None:
    stages = StageMap(["layers.1"], [0], {"layers.1_norm": 0})
    assert stages.stages_of(["layers.1_norm.weight"]) == (0,)
    both = StageMap(["layers.0", "layers.1"], [0, 1], {"layers.10": 0})
    assert both.stages_of(["layers.10.weight"]) == (0,)


def test_a_module_that_is_called_last_is_put_there_by_name() -> None:
    assert staged(tail_modules=("embed",)).outside["embed"] == 1
    with pytest.raises(ValueError, match=r"tail_modules: 'wrong' is no module with parameters"):
        staged(tail_modules=("wrong",))


def test_a_module_that_is_called_first_is_put_there_by_name() -> None:
    assert staged(head_modules=("head",)).outside["head"] == 0
    with pytest.raises(ValueError, match=r"head_modules: 'wrong' is no module with parameters"):
        staged(head_modules=("wrong",))


def test_without_a_pipeline_there_are_no_stages() -> None:
    assert stage_map(ParallelPlan(), nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("points", "told"),
    [
        (("decoder.layers.1", "decoder.layers.2"), "expected 1 pipeline_parallel.split_points"),
        (("decoder.norm",), "'decoder.norm' is no block of Model; blocks are 'decoder.layers.0'"),
        (("decoder.layers.0",), "in the order of the blocks, none the first block"),
    ],
)
def test_split_points_that_do_not_fit_are_refused(points: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        stage_starts(plan_of(split_points=points), Model(), BLOCKS)


def test_split_points_out_of_order_are_refused() -> None:
    points = ("decoder.layers.3", "decoder.layers.1")
    with pytest.raises(ValueError, match="in the order of the blocks"):
        stage_starts(plan_of(size=3, split_points=points), Model(), BLOCKS)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 5 pipeline stages, .* got 6 \(.*size 6 x virt"):
        stage_starts(plan_of(size=6), Model(), BLOCKS)


class Net(nn.Module):
    """Five blocks, and a head much larger than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.head = nn.Linear(8, 512)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x).square().mean()


def on_rank_parameters_of_this_stage(method: str) -> tuple[list[str], list[float]]:
    constraints = {
        "pipeline_parallel.split_method": method,
        "pipeline_parallel.microbatches": 2,
        "batch.global_size": 4,
    }
    plan = with_constraints(plan_of(), constraints)
    torch.manual_seed(0)
    model, loader = parallelize(plan, Net(), dataset=[torch.full((8,), i / 4) for i in range(4)])
    return (
        [name for name, each in model.named_parameters() if each.to_local().numel()],
        [float(model(batch).detach()) for batch in loader],
    )


def test_parallelize_cuts_where_the_method_says(world2: World) -> None:
    torch.manual_seed(0)
    x = torch.stack([torch.full((8,), i / 4) for i in range(4)])
    expected = float(Net()(x).detach())
    for method, last in (("uniform", 2), ("auto", 4)):
        (first, losses), (second, _) = world2.run(on_rank_parameters_of_this_stage, method)
        assert losses == [pytest.approx(expected, rel=1e-6)]  # a mean of two means in float32
        assert first[-1] == f"blocks.{last - 1}.bias"
        assert second[0] == f"blocks.{last}.weight"


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(()))
        self.gates = nn.ParameterList(torch.ones(2) for _ in range(4))
        self.embed, self.norm = nn.Linear(2, 2, bias=False), nn.LayerNorm(2, bias=False)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, scales = self.embed(x), self.scales.exp()
        for scale, gate, layer in zip(scales[1:3], self.gates[1:3], self.layers[:2], strict=True):
            x = layer(x) * scale * gate
        for layer in self.layers[2:]:
            x = layer(x)
        return self.norm(x) @ self.embed.weight + self.shift


def test_parameters_are_on_the_stages_whose_code_uses_them() -> None:
    model, batch, plan = Held(), torch.ones(2, 2), plan_of(size=4, microbatches=4)
    stages = stage_map(plan, model, places_seen(plan, model, batch))
    assert stages is not None
    found = {name: stages.stages_of([name]) for name, _ in model.named_parameters()}
    expected = {
        # On the first and the last stage as well: another call may use them there.
        "scales": (0, 1, 3),
        "shift": (0, 3),
        **{f"gates.{i}": (0, 3) for i in (0, 1, 3)},
        "gates.2": (0, 1, 3),
        "embed.weight": (0, 3),
        "norm.weight": (3,),
    }
    assert {name: found[name] for name in expected} == expected
    said = observed_calls(model, batch)[1]
    assert said["embed.weight"] == ("layers.3",)
    again = plan_of(size=4, microbatches=4, called_behind=said)
    stages = stage_map(again, model)
    assert stages is not None
    del found["norm.weight"]  # defined before, called behind: a plan says that in its tail_modules
    assert {name: stages.stages_of([name]) for name in found} == found


class Counting(nn.Module):
    """Writes to its buffers in forward, and to a tensor that it keeps."""

    calls: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(2))
        self.kept = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.average.lerp_(x.mean(0), 0.5)
        self.kept.add_(1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.batch_norm(
            x, self.norm.running_mean, self.norm.running_var, training=True
        ).mean()


def test_a_model_that_is_seen_to_run_keeps_its_buffers() -> None:
    model, batch = Counting(), torch.ones(3, 2)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    observed_calls(model, batch)
    check_pipeline(plan_of(microbatches=2), model, batch)
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    assert not model.kept.any()
