"""Plans of one, two, four and eight tensor-parallel ranks whose bits are the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import TensorParallel, propose_in_chunks
from vescale_testing import World

from .invariant_bits import (
    LENGTH,
    VOCABULARY,
    batches,
    compare_sizes,
    differences,
    said_of,
    trained,
    whole,
)
from .models import HandWritten
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan

WIDTH = 256


class _Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, _ = x_BSF.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x_BSF).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(rows, length, -1))


class _Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = _Attention(heads)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attention(self.first(x_BSF))
        return x_BSF + self.mlp(self.second(x_BSF))


class NanoGPT(nn.Module):
    """As nanoGPT writes it, with tied embeddings."""

    def __init__(self, heads: int = 4, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([_Block(heads) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.mul_(0.05)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSF = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x_BSF = block(x_BSF)
        logits_BSV = self.head(self.norm(x_BSF))
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), labels.flatten())


def _made(name: str, dtype: str, heads: int) -> nn.Module:
    torch.manual_seed(0)
    if name == "nano_gpt":
        return NanoGPT(heads).to(getattr(torch, dtype))
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "llama": {
            "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
            "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": VOCABULARY,
        },
        "gpt2": {
            "n_embd": WIDTH, "n_layer": 2, "n_head": heads, "vocab_size": VOCABULARY,
            "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            "bos_token_id": 0, "eos_token_id": 0,
        },
    }[name]  # fmt: skip
    sizes["tie_word_embeddings"] = name == "gpt2"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
    return model.to(getattr(torch, dtype))


@cache
def _said(name: str, chunks: int, *, sequence: bool) -> dict[str, str]:
    return said_of(_made(name, "float32", chunks), chunks, sequence=sequence)


def _compare(
    name: str, dtype: str, chunks: int, *, sequence: bool, sizes: tuple[int, ...]
) -> None:
    said = _said(name, chunks, sequence=sequence)
    build = partial(_made, name, dtype, chunks)
    compare_sizes(build, said, chunks, sequence=sequence, sizes=sizes)


def test_four_ranks_with_a_cut_sequence_have_the_bits_of_one() -> None:
    _compare("nano_gpt", "float32", 4, sequence=True, sizes=(2, 4))


def test_the_vocabulary_of_these_models_is_cut() -> None:
    for name, table, head in (
        ("nano_gpt", "embed", "head"),
        ("gpt2", "transformer.wte", "lm_head"),
    ):
        said = _said(name, 4, sequence=True)
        assert said[f"{table}.weight"] == said[f"{head}.weight"] == "Shard(0)"


def test_a_vocabulary_that_does_not_divide_into_chunks_stays_whole() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return NanoGPT(vocabulary=VOCABULARY + 3)

    said = said_of(build(), 4, sequence=False)
    assert not any(pattern.startswith(("embed", "head")) for pattern in said)
    compare_sizes(build, said, 4, sequence=False, sizes=(2,), num_steps=2)


def _run(said: dict[str, str], size: int) -> dict[str, Tensor]:
    build = partial(_made, "nano_gpt", "bfloat16", 4)
    return trained(build, said, 4, size=size, sequence=True, num_steps=3)


def test_two_processes_have_the_bits_of_one(world2: World) -> None:
    said = _said("nano_gpt", 4, sequence=True)
    (one,) = vescale.emulate(lambda: _run(said, 1), 1)
    for found in world2.run(_run, said, 2):
        assert differences(one, found) == []


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "nano_gpt"])
def test_every_number_of_ranks_has_the_same_bits(name: str, dtype: str, *, sequence: bool) -> None:
    # Fused layers of eight heads have chunks of 32 features, no whole vectors of bfloat16.
    chunks = 8 if name == "llama" or dtype == "float32" else 4
    sizes = (2, 4, 8) if chunks == 8 else (2, 4)
    _compare(name, dtype, chunks, sequence=sequence, sizes=sizes)


def _verified(name: str, constraints: Constraints, *, sequence: bool = True) -> None:
    """Compare every step with one rank that adds up in chunks, micro-batch after micro-batch."""
    ids = torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[3, :5] = -100  # shards have other counts of targets
    invariant = {"numerics": "invariant", "numerics_chunks": 4, SEQUENCE: sequence}
    plan = make_plan({**invariant, **constraints})
    said = _said(name, 4, sequence=sequence)
    plan = replace(plan, tensor_parallel=replace(plan.tensor_parallel, sharding_plan=said))
    report = vescale.verify(
        plan,
        lambda: _made(name, "float32", 4),
        {"input_ids": ids, "labels": labels},
        dtype=None,
    )
    assert report.passed, report
    assert report.levels[-1].level == "N5"
    assert report.levels[-1].status == "passed", report


WITH_OTHER_AXES: dict[str, Constraints] = {
    "dp": {DP: 2, TP: 2},
    "zero1": {DP: 2, ZERO: 1, TP: 2},
    "zero3-recompute": {DP: 2, ZERO: 3, TP: 2, "recompute": "full"},
    "pp": {PP: 2, PARTS: 2, TP: 2},
    "pp-zero1": {PP: 2, PARTS: 2, DP: 2, ZERO: 1, TP: 2},
    "pp-dp-tp4": {PP: 2, PARTS: 2, DP: 2, TP: 4},
    "accumulation": {"batch.gradient_accumulation": 2, DP: 2, TP: 2},
}


@pytest.mark.by_day("zero1")
@pytest.mark.parametrize(
    "plan",
    WITH_OTHER_AXES,
)
def test_axes_beside_it_keep_the_bits(plan: str) -> None:
    _verified("nano_gpt", WITH_OTHER_AXES[plan])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", ["zero3-recompute", "pp-zero1"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_axes_beside_it_keep_the_bits_of_families(name: str, plan: str) -> None:
    _verified(name, WITH_OTHER_AXES[plan])
    _verified(name, WITH_OTHER_AXES[plan], sequence=False)


@pytest.mark.nightly
def test_chunks_are_what_makes_the_bits_equal() -> None:
    # Without them two ranks round otherwise, or the tests above would show nothing.
    found: list[dict[str, Tensor]] = []
    for size in (1, 2):
        plan = vescale.ParallelPlan(tensor_parallel=TensorParallel(size=size))

        def run(plan: vescale.ParallelPlan = plan) -> dict[str, Tensor]:
            torch.set_num_threads(1)
            model = vescale.parallelize(plan, _made("llama", "float32", 4))
            model(**batches(1)[0]).loss.backward()
            return {fqn: whole(p.grad) for fqn, p in model.named_parameters()}

        found.append(vescale.emulate(run, size)[0])
    assert len(differences(*found)) > len(found[0]) // 2


def _parallelized(model: nn.Module, **fields: Any) -> nn.Module:
    sequence = fields.pop("sequence", False)
    section = TensorParallel(sequence=sequence)
    plan = vescale.ParallelPlan(tensor_parallel=section, numerics="invariant", **fields)
    (made,) = vescale.emulate(lambda: vescale.parallelize(plan, model), 1)
    return made


def test_heads_that_do_not_divide_into_chunks_are_refused_by_name() -> None:
    model = _made("llama", "float32", 4)
    with pytest.raises(ValueError, match=r"numerics 'invariant'.*self_attn.*numerics_chunks"):
        _parallelized(model, numerics_chunks=8)


def test_parameters_of_blocks_that_meet_tokens_are_refused_by_name() -> None:
    model = HandWritten(vocabulary=64, width=128, heads=4, depth=2)
    batch = {name: value[:, :LENGTH] for name, value in batches(1)[0].items()}
    with pytest.raises(
        ValueError, match=r"blocks\.0\.gain' is applied to every rank's own tokens"
    ):
        propose_in_chunks(model, "auto", 4, sequence=True, example_batch=({**batch},))


def _called(model: nn.Module, length: int) -> None:
    torch.set_num_threads(1)
    plan = vescale.ParallelPlan(
        tensor_parallel=TensorParallel(sequence=True), numerics="invariant", numerics_chunks=4
    )
    model = vescale.parallelize(plan, model)
    ids = torch.zeros(2, length, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()


def test_sequences_that_do_not_divide_into_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"numerics_chunks \(4\) divides, got 6; .* 4 and 8"):
        vescale.emulate(lambda: _called(_made("llama", "float32", 4), 6), 1)


def test_vectors_that_end_elsewhere_on_more_ranks_are_refused() -> None:
    model = NanoGPT(heads=8)  # 32 features a chunk of query, key and value
    section = TensorParallel(sequence=True, sharding_plan=_said("nano_gpt", 4, sequence=True))
    plan = vescale.ParallelPlan(tensor_parallel=section, numerics="invariant", numerics_chunks=8)

    def run() -> None:
        torch.set_num_threads(1)
        vescale.parallelize(plan, model.bfloat16())(**batches(1)[0])

    with pytest.raises(
        ValueError, match=r"must be a multiple of 64 for torch.bfloat16.*qkv' has 32"
    ):
        vescale.emulate(run, 1)


@pytest.mark.by_day("fields0-power of two from 2, got 6")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"numerics_chunks": 6}, "power of two from 2, got 6"),
        ({"numerics_chunks": 16, "numerics": "default"}, "left out with 'default', got 16"),
        ({"tensor_parallel": TensorParallel(size=3)}, "divide numerics_chunks .8.*got 3"),
        ({"tensor_parallel": TensorParallel(size=2, overlap=2)}, "tensor_parallel.overlap 2"),
        ({"tensor_parallel": TensorParallel(sharding_policy="manual")}, "got 'manual'"),
        ({"compile": "blocks"}, "expected compile 'none', got 'blocks'"),
    ],
)
def test_plans_without_such_sums_are_refused(fields: dict[str, Any], message: str) -> None:
    given: Any = {"numerics": "invariant", **fields}
    with pytest.raises(ValueError, match=message):
        vescale.ParallelPlan(**given)


@pytest.mark.nightly
def test_the_planner_gives_all_sizes_one_sharding_plan() -> None:
    model = NanoGPT()
    plans = [
        vescale.generate_plan(
            model,
            {
                "numerics": "invariant", "numerics_chunks": 4, "tensor_parallel.size": size,
                "tensor_parallel.sequence": True,
            },
            world_size=size,
            example_batch=batches(1)[0],
        )
        for size in (1, 2)
    ]  # fmt: skip
    first, second = (plan.tensor_parallel.sharding_plan for plan in plans)
    assert first == second == _said("nano_gpt", 4, sequence=True)
    assert "cut into 4 chunks" in str(plans[0])
