"""Forward alone under every kind of plan: what a model returns is one device's, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import data_parallel_rank
from vescale_testing import World

from .families import InDouble
from .plans import (
    DP,
    PARTS,
    PP,
    SCHEDULE,
    SEQUENCE,
    TP,
    VIRTUAL,
    ZERO,
    Constraints,
    make_plan,
)  # fmt: skip
from .test_bad_input import check

WIDTH, CLASSES, VOCABULARY = 16, 5, 64
PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 4},
    "pp-interleaved": {PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2},
}
FOUR: dict[str, Constraints] = {
    "pp-tp": {PP: 2, PARTS: 2, TP: 2},
    "pp-zero3": {PP: 2, PARTS: 2, DP: 2, ZERO: 3},
    "tp-sequence-zero3": {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3},
}
Program = Callable[[nn.Module, "Rows"], list[Any]]
Rows = Callable[[Tensor], Tensor]


class Classifier(nn.Module):
    """A tensor of scores, or several things; the loss only if there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    @torch.no_grad()
    def generate(self, x: Tensor, num_new: int) -> Tensor:
        """As hand-written models do, with no option of transformers'."""
        for _ in range(num_new):
            x = torch.cat([x, self(x[-2:]).argmax(-1)[:, None].expand(-1, WIDTH) / 4])
        return x

    def forward(self, x: Tensor, targets: Tensor | None = None, how: str = "scores") -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        loss = None if targets is None else F.cross_entropy(scores, targets)
        if how == "scores":
            return scores if loss is None else loss
        if how == "last rows":
            return scores.transpose(0, 1)
        if how == "batch":
            return (scores - scores.mean(0)).relu()
        return {
            "loss": loss, "scores": scores, "best": scores.argmax(-1), "sizes": [x.bfloat16(), 3],
            "kept": scores > 0, "constant": self.head.weight.new_ones(7),
        }  # fmt: skip


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "classifier":
        return Classifier().double()
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        BertConfig,
        BertForSequenceClassification,
        ViTConfig,
    )

    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": VOCABULARY,
    }  # fmt: skip
    off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "bert":
        return BertForSequenceClassification(BertConfig(**sizes, **off)).double()
    if kind == "vit":
        config = ViTConfig(**sizes, **off, image_size=8, patch_size=4, num_channels=1)
        return AutoModelForImageClassification.from_config(config).double()
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 64}
    tied = {"tie_word_embeddings": True} if kind == "llama" else {}
    config = AutoConfig.for_model(kind, **sizes, **tied, eos_token_id=3, bos_token_id=1)
    return AutoModelForCausalLM.from_config(config).double()


def inputs_of(kind: str, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    if kind == "classifier":
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "targets": torch.arange(rows) % CLASSES}
    if kind == "vit":
        pixels = torch.randn(rows, 1, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels}
    ids_BS = torch.randint(4, 60, (rows, 7), generator=generator)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, :3] = 0
    return {"input_ids": ids_BS, "attention_mask": mask_BS}


def plain(value: Any) -> Any:
    """Return outputs as plain data, in an order of their own."""
    if isinstance(value, Mapping):
        # Caches differ by design: a pipeline makes none.
        return {name: plain(each) for name, each in value.items() if name != "past_key_values"}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


def own_rows(model: nn.Module, size: int) -> Rows:
    rank = data_parallel_rank(model)

    def rows(x: Tensor) -> Tensor:
        return x.tensor_split(size)[rank]

    return rows


def on_rank(program: Program, kind: str, constraints: Constraints) -> tuple[int, list[Any]]:
    plan = make_plan(constraints)
    with InDouble():
        model = vescale.parallelize(plan, build(kind))
        size = plan.data_parallel.size
        found = program(model.eval(), own_rows(model, size))
        return data_parallel_rank(model), plain(found)


def one_device(program: Program, kind: str, rows: Rows) -> list[Any]:
    with InDouble():
        return plain(program(build(kind).eval(), rows))


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor) and expected.is_floating_point():
        # Sums in another order, of float64; bfloat16 where that is what the model returns.
        tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


def right(world: World, program: Program, kind: str, constraints: Constraints) -> None:
    size = constraints.get(DP, 1)
    for rank, found in world.run(on_rank, program, kind, constraints):
        same(found, one_device(program, kind, lambda x, at=rank: x.tensor_split(size)[at]))


def called(model: nn.Module, rows: Rows, num_rows: int, **how: Any) -> Any:
    kind = {"pixel_values": "vit", "x": "classifier"}.get(
        getattr(model, "main_input_name", "x"), "text"
    )
    given = {name: rows(x) for name, x in inputs_of(kind, num_rows).items() if name != "targets"}
    return model(**given, **how)


