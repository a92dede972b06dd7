"""``vescale.verify``: passes for plans that are right, and finds bugs that are planted."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import vescale
from vescale.cli.main import main

from . import crossing_models, planted_in_steps
from .families import CONFIGS, hugging_face, make
from .plans import (
    COPIES,
    CP,
    DP,
    EP,
    PARTS,
    PP,
    SCHEDULE,
    SEQUENCE,
    TP,
    VIRTUAL,
    ZERO,
    Constraints,
    make_plan,
)
from .planted_bugs import BUGS, MODELS, found

HALF = {"precision.param": "bfloat16", "precision.reduce": "float32"}
RIGHT: dict[str, tuple[str, Constraints]] = {
    "tp": ("tied", {TP: 2}),
    "zero2": ("blocks", {DP: 4, ZERO: 2}),
    "rows that meet": ("batch norm", {DP: 2, ZERO: 3}),
    "pp": ("dropout", {PP: 2, PARTS: 4}),
    "ep": ("mixtral", {DP: 2, EP: 2, ZERO: 3}),
    "accumulation": ("blocks", {DP: 2, "batch.gradient_accumulation": 2}),
    "zero2 in bfloat16": ("tied", {DP: 2, ZERO: 2, **HALF}),
    "cp-ring": ("llama", {CP: 2, "context_parallel.method": "ring"}),
}
RIGHT_AT_NIGHT: dict[str, tuple[str, Constraints]] = {
    "pp in bfloat16": ("blocks", {PP: 2, PARTS: 4, **HALF}),
    "tp-zero3 in bfloat16": ("llama", {TP: 2, DP: 2, ZERO: 3, **HALF}),
    "ep in bfloat16": ("mixtral", {DP: 2, EP: 2, ZERO: 1, **HALF}),
    "tp-sequence-zero3": ("llama", {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3}),
    "dp": ("dropout", {DP: 4}),
    "pp-tp": ("blocks", {PP: 2, PARTS: 2, TP: 2}),
    "zbv-dp": ("tied", {PP: 2, PARTS: 4, SCHEDULE: "zbv", VIRTUAL: 2, DP: 2, ZERO: 1}),
    "cp": ("llama", {CP: 2, DP: 2}),
    "cp-ring-4": ("llama", {CP: 4, "context_parallel.method": "ring"}),
    "accumulation-zero2": ("blocks", {DP: 2, ZERO: 2, "batch.gradient_accumulation": 2}),
    "accumulation-zero3": ("blocks", {DP: 2, ZERO: 3, "batch.gradient_accumulation": 2}),
    "cp-tp": ("llama", {CP: 2, TP: 2}),
    "pp-dp-microbatch": (
        "blocks",
        {PP: 2, PARTS: 2, DP: 2, ZERO: 2, "pipeline_parallel.reduce_every": "microbatch"},
    ),
    "pp-tp-dp": ("blocks", {PP: 2, PARTS: 2, TP: 2, DP: 2}),
    "hybrid": ("blocks", {DP: 4, ZERO: 3, COPIES: 2}),
}


@pytest.mark.by_day("rows that meet", "zero2 in bfloat16")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*RIGHT, *RIGHT_AT_NIGHT])
def test_a_plan_that_is_right_passes(name: str) -> None:
    model, constraints = (RIGHT | RIGHT_AT_NIGHT)[name]
    build, batch = MODELS[model]
    report = vescale.verify(make_plan(constraints), build, batch(), steps=2, max_grad_norm=0.5)
    assert report.passed, report
    assert report.num_compared > 4
    # What is inside of experts sees tokens in another order, and other ranks' tokens.
    assert all("experts" in module for module in report.not_compared), report


@pytest.mark.nightly
def test_a_parameter_that_code_uses_again_is_summed_by_stages() -> None:
    model, batch = crossing_models.make("mixing", 4, torch.float64)
    said = {PP: 2, PARTS: 2, "batch.global_size": crossing_models.ROWS}
    plan = vescale.generate_plan(model, said, world_size=2, cluster="cpu", example_batch=batch)
    report = vescale.verify(
        plan, lambda: crossing_models.make("mixing", 4, torch.float64)[0], batch, steps=2
    )
    assert report.passed, report
    bits = next(level for level in report.levels if level.level == "N3")
    assert bits.status == "passed"
    assert "embed.weight" in bits.text
    assert "bias" not in bits.text


ALL_BUGS = BUGS | planted_in_steps.BUGS


@pytest.mark.by_day(
    "the gradient of what enters a column-wise layer is not summed*",
    "gradients are summed over tensor-parallel ranks twice",
    "batch norm normalizes over a rank's rows",
    "micro-batches get the labels of the first",
    "ranks draw masks of their own",
    "a head on slices is given the targets of positions before",
    "gradients of norms are those of a rank's part of the sequence*",
    "parts of the sequence are gathered in another order",
    "the learning rate is multiplied by the number of ranks",
    "heads change places between ranks",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_BUGS)
def test_a_planted_bug_is_found_where_it_is(name: str) -> None:
    bug = ALL_BUGS[name]
    report = found(bug)
    assert bug.level in {result.level for result in report.levels if result.status == "failed"}
    divergence = report.divergence
    assert divergence is not None
    assert divergence.step == 1  # not before it was there
    assert (divergence.what, divergence.partial) == (bug.what, bug.partial), report
    assert bug.name in divergence.name, report


def test_bits_are_promised_where_arithmetic_allows() -> None:
    build, batch = MODELS["blocks"]
    by_plan: dict[str, list[str]] = {}
    for name, constraints in {"zero": {DP: 2, ZERO: 3}, "tp": {TP: 2}}.items():
        report = vescale.verify(make_plan(constraints), build, batch(), steps=1)
        by_plan[name] = [result.status for result in report.levels]
    assert by_plan["zero"] == ["passed"] * 5
    assert by_plan["tp"] == ["passed", "passed", "passed", "does not apply", "passed"]


@pytest.mark.nightly
def test_low_precision_is_judged_by_what_rounding_does() -> None:
    build, batch = MODELS["blocks"]
    report = vescale.verify(make_plan({TP: 2}), build, batch(), steps=2, dtype=torch.bfloat16)
    assert report.passed, report


@pytest.mark.by_day("a row-wise layer is not summed over ranks")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "a row-wise layer is not summed over ranks",
        "a rank's gradient is left out",
        "a tied weight has the gradient of one stage",
    ],
)
def test_a_bug_of_a_plan_that_computes_in_bfloat16_is_found(name: str) -> None:
    bug = BUGS[name]
    report = found(replace(bug, plan={**bug.plan, **HALF}))
    divergence = report.divergence
    assert divergence is not None
    assert (divergence.step, divergence.what) == (1, bug.what), report


class Bilinear(nn.Module):
    """Takes positional arguments, returns a mapping, computes with batches of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": F.mse_loss(self.layer(x), y), "name": "bilinear"}


