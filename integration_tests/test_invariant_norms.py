"""Norms inside of attention, under numerics whose bits do not depend on the number of ranks."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import TensorParallel

from .invariant_bits import VOCABULARY, batches, compare_sizes, said_of

WIDTH, HEADS = 128, 4


class _Attention(nn.Module):
    """Attention that norms queries as ``place`` says."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if place != "written":
            self.q_norm = nn.LayerNorm(WIDTH if place == "whole" else WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        q, k, v = self.q(x_BSF), self.k(x_BSF), self.v(x_BSF)
        if self.place == "whole":
            q = self.q_norm(q)
        q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)) for each in (q, k, v))
        if self.place == "heads":
            q = self.q_norm(q)
        if self.place == "flat":
            q = self.q_norm(q.flatten(0, 2)).view(q.shape)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if self.place == "transposed":
            q = self.q_norm(q)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        if self.place == "written":
            y += x_BSF
            return y
        return x_BSF + y


class Model(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Attention(place) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSF = self.embed(input_ids)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return F.cross_entropy(self.head(x_BSF).float().flatten(0, 1), labels.flatten())


def _made(place: str, dtype: str = "float32") -> nn.Module:
    torch.manual_seed(0)
    model = Model(place)
    if place in ("heads", "transposed", "whole"):
        nn.init.normal_(model.get_parameter("blocks.0.q_norm.weight"))
    return model.to(getattr(torch, dtype))


@cache
def _said(place: str, *, sequence: bool) -> dict[str, str]:
    return said_of(_made(place), HEADS, sequence=sequence)


@pytest.mark.by_day("heads-mark0")
@pytest.mark.parametrize(
    ("place", "mark"),
    [
        ("heads", {"blocks.*.q_norm.<chunks>": "Shard(2)"}),
        ("transposed", {"blocks.*.q_norm.<chunks>": "Shard(1)"}),
        ("whole", {"blocks.*.q_norm.<whole>": "Shard(2)"}),
    ],
)
def test_norms_of_queries_have_the_bits_of_one_rank(place: str, mark: dict[str, str]) -> None:
    said = _said(place, sequence=True)
    assert mark.items() <= said.items()
    build = partial(_made, place)
    compare_sizes(build, said, HEADS, sequence=True, sizes=(2,), num_steps=2)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("place", ["heads", "transposed", "whole", "written"])
def test_they_have_them_on_four_ranks(place: str, dtype: str, *, sequence: bool) -> None:
    said = _said(place, sequence=sequence)
    build = partial(_made, place, dtype)
    compare_sizes(build, said, HEADS, sequence=sequence, sizes=(2, 4))


def test_programs_may_write_into_what_layers_return() -> None:
    compare_sizes(
        partial(_made, "written"), _said("written", sequence=False), HEADS,
        sequence=False, sizes=(2,), num_steps=2,
    )  # fmt: skip


def test_heads_that_share_a_dim_with_tokens_are_refused_by_name() -> None:
    # Parts of that dim are no heads: on two ranks they would be other tokens.
    with pytest.raises(ValueError, match=r"q_norm\.\w+'.*heads.* in which dim they are was not"):
        _said("flat", sequence=False)


def _with(said: dict[str, str], **fields: Any) -> None:
    torch.set_num_threads(1)
    section = TensorParallel(size=2, sharding_plan=said)
    plan = vescale.ParallelPlan(tensor_parallel=section, **fields)
    vescale.parallelize(plan, _made("heads"))(**batches(1)[0])


def test_a_dim_that_does_not_divide_into_chunks_is_refused() -> None:
    said = {**_said("heads", sequence=False), "blocks.*.q_norm.<chunks>": "Shard(4)"}
    with pytest.raises(ValueError, match=r"'blocks\.0\.q_norm' to be called with a multiple of 2"):
        vescale.emulate(lambda: _with(said, numerics="invariant", numerics_chunks=HEADS), 2)


def test_chunks_of_modules_belong_to_invariant_numerics() -> None:
    said = _said("heads", sequence=False)
    with pytest.raises(
        ValueError, match=r"blocks\.0\.q_norm\.<chunks> is of a plan with numerics"
    ):
        vescale.emulate(lambda: _with(said), 2)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "olmo2": {},
    "hunyuan_v1_dense": {"head_dim": 64},
    "apertus": {},
    "falcon": {"multi_query": False, "alibi": False, "hidden_dropout": 0.0},
}


def _family(name: str, dtype: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, **FAMILIES[name],
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
    return model.to(getattr(torch, dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_bits_of_one_rank(name: str, dtype: str, *, sequence: bool) -> None:
    said = said_of(_family(name, "float32"), 4, sequence=sequence)
    build = partial(_family, name, dtype)
    compare_sizes(build, said, 4, sequence=sequence, sizes=(2, 4))