# Programs


def outputs_without_labels(model: nn.Module, rows: Rows) -> list[Any]:
    with torch.no_grad():
        full = called(model, rows, 8)
    with torch.inference_mode():
        odd = called(model, rows, 5)
        few = called(model, rows, 2)
    return [full, odd, few]


def structures(model: nn.Module, rows: Rows) -> list[Any]:
    found: list[Any] = []
    with torch.no_grad():
        for num_rows in (8, 6, 7):
            given = {name: rows(x) for name, x in inputs_of("classifier", num_rows).items()}
            found += [model(**given, how="all"), model(given["x"], how="last rows")]
    return found


def rows_that_meet(model: nn.Module, rows: Rows) -> list[Any]:
    with torch.no_grad():
        return [called(model, rows, 8, how="batch")]


def in_training_mode(model: nn.Module, rows: Rows) -> list[Any]:
    """A loop that evaluates between steps, and forgets ``no_grad`` once."""
    given = {name: rows(x) for name, x in inputs_of("classifier", 8).items()}
    losses: list[Any] = []
    for _ in range(2):
        model.train()
        loss = model(**given)
        loss.backward()
        losses.append(loss.detach())
        model.eval()
        losses.append(model(given["x"]).detach())
    return losses


def generation(model: nn.Module, rows: Rows) -> list[Any]:
    given = {name: rows(x) for name, x in inputs_of("text", 4).items()}
    ways: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"min_new_tokens": 4}]
    options = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    return [model.generate(**given, **(options | way)) for way in ways]  # pyright: ignore[reportCallIssue]: transformers'


def own_generation(model: nn.Module, rows: Rows) -> list[Any]:
    return [model.generate(rows(inputs_of("classifier", 4)["x"]), 3)]  # pyright: ignore[reportCallIssue]: its own


OUTPUTS = [
    *((kind, plan) for kind in ("classifier", "llama") for plan in PLANS),
    ("gpt2", "pp"), ("bert", "pp"), ("bert", "tp"), ("vit", "pp"), ("vit", "zero3"),
]  # fmt: skip
TOKENS = [*(("llama", plan) for plan in PLANS), ("gpt2", "dp"), ("gpt2", "pp")]


@pytest.mark.by_day(
    "classifier-dp", "classifier-zero3", "classifier-tp", "classifier-pp-interleaved"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    OUTPUTS,
)
def test_outputs_without_labels_are_one_devices(world2: World, kind: str, plan: str) -> None:
    right(world2, outputs_without_labels, kind, PLANS[plan])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("plan", FOUR)
def test_outputs_of_several_axes_are_one_devices(world4: World, plan: str) -> None:
    right(world4, outputs_without_labels, "llama", FOUR[plan])


@pytest.mark.by_day("tp", "pp-interleaved")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp", "pp", "pp-interleaved"])
def test_all_that_a_model_returns_comes_back(world2: World, plan: str) -> None:
    right(world2, structures, "classifier", PLANS[plan])


@pytest.mark.slow
def test_a_pipeline_predicts_the_whole_batch_where_its_rows_meet(world2: World) -> None:
    right(world2, rows_that_meet, "classifier", PLANS["pp"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pp", "pp-interleaved"])
def test_a_pipeline_predicts_between_steps(world2: World, plan: str) -> None:
    right(world2, in_training_mode, "classifier", PLANS[plan])


@pytest.mark.by_day("llama-tp")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "plan"), TOKENS)
def test_generated_tokens_are_one_devices(world2: World, kind: str, plan: str) -> None:
    right(world2, generation, kind, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_models_own_generate_gets_no_options_of_transformers(world2: World, plan: str) -> None:
    right(world2, own_generation, "classifier", PLANS[plan])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", FOUR)
def test_tokens_generated_over_several_axes_are_one_devices(world4: World, plan: str) -> None:
    right(world4, generation, "llama", FOUR[plan])


# What a pipeline cannot do


def asked_for_a_cache(model: nn.Module, rows: Rows) -> list[Any]:
    with torch.no_grad():
        return [called(model, rows, 4, use_cache=True)]


def asked_for_all_states(model: nn.Module, rows: Rows) -> list[Any]:
    with torch.no_grad():
        return [called(model, rows, 4, output_hidden_states=True)]


REFUSED: dict[str, tuple[Program, str, str]] = {
    "cache": (asked_for_a_cache, "llama", "keeps no cache of keys and values.*use_cache=False"),
    "states": (asked_for_all_states, "llama", "output_hidden_states=False.*its own layers only"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_stages_cannot_give_is_refused(world2: World, case: str) -> None:
    program, kind, message = REFUSED[case]
    check(world2, Exception, message, on_rank, program, kind, PLANS["pp"])