def test_batches_and_losses_of_many_forms() -> None:
    plan = make_plan({DP: 2})
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert vescale.verify(plan, Bilinear, (x, y), steps=1).passed
    assert vescale.verify(plan, Bilinear, {"x": x, "y": y}, steps=1).passed
    tokenized = UserDict({"x": x, "y": y})  # as of a tokenizer
    assert vescale.verify(plan, Bilinear, tokenized, steps=1).passed
    assert vescale.verify(plan, Bilinear, [(x, y), (y, x)]).passed
    double = vescale.verify(
        plan, Bilinear, (x, y), steps=1, loss_of=lambda model, batch: 2 * model(*batch)["loss"]
    )
    assert double.passed
    deferred = vescale.verify(plan, lambda: vescale.deferred_init(Bilinear), (x, y), steps=1)
    assert deferred.passed


@pytest.mark.by_day("constraints0")
@pytest.mark.parametrize("constraints", [{DP: 2, ZERO: 3}, {PP: 2, PARTS: 2}])
def test_tokens_of_an_expert_are_in_the_order_of_its_choices(constraints: Constraints) -> None:
    """Where ranks have as many of an expert they could be taken for halves of one device's."""
    whole, batch = make("mixtral")
    assert isinstance(whole, transformers.MixtralForCausalLM)
    config = whole.config
    config._experts_implementation = "eager"
    batch = {name: torch.cat([x[:2], x[:2]]) for name, x in batch.items()}
    report = vescale.verify(
        make_plan(constraints), lambda: type(whole)(config), batch, steps=1, dtype=torch.float64
    )
    assert report.passed, report
    assert not report.not_compared


ACTIVATION = nn.GELU()


class Shares(nn.Module):
    """Has a module that others of its class have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.activation = ACTIVATION

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.activation(block(x))
        return x.square().mean()


def test_a_module_that_models_of_a_program_share_is_recorded_by_rank() -> None:
    report = vescale.verify(make_plan({DP: 2, ZERO: 3}), Shares, {"x": torch.randn(8, 4)}, steps=1)
    assert report.passed, report
    assert not report.not_compared


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 5)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.proj(x)
        return scores, F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class OfHead(nn.Module):
    """Has a module that returns the loss, as XLM's ``pred_layer``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = Head()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)[1]


