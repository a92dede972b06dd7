"""The page about public programs is what was measured, and what measures it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.public_programs.measure import measure, reason_in
from integration_tests.public_programs.page import PAGE, outcomes_kept, page
from integration_tests.public_programs.program import (
    DP,
    Program,
    Swap,
    after,
    before,
    instead,
    named,
)
from integration_tests.public_programs.programs import PROGRAMS as PUBLIC

SCRIPT = """
import sys
import torch
from torch import nn
from torch.optim import SGD

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
sgd = SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(1000):
    x = torch.randn(6, 4)
    loss = model(x).square().mean()
    loss.backward()
    sgd.step()
    sgd.zero_grad()
"""
OWN = Program(
    repository="nobody/nothing",
    commit="",
    script="train.py",
    edits=(
        before(
            "sgd = SGD(model.parameters(), lr=float(sys.argv[1]))",
            "import vescale",
            "plan = vescale.generate_plan(model, CONSTRAINTS)",
            "model = vescale.parallelize(plan, model)",
        ),
        instead(
            "x = torch.randn(6, 4)",
            "x = torch.randn(6, 4).chunk(2)[vescale.data_parallel_rank(model)]",
        ),
    ),
    argv=("0.1",),
    smaller=(Swap("range(1000)", "range(10)"),),
    plans=(DP,),
    local_losses=True,
)
PROGRAMS = (OWN,)  # where ranks look for it


def test_the_page_is_of_the_programs_and_of_what_came_out() -> None:
    outdated = "run `python -m integration_tests.public_programs CLONES --only NAME`"
    plans = {program.name: [named(each) for each in program.plans] for program in PUBLIC}
    assert {name: [*found] for name, found in outcomes_kept().items()} == plans, outdated
    assert PAGE.read_text(encoding="utf-8") == page(PUBLIC, outcomes_kept()), outdated


def test_ten_programs_and_more_are_on_the_page() -> None:
    assert len({program.name for program in PUBLIC}) == len(PUBLIC) >= 10


def test_what_differs_by_more_than_rounding_had_a_warning() -> None:
    inexact = {program.name for program in PUBLIC if program.float32}
    for name, found in outcomes_kept().items():
        for plan, outcome in found.items():
            if outcome["error"] or outcome["warnings"]:
                continue
            differences = [each for each in (outcome["loss"], outcome["gradient"]) if each]
            assert max(differences, default=0.0) < (1e-5 if name in inexact else 1e-10), plan


@pytest.mark.nightly
@pytest.mark.slow
def test_a_program_is_measured_under_a_plan(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    [outcome] = measure(OWN, tmp_path, programs=__name__).values()
    assert outcome.error == ""
    assert outcome.loss is not None
    assert outcome.gradient is not None
    assert max(outcome.loss, outcome.gradient) < 1e-12
    [warning] = outcome.warnings
    assert "A loss computed from its outputs is this rank's" in warning
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == SCRIPT


def test_edits_go_by_whole_lines_and_keep_their_indentation() -> None:
    source = "def f():\n    x = 1\n    return x\n"
    assert after("x = 1", "y = 2", "z = 3").made_in(source).splitlines()[1:4] == [
        "    x = 1",
        "    y = 2",
        "    z = 3",
    ]
    assert instead("x = 1\nreturn x", "return 1").made_in(source) == "def f():\n    return 1\n"
    assert before("x = 1", "y = 2").shown() == "+ y = 2\n  x = 1"
    assert OWN.lines == 4
    with pytest.raises(ValueError, match="expected 'x' once, found it 0 times"):
        after("x", "y").made_in(source)
    with pytest.raises(ValueError, match="expected 'y', which does not occur"):
        Swap("y", "z").made_in(source)


def test_the_error_of_a_rank_is_found_in_what_was_printed() -> None:
    printed = "step 1\n[rank1]: Traceback\n[rank1]: a.b.PeerError: rank 0 did\nKeyError: 3\n"
    assert reason_in(printed) == "a.b.PeerError: rank 0 did"
    assert reason_in("killed") == "no error was printed"
