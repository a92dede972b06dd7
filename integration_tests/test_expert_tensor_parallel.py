"""Experts that data-parallel ranks share, in models that tensor-parallel ranks cut."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import vescale
from vescale_dtensor import CommCounter
from vescale_parallel import propose_sharding
from vescale_testing import World

from .experts import FAMILIES, AllInDouble, adamw, build, rows_of, tokens
from .listed_experts import Model
from .plans import DP, EP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .test_bad_input import check as check_refusal
from .test_expert_parallel import check
from .test_expert_parallel_habits import load_and_go_on, save_and_go_on
from .training import whole

BOTH: Constraints = {DP: 2, EP: 2, TP: 2}


@pytest.mark.by_day("qwen3_moe-True")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sequence"),
    [
        ("mixtral", False),
        ("gpt_oss", False),
        ("qwen3_moe", True),
        ("deepseek_v3", False),
        ("mixtral", True),
        ("qwen3_moe", False),
        ("gpt_oss", True),
        ("deepseek_v3", True),
    ],
)
def test_experts_are_shared_where_attention_is_cut(
    world4: World, family: str, sequence: bool
) -> None:
    check(world4, {**BOTH, SEQUENCE: sequence}, family, "batched_mm")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_experts_are_shared_and_cut_under_every_stage(world4: World, zero: int) -> None:
    check(world4, {**BOTH, ZERO: zero}, "mixtral", "batched_mm", skewed=True)


WIDE: dict[str, Any] = {"intermediate_size": 64, "hidden_size": 32}  # aligned rows of ranks


def in_float32(constraints: Constraints | None, family: str) -> tuple[Any, set[str]]:
    """Return losses and the norms of gradients of two steps, and how experts are placed."""
    model: Any = build(family, "grouped_mm", **WIDE).float()
    optimizer = adamw(model)
    if constraints is not None:
        model, optimizer = vescale.parallelize(make_plan(constraints), model, adamw)
    made = list[float]()
    for number in range(2):
        loss = model(**rows_of(model, tokens(number))).loss
        loss.backward()
        made.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
        made.append(loss.item())
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    return made, {str(tuple(getattr(p, "placements", ()))) for p in experts}


@pytest.mark.nightly
@pytest.mark.slow
def test_experts_that_ranks_share_are_cut_as_well(world4: World) -> None:
    expected, _ = in_float32(None, "mixtral")
    for made, placements in world4.run(in_float32, BOTH, "mixtral"):
        assert not any("Replicate" in each for each in placements)
        # Norms and losses: rounding of float32 over two steps of AdamW.
        assert made == pytest.approx(expected, rel=1e-4)


def sent(constraints: Constraints) -> tuple[int, int]:
    """Return the bytes that a rank sends in all-to-alls of a forward, and in all of it."""
    model: Any = vescale.parallelize(make_plan(constraints), build("mixtral", "batched_mm"))
    batch = rows_of(model, tokens(0))
    with AllInDouble():
        model(**batch)  # a first call compares inputs, and looks for coupled rows
        with CommCounter() as counter:
            model(**batch)
    return counter.by_kind["all_to_all"].nbytes, counter.nbytes


@pytest.mark.nightly
@pytest.mark.slow
def test_every_tensor_parallel_rank_sends_all_tokens(world2: World, world4: World) -> None:
    alone = world2.run(sent, {DP: 2, EP: 2})
    both = world4.run(sent, BOTH)
    assert sum(each for each, _ in both) == 2 * sum(each for each, _ in alone)


@pytest.mark.nightly
@pytest.mark.slow
def test_checkpoints_of_both_fit_either(world2: World, world4: World, tmp_path: Any) -> None:
    path = str(tmp_path / "checkpoint")
    expected = world4.run(save_and_go_on, path, {**BOTH, ZERO: 2})[0]
    for plan in ({DP: 2, EP: 2, ZERO: 1}, {TP: 2}):
        made = world2.run(load_and_go_on, path, plan)
        # Rows of a tensor-parallel plan alone are all of the batch.
        assert sum(made) / 2 == pytest.approx(expected, rel=1e-12, abs=0)


def list_under_both() -> None:
    vescale.parallelize(make_plan(BOTH), Model("Slots"), adamw)


@pytest.mark.slow
def test_lists_of_experts_are_refused_under_tensor_parallelism(world4: World) -> None:
    message = r"expected tensor_parallel.size 1 with expert_parallel.size 2 .*'blocks.0.moe'"
    check_refusal(world4, ValueError, message, list_under_both)


@pytest.mark.by_day("mixtral")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_every_family_are_cut_beside_a_cut_sequence(family: str) -> None:
    model = build(family, "batched_mm")
    plan = propose_sharding(model, "auto", 2, sequence=True, example_batch=tokens(0)).plan
    stacks = {
        re.sub(r"\.\d+\.", ".*.", name)
        for name, each in model.named_parameters()
        if ".experts." in name and each.dim() > 2
    }
    assert stacks
    assert stacks <= plan.keys()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_routed_and_shared_experts_leave_together(world2: World, family: str) -> None:
    check(world2, {DP: 1, TP: 2, SEQUENCE: True}, family, "batched_mm")


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_ask_for_values_are_cut(world2: World, family: str) -> None:
    model: Any = build(family, "eager")
    plan = propose_sharding(model, "auto", 2, example_batch=tokens(0)).plan
    assert model.config._experts_implementation == "eager"
    assert "model.layers.*.mlp.experts.down_proj" in plan
    check(world2, {DP: 1, TP: 2}, family, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_ask_for_values_are_refused_by_name_with_a_cut_sequence(family: str) -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts'.*='batched_mm'"):
        propose_sharding(
            build(family, "eager"), policy="auto", size=2, sequence=True, example_batch=tokens(0)
        )