@pytest.mark.parametrize("ignored", [0, 5])
def test_a_loss_that_a_module_returns_is_that_of_its_rows(ignored: int) -> None:
    batch = {"x": torch.randn(4, 6, 4), "targets": torch.arange(24).view(4, 6) % 5}
    batch["targets"][0, :ignored] = -100
    report = vescale.verify(make_plan({DP: 2}), OfHead, batch, steps=1, dtype=torch.float64)
    assert report.passed, report
    assert not report.not_compared


class TwoMeans(nn.Module):
    """Drops, and adds up means over targets of several kinds, as what finds answers does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.drop, self.weights = nn.Dropout(0.5), nn.Buffer(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.drop(block(x))
        begin, end = F.cross_entropy(x, target=begins), F.cross_entropy(x, ends)
        return begin + end / 2 + F.nll_loss(x.log_softmax(-1), ends, self.weights)


def test_means_over_other_targets_have_other_counts() -> None:
    batch = {"x": torch.randn(8, 4), "begins": torch.arange(8) % 4, "ends": torch.arange(8) % 4}
    batch["ends"][1:4] = -100
    report = vescale.verify(make_plan({PP: 2, PARTS: 4}), TwoMeans, batch, steps=2)
    assert report.passed, report


class DrawsOnTheHost(nn.Module):
    """Scales by chance, of Python and of NumPy, as layers that are skipped do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + np.random.rand()
        for block in self.blocks:
            x = block(x) * scale
        return x.square().mean()


@pytest.mark.parametrize("constraints", [{DP: 2}, {PP: 2, PARTS: 2}])
def test_generators_of_python_and_numpy_are_seeded_and_left_alone(
    constraints: Constraints,
) -> None:
    before = random.getstate(), pickle.dumps(np.random.get_state())
    plan = make_plan(constraints)
    report = vescale.verify(plan, DrawsOnTheHost, {"x": torch.randn(8, 4)}, steps=2)
    assert report.passed, report
    assert (random.getstate(), pickle.dumps(np.random.get_state())) == before


class DropsTwice(nn.Module):
    """One module drops before the blocks and behind them, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.drop(x + first).square().mean()


@pytest.mark.by_day("zbv-4", "looped_bfs-2")
@pytest.mark.parametrize(
    ("schedule", "parts"), [("interleaved_1f1b", 4), ("zbv", 4), ("looped_bfs", 2)]
)
def test_stages_of_a_rank_call_a_module_by_turns(schedule: str, parts: int) -> None:
    plan = make_plan({PP: 2, PARTS: parts, SCHEDULE: schedule, VIRTUAL: 2})
    report = vescale.verify(plan, DropsTwice, {"x": torch.randn(8, 4)}, steps=2)
    assert report.passed, report


class Chooses(nn.Module):
    """One score of every choice, whose bias softmax does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.score = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.score(self.up(x).tanh()).squeeze(-1), labels)


@pytest.mark.by_day("constraints0")
@pytest.mark.parametrize("constraints", [{DP: 2}, {DP: 4, ZERO: 2}])
def test_a_gradient_that_is_nothing_but_rounding_is_measured_by_others(
    constraints: Constraints,
) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        batch = {"x": torch.randn(8, 3, 4), "labels": torch.arange(8) % 3}
        report = vescale.verify(make_plan(constraints), Chooses, batch, steps=2, seed=seed)
        assert report.passed, report


@pytest.mark.nightly
def test_bits_of_a_pipeline_are_those_of_a_model_without_a_cache() -> None:
    """T5's keys and values are copied by a cache, and products of them rounded otherwise."""
    config = transformers.T5Config(
        vocab_size=32, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        pad_token_id=0,
    )  # fmt: skip
    config.decoder_start_token_id = 1
    ids = torch.arange(192).view(8, 24) % 29 + 3
    batch = {"input_ids": ids, "labels": ids}
    report = vescale.verify(
        make_plan({PP: 2, PARTS: 4}),
        lambda: transformers.T5ForConditionalGeneration(config),
        batch,
        steps=1,
        dtype=torch.float64,
    )
    assert report.passed, report
    assert "N3" in {each.level for each in report.levels if each.status == "passed"}


class Asked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None, *, is_scaled: bool, scale: float) -> Tensor:
        for block in self.blocks:
            x = block(x)
        assert mask is None
        return (scale * x if is_scaled else x).square().mean()


@pytest.mark.parametrize("constraints", [{DP: 2}, {PP: 2, PARTS: 2}])
def test_what_is_no_tensor_of_a_batch_is_given_as_it_is(constraints: Constraints) -> None:
    batch = {"x": torch.randn(4, 4), "mask": None, "is_scaled": True, "scale": 2.0}
    report = vescale.verify(make_plan(constraints), Asked, batch, steps=1)
    assert report.passed, report


