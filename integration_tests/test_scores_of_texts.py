"""Models that score texts by what they make of the last token, with a mean squared error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import vescale
from vescale_parallel import parallelize

from .plans import DP, PARTS, PP, ZERO, Constraints, make_plan
from .training import whole

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "accumulated": {"batch.gradient_accumulation": 2},
    "pp": {PP: 2, PARTS: 2},
}
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "num_labels": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    drops: dict[str, Any] = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return GPT2ForSequenceClassification(GPT2Config(**SIZES, **sizes, **drops))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, **sizes, **heads))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def texts(step: int) -> dict[str, Tensor]:
    """Return eight texts, padded to the longest one, and their scores."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 40, (8, 10), generator=generator)
    lengths = torch.randint(4, 11, (8, 1), generator=generator)
    mask = torch.arange(10) < lengths
    scores = torch.rand(8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": scores}


def trained(name: str, plan: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two steps, and the parameters then."""
    torch.manual_seed(0)
    model: Any = MODELS[name]().double()
    part, num_parts = 0, 1
    if plan:
        model = parallelize(make_plan(PLANS[plan]), model)
        part, num_parts = vescale.data_parallel_rank(model), PLANS[plan].get(DP, 1)
    optimizer, losses = SGD(model.parameters(), lr=0.1), list[float]()
    for step in range(2):
        batch = {name: x.chunk(num_parts)[part] for name, x in texts(step).items()}
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(whole(loss).detach()))
    return losses, {fqn: whole(p).detach().clone() for fqn, p in model.named_parameters()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_means_over_texts(name: str, plan: str) -> None:
    """Of the last token of each, which a tensor of as many indices picks."""
    losses, parameters = trained(name, "")
    ranks = vescale.emulate(trained, 2 if plan != "accumulated" else 1, args=(name, plan))
    for found, _ in ranks:
        torch.testing.assert_close(found, losses, rtol=1e-13, atol=0)
    held = {fqn: value for _, of_rank in ranks for fqn, value in of_rank.items()}
    torch.testing.assert_close(held, parameters, rtol=1e-12, atol=1e-14)
