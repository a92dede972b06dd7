"""``vescale plan``: a model by name in, a plan in short lines or JSON out, errors in one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from vescale import ParallelPlan
from vescale.cli.main import main

SCRIPT = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(16, 16) for _ in range(4)))

def batch():
    return torch.zeros(2, 16)

def broken():
    raise KeyError("width")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "a_script.py"
    file.write_text(SCRIPT, encoding="utf-8")
    return str(file)


@pytest.fixture
def on_h100(script: str) -> list[str]:
    return ["plan", f"{script}:Net", "--world-size", "4", "--cluster", "h100"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that a command is refused with."""
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_a_function_of_a_file_is_planned_for(
    on_h100: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(on_h100) == 0
    said = capsys.readouterr().out
    assert said.startswith("plan for 4 ranks, Net (8 parameters, 1088 elements)")
    assert "assumed: no example_batch was given" in said
    assert "--example-batch has the model observed" in said
    assert max(map(len, said.splitlines())) <= 100


def test_constraints_are_obeyed_and_json_is_a_plan(
    on_h100: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    keys = ["-c", "data_parallel.zero_stage=3", "-c", "precision.param=bfloat16"]
    keys += ["-c", "batch.shuffle=true", "-c", "precision.reduce=None"]
    assert main([*on_h100, *keys, "--json", "--output", str(output)]) == 0
    plan = ParallelPlan.from_json(capsys.readouterr().out)
    assert (plan.data_parallel.zero_stage, plan.precision.param) == (3, "bfloat16")
    assert plan.batch.shuffle
    assert plan.precision.reduce is None
    assert ParallelPlan.from_json(output.read_text(encoding="utf-8")) == plan


def test_a_page_explains_the_plan(
    on_h100: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert main([*on_h100, "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"explained in {page}\n")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<svg" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # loads nothing


def test_several_plans_are_compared_in_a_table(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", f"{script}:Net", "--world-size", "4", "--cluster", "cpu"]
    arguments += ["--example-batch", f"{script}:batch", "--top", "2"]
    assert main(arguments) == 0
    *_, head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["ranks", "s", "a", "step"]
    assert first.startswith("1.  data 4")
    assert second.startswith("2.  ")
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_one_node_is_planned_for_if_only_the_cluster_is_named(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{script}:Net", "--cluster", "H200"]) == 0
    assert capsys.readouterr().out.startswith("plan for 8 ranks")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "FILE:Nett"], "has no 'Nett'; it has Net"),
        (["plan", "FILE:broken"], "raised KeyError: 'width'; expected a function or class that"),
        (["plan", "torch.nn:Linear"], "missing 2 required positional arguments"),
        (["plan", "no_such_module:Net"], "cannot import 'no_such_module': .*or file.py:factory"),
        (["plan", "nothing.py:Net"], "expected a Python file, got 'nothing.py'"),
        (["plan", "./no/config.json"], "expected a config.json or a directory"),
        (["plan", "FILE:Net", "-c", "recompute"], "expected -c KEY=VALUE, got 'recompute'"),
        (["plan", "FILE:Net", "-c", "tensor_parallel.sise=2"], "did you mean 'tensor_parallel.s"),
        (["plan", "FILE:Net", "--cluster", "h1000"], r"'h1000' \(choose from '?a100'?, '?h100"),
        (["plan", "FILE:Net", "--sequence-length", "8"], "give --example-batch module:function"),
        (["plan", "FILE:Net", "--top", "0"], "top to be a positive integer"),
        (["plan", "FILE:Net", "-c", "a=1", "-c", "a=2"], "expected a once, got 1 and '2'"),
        (["plan"], "required: MODEL; see vescale plan --help"),
        (["no-such-command"], "invalid choice: 'no-such-command'"),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    arguments: list[str], message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *(each.replace("FILE", script) for each in arguments))
    assert line.startswith("vescale")
    assert re.search(message, line)


def test_debug_shows_where_an_error_comes_from(script: str) -> None:
    for arguments in (["--debug", "plan", f"{script}:broken"], ["plan", f"{script}:broken"]):
        if "--debug" not in arguments:
            arguments.append("--debug")
        with pytest.raises(Exception, match="raised KeyError") as caught:
            main(arguments)
        assert isinstance(caught.value.__cause__, KeyError)


def test_a_config_without_transformers_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in refusal(capsys, "plan", "gpt2")