def test_a_plan_that_was_found_is_verified_in_another_dtype() -> None:
    build, batch = MODELS["blocks"]
    plan = vescale.generate_plan(build(), {DP: 2, ZERO: 1}, world_size=2)
    assert plan.model is not None
    assert vescale.verify(plan, build, batch(), steps=1).passed
    with pytest.raises(ValueError, match="the plan was made for Blocks"):
        vescale.verify(plan, MODELS["batch norm"][0], MODELS["batch norm"][1](), steps=1)


class OnlySingle(nn.Linear):
    """Does not run in float64, as grouped products of experts do not."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == torch.float64:
            raise RuntimeError("Expected mat_a to be Float32")
        return super().forward(input).pow(2).mean()


def test_what_cannot_be_verified_is_said() -> None:
    x = torch.randn(4, 4)
    model = Bilinear()
    with pytest.raises(ValueError, match="a new model in every call, got the same one twice"):
        vescale.verify(make_plan({DP: 2}), lambda: model, (x, x))
    with pytest.raises(TypeError, match="a function that makes the model, got a model"):
        vescale.verify(make_plan({DP: 2}), model, (x, x))  # pyright: ignore[reportArgumentType]: refused
    with pytest.raises(ValueError, match=r"does not run in float64 .*mat_a.*give dtype=None"):
        vescale.verify(make_plan({DP: 2}), lambda: OnlySingle(4, 4), x)
    assert vescale.verify(
        make_plan({DP: 2}), lambda: OnlySingle(4, 4), x, steps=1, dtype=None
    ).passed
    with pytest.raises(ValueError, match="a multiple of 8 rows, one for each data-parallel"):
        vescale.verify(make_plan({DP: 8}), Bilinear, (x, x))
    with pytest.raises(ValueError, match="rows along the first dim, as many in each"):
        vescale.verify(make_plan({DP: 2}), Bilinear, (x, x[:2]))
    with pytest.raises(TypeError, match="expected the model to return its loss"):
        vescale.verify(make_plan({DP: 2}), lambda: nn.Linear(4, 4), x)


def test_nothing_of_the_caller_changes() -> None:
    build, batch = MODELS["dropout"]
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    vescale.verify(make_plan({DP: 2}), build, batch(), steps=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


FILE = """
import torch, vescale
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).pow(2).mean()

def batch():
    return {"x": torch.randn(8, 4)}

if __name__ == "__main__":
    plan = vescale.ParallelPlan.from_json(open("plan.json").read())
    print(vescale.verify(plan, Net, batch()))
"""


@pytest.mark.slow
def test_the_command_verifies_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "plan.json").write_text(make_plan({TP: 2}).to_json())
    arguments = ["verify", "net.py:Net", "--plan", "plan.json", "--batch", "net.py:batch"]
    assert main(arguments) == 0
    assert "N4  passed" in capsys.readouterr().out
    assert main([*arguments, "--json", "--steps", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert main([*arguments[:-1], "net.py:bath"]) == 2
    assert "has no 'bath'" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
def test_ranks_of_torchrun_are_compared_too(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "plan.json").write_text(make_plan({TP: 2}).to_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "net.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "emulated twice, emulated and in processes" in done.stdout
    assert "failed" not in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("plan", ["tp", "zero3", "pp", "tp-sequence"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "bert", "t5", "gpt_neox"])
def test_families(name: str, plan: str) -> None:
    constraints = {
        "tp": {TP: 2},
        "zero3": {DP: 2, ZERO: 3},
        "pp": {PP: 2, PARTS: 2},
        "tp-sequence": {TP: 2, SEQUENCE: True},
    }[plan]
    batch = MODELS["llama"][1]()
    report = vescale.verify(
        make_plan(constraints), lambda: hugging_face(name, "sdpa", **CONFIGS[name]), batch, steps=2
    )
    assert report.passed, report


class Classifier(nn.Module):
    """Two classes of features that hardly tell them apart."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(rate), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x) * 0.01, labels)


@pytest.mark.by_day("*'data_parallel.size': 2*-0.1*")
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("constraints", [{DP: 2}, {DP: 4, ZERO: 3}, {PP: 2, PARTS: 4}], ids=str)
def test_gradients_whose_terms_cancel_round_with_their_size(
    constraints: Constraints, rate: float
) -> None:
    """As many rows of each class, so that little is left of the head's bias."""
    for seed in range(2):

        def model_fn(seed: int = seed) -> nn.Module:
            torch.manual_seed(seed)
            return Classifier(rate)

        generator = torch.Generator().manual_seed(seed)
        batch = {"x": torch.randn(8, 6, generator=generator), "labels": torch.arange(8) % 2}
        report = vescale.verify(make_plan(constraints), model_fn, batch, steps=2)
        assert report.passed, str(report)
