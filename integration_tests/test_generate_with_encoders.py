"""Models with an encoder generate as on one device, each data-parallel rank for its own rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning
from vescale_testing import World

from .families import VOCABULARY, InDouble, make
from .plans import DP, PP, TP, ZERO, Constraints, make_plan
from .test_bad_input import check


def generated(family: str, constraints: Constraints | None) -> Tensor:
    """Return what beams find behind padded prompts."""
    model: Any
    model, batch = make(family, "eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    ids = batch["input_ids"] % 50 + 3
    ids[1, 7:] = model.config.pad_token_id
    if constraints is not None:
        plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=batch)
        model = vescale.parallelize(plan, model)
    model.eval()
    if (constraints or {}).get(DP, 1) > 1:
        ids = ids.chunk(2)[vescale.data_parallel_rank(model)]
    options = {"num_beams": 2, "max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        # Calls with what calls before them kept cannot be compared: ranks have parts of it.
        warnings.filterwarnings("ignore", "the sharding plan was not compared")
        return model.generate(ids, **options)


@pytest.mark.by_day("plan0")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{DP: 2, ZERO: 3}, {TP: 2}])
def test_a_model_with_an_encoder_generates_under_every_plan(
    world2: World, plan: Constraints
) -> None:
    expected = generated("t5", None)
    ranks = world2.run(generated, "t5", plan)
    if DP in plan:
        assert torch.equal(torch.cat(ranks), expected)
    else:
        assert all(torch.equal(each, expected) for each in ranks)


@pytest.mark.slow
def test_a_pipeline_says_that_an_encoder_runs_once_in_generation(world2: World) -> None:
    message = "generation, which runs an encoder once"
    check(world2, ValueError, message, generated, "t5", {PP: 2})


def transcribed(constraints: Constraints | None) -> Tensor:
    """Return what is generated from sounds by an encoder that makes a mask of its own."""
    model: Any = _moonshine()
    generator = torch.Generator().manual_seed(2)
    sounds = torch.randn(4, 3000, dtype=torch.float64, generator=generator)
    mask = torch.ones(4, 3000, dtype=torch.long)
    mask[1::2, 1200:] = 0
    given = {"input_values": sounds, "attention_mask": mask}
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    model.eval()
    if (constraints or {}).get(DP, 1) > 1:
        part = vescale.data_parallel_rank(model)
        given = {name: tensor.chunk(2)[part] for name, tensor in given.items()}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with warnings.catch_warnings(), InDouble():
        warnings.simplefilter("ignore", GatherWarning)
        # Calls with what calls before them kept cannot be compared: ranks have parts of it.
        warnings.filterwarnings("ignore", "the sharding plan was not compared")
        return model.generate(**given, **options)


def _moonshine() -> nn.Module:
    from transformers import AutoConfig, AutoModelForSpeechSeq2Seq

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "moonshine", hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        encoder_num_key_value_heads=4, decoder_num_key_value_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64, pad_token_id=2,
    )  # fmt: skip
    model = AutoModelForSpeechSeq2Seq.from_config(config, attn_implementation="eager").double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{DP: 2, ZERO: 3}, {TP: 2}])
def test_what_an_encoder_returns_besides_is_given_to_the_decoder(
    world2: World, plan: Constraints
) -> None:
    expected = transcribed(None)
    ranks = world2.run(transcribed, plan)
    if DP in plan:
        assert torch.equal(torch.cat(ranks), expected)
    else:
        assert all(torch.equal(each, expected) for each in ranks)
