"""``vescale --version``, ``ckpt``, ``completion``, and ``python -m vescale``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vescale
from vescale.cli import completion
from vescale.cli.main import main, make_parser


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"vescale {vescale.__version__} (torch ")


@pytest.mark.slow
def test_python_m_runs_the_command_line() -> None:
    command = [sys.executable, "-m", "vescale", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "plan" in done.stdout
    assert "doctor" in done.stdout


def test_ckpt_is_the_command_line_of_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vescale.save(tmp_path / "checkpoint", {"weight": torch.ones(3)})
    assert main(["ckpt", "verify", str(tmp_path / "checkpoint")]) == 0
    assert "every byte is as it was saved" in capsys.readouterr().out
    assert main(["ckpt", "inspect", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("vescale: error: ")


_COMPLETE = (
    "COMP_WORDS=({words}); COMP_CWORD={position}; COMPREPLY=(); _vescale; echo ${{COMPREPLY[@]}}"
)
# zsh runs completions of bash with bash's indices, and takes what begins as the word does.
COMPLETE = {
    "bash": ("", _COMPLETE),
    "zsh": ("", "try() {{ emulate -L ksh; " + _COMPLETE + "; }}; try"),
    "fish": ("--no-config", "complete -C '{line}'"),
}


@pytest.mark.parametrize("shell", [*COMPLETE])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["pl"], ["plan"]),
        (["plan", "--cl"], ["--cluster"]),
        (["plan", "--cluster", "h"], ["h100", "h200"]),
        (["plan", "gpt2", "--cluster", "b"], ["b200"]),
        (["ckpt", "ins"], ["inspect"]),
        (["ckpt", "convert", "--to", "d"], ["dcp"]),
        (["completion", "f"], ["fish"]),
    ],
)
def test_a_shell_completes(shell: str, typed: list[str], offered: list[str]) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    option, complete = COMPLETE[shell]
    words = " ".join(["vescale", *typed])
    asked = complete.format(words=words, line=words, position=len(typed))
    command = [program, *option.split(), "-c", completion.script(shell, make_parser()) + asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    # fish says what each word does behind a tab, bash has all words in one line.
    found = " ".join(line.split("\t")[0] for line in done.stdout.splitlines()).split()
    assert [word for word in found if word.startswith(typed[-1])] == offered


def test_every_shell_gets_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        said = capsys.readouterr().out
        assert all(word in said for word in ("plan", "doctor", "ckpt", "h200", "convert"))
