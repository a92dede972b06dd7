"""explain() says how each module runs, and accounts for every byte."""

from __future__ import annotations

import pytest
import torch

import vescale
from vescale_parallel import ParallelExplanation, explain
from vescale_testing import World

from .families import make
from .plans import SEQUENCE, TP, Constraints


def explained(family: str, constraints: Constraints) -> ParallelExplanation:
    model, call = make(family)
    plan = vescale.generate_plan(
        model, constraints, world_size=torch.distributed.get_world_size(), example_batch=call
    )
    model = vescale.parallelize(plan, model)
    with explain(model) as explanation:
        model(**call).loss.backward()
    return explanation


# Modules whose parameters are vectors, or tables that are looked up by position.
WHOLE = ("norm", "Norm", "ln_", "position_embeddings", "token_type_embeddings", "wpe", "LayerNorm")


@pytest.mark.by_day("bert")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "bert"])
def test_all_layers_run_erased_or_localised(world2: World, family: str) -> None:
    found = world2.run(explained, family, {TP: 2})[0]
    whole = [m.pattern for m in found.modules if m.outcome == "whole"]
    assert [p for p in whole if not any(name in p for name in WHOLE)] == WHOLE_DENSE[family]
    behind = [m.pattern for m in found.modules if m.outcome == "DTensor behind"]
    assert len(behind) == 1
    integers = {m.pattern for m in found.modules if m.outcome == "localised"}
    assert integers == ({"transformer.h.*.attn"} if family == "gpt2" else set())


# The square layer of BERT's head is no part of a column-and-row pair.
WHOLE_DENSE: dict[str, list[str]] = {
    "llama": [],
    "qwen3": [],
    "gpt2": [],
    "bert": ["cls.predictions.transform.dense"],
}


@pytest.mark.slow
def test_lines_of_the_model_account_for_what_a_step_sends(world2: World) -> None:
    plain = world2.run(explained, "llama", {TP: 2})[0]
    by_line = {(t.module, t.forward, t.backward): t.calls for t in plain.traffic}
    assert by_line == {
        ("model.embed_tokens", "all_reduce", ""): 1,
        ("model.layers.*.self_attn.q_proj", "", "all_reduce"): 2,
        ("model.layers.*.self_attn.o_proj", "all_reduce", ""): 2,
        ("model.layers.*.mlp.gate_proj", "", "all_reduce"): 2,
        ("model.layers.*.mlp.down_proj", "all_reduce", ""): 2,
        ("lm_head", "", "all_reduce"): 1,
    }
    assert all(t.source.startswith("modeling_llama.py:") for t in plain.traffic)
    # What is left is the loss: a few numbers for each of 48 tokens, float64.
    left = plain.counted.nbytes - sum(t.nbytes for t in plain.traffic)
    assert 0 < left <= 48 * 8 * 8
    cut = world2.run(explained, "llama", {TP: 2, SEQUENCE: True})[0]
    kinds = {(t.forward, t.backward): t.calls for t in cut.traffic if "layers" in t.module}
    assert kinds[("all_gather", "reduce_scatter")] == 2
    assert "reduce_scatter" in str(cut)


def test_a_model_that_is_not_parallelized_is_refused() -> None:
    refused = pytest.raises(ValueError, match="expected a parallelized model, got Linear")
    with refused, explain(torch.nn.Linear(2, 2)):
        pass
