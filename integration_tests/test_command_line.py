"""``vescale plan`` for HuggingFace configs, from a directory as from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from vescale import ParallelPlan
from vescale.cli.main import main

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip


def test_a_config_is_planned_for_with_the_class_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig(**SIZES, num_attention_heads=4)
    config.architectures = ["LlamaForSequenceClassification"]
    config.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        command = ["plan", str(source), "--world-size", "2", "--cluster", "h100"]
        assert main(command) == 0
        said = capsys.readouterr().out
        assert said.startswith("plan for 2 ranks, LlamaForSequenceClassification (")


def test_a_config_that_names_no_class_is_one_of_a_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64).save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--world-size", "1", "--sequence-length", "8", "--json"]
    assert main([*command, "--cluster", "a100"]) == 0
    plan = ParallelPlan.from_json(capsys.readouterr().out)
    assert plan.model is not None
    assert plan.model.name == "GPT2LMHeadModel"
    assert plan.estimate is not None
    assert (plan.estimate.tokens, plan.estimate.is_assumed) == (8, False)
