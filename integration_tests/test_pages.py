"""What the documentation says is so: its code runs, its links lead somewhere, its names exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vescale_ckpt.cli
from docs import api_pages
from integration_tests.pages import (
    PAGES,
    ROOT,
    Block,
    Program,
    anchors_of,
    blocks_of,
    files_shown_by,
    name_of,
    programs,
    prose_of,
    run_on_rank,
)
from vescale_parallel import constraint_keys
from vescale_testing import World

PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
# Blocks of Python that cannot run here, by the reason that stands before them.
NOT_RUN = {
    "a test, which pytest runs": 1,
    "needs another framework": 4,
    "needs tensorboard and wandb": 1,
    "test_huggingface runs this page": 5,
}
# Not names of Python.
LOGGERS = {f"vescale.{name}" for name in ("planner", "parallel", "ckpt", "deferred", "dtensor")}
# Files that pages show, and the test that runs them.
TESTED_FILES = {f"examples/{name}.py" for name in ("minimal", "own_model", "lora")}

of_pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


def _params(num_ranks: int) -> list[Any]:
    return [
        pytest.param(program, id=program.name, marks=pytest.mark.slow)
        for program in programs()
        if program.num_ranks == num_ranks
    ]


def _run(program: Program, world: World | None, directory: Path) -> None:
    stem = re.sub(r"\W", "_", program.name)
    path = directory / f"{stem}.py"
    path.write_text(program.source, encoding="utf-8")
    if world is None:
        run_on_rank(str(path), str(directory))
    else:
        world.run(run_on_rank, str(path), str(directory))


@pytest.mark.parametrize("program", _params(0))
def test_code_of_a_page_runs_as_printed_without_ranks(program: Program, tmp_path: Path) -> None:
    _run(program, None, tmp_path)


@pytest.mark.parametrize("program", _params(1))
def test_code_of_a_page_runs_as_printed(program: Program, world1: World, tmp_path: Path) -> None:
    _run(program, world1, tmp_path)


@pytest.mark.by_day(
    "docs/concepts/pipelines.md on 2",
    "docs/guide/tensor-parallel.md on 2",
    "docs/howto/debugging.md on 2",
    "docs/howto/long-sequences.md on 2",
    "docs/howto/mixed-precision.md on 2",
    "docs/howto/only-checkpoints.md on 2",
    "docs/howto/only-dtensor.md on 2",
    "docs/howto/optimizers.md on 2",
    "docs/howto/resume.md on 2",
    "docs/howto/several-models.md on 2",
    "docs/migrate/accelerate.md on 2",
    "docs/migrate/ddp.md on 2",
    "docs/migrate/deepspeed.md on 2",
    "docs/migrate/fsdp2.md on 2",
    "docs/migrate/megatron.md on 2",
    "docs/migrate/torchtitan.md on 2",
    "docs/migrate/vescale.md on 2",
    "docs/tutorial.md on 2",
    "packages/vescale-ckpt/README.md on 2",
)
@pytest.mark.parametrize("program", _params(2))
def test_code_of_a_page_runs_as_printed_on_two_ranks(
    program: Program, world2: World, tmp_path: Path
) -> None:
    _run(program, world2, tmp_path)


@pytest.mark.parametrize("program", _params(4))
def test_code_of_a_page_runs_as_printed_on_four_ranks(
    program: Program, world4: World, tmp_path: Path
) -> None:
    _run(program, world4, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("program", programs(nightly=True), ids=lambda program: program.name)
def test_code_of_a_page_runs_when_a_reader_starts_it(program: Program, tmp_path: Path) -> None:
    """As a file, by python or torchrun, so without what the ranks of the tests have."""
    path = tmp_path / "program.py"
    path.write_text(program.source, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={program.num_ranks}"]
    command = [sys.executable, *(launcher if program.num_ranks > 1 else []), str(path)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)


def test_every_block_of_python_is_run_or_says_why_not() -> None:
    reasons = [block.marks["not run"] for block in BLOCKS if "not run" in block.marks]
    assert {reason: reasons.count(reason) for reason in reasons} == NOT_RUN
    unmarked = [b.where for b in BLOCKS if b.language in ("py", "python3", "pycon", "")]
    assert unmarked == [], "a language after the backticks, please"
    assert {b.num_ranks for b in BLOCKS} <= {0, 1, 2, 4}


def test_files_that_pages_show_are_the_tested_ones() -> None:
    for page in PAGES:
        assert {*files_shown_by(page)} <= TESTED_FILES, name_of(page)
    for block in BLOCKS:
        if block.file is not None:
            assert block.file in TESTED_FILES, block.where
            text = (ROOT / block.file).read_text(encoding="utf-8")
            assert block.code == text, f"{block.where} is not {block.file} as it is now"


# --- Commands.


def _commands(block: Block) -> Iterator[list[str]]:
    for line in block.code.replace("\\\n", " ").splitlines():
        text = line.removeprefix("$ ").strip()
        if text and not text.startswith("#"):
            yield shlex.split(text, comments=True)


def _is_a_file(token: str, page: Path) -> bool:
    titles = re.findall(r'title="([^"]+)"', page.read_text(encoding="utf-8"))
    return token in titles or any((ROOT / at / token).exists() for at in ("", "examples"))


def _sessions() -> set[str]:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    named = set(re.findall(r"^def (\w+)\(session: nox.Session", text, re.MULTILINE))
    return named | {f"unit-{name}" for name in PACKAGES}


SHELL = [b for b in BLOCKS if b.language in ("bash", "console") and "not run" not in b.marks]


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_commands_of_a_page_name_files_sessions_and_packages_that_are_there(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    subcommands = {"vescale-ckpt": _subcommands(vescale_ckpt.cli._parser())}
    for command in _commands(block):
        for token in command:
            if token.endswith(".py") and "$" not in token:
                assert _is_a_file(token, block.page), (block.where, token)
        if "nox" in command and "-s" in command:
            assert command[command.index("-s") + 1] in _sessions(), block.where
        if command[0] in subcommands and len(command) > 1:
            assert command[1] in subcommands[command[0]], block.where
        if "install" in command and "pip" in command:
            ours = [re.split(r"[\[=<>]", token)[0] for token in command if "vescale" in token]
            assert {Path(name).name for name in ours} <= {*PACKAGES}, block.where


def _subcommands(parser: argparse.ArgumentParser) -> set[str]:
    return {
        choice
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action.choices
    }


# --- Links.


@of_pages
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for number, line in prose_of(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            where = f"{name_of(page)}:{number}: {target}"
            link = target.removeprefix("https://github.com/vescale/vescale/blob/main/")
            if link == target and re.match(r"[a-z]+:", link):
                continue  # another host
            link, _, anchor = link.partition("#")
            base = page.parent if link == target.partition("#")[0] else ROOT
            file = base / link if link else page
            assert file.exists(), where
            if anchor:
                assert anchor in anchors_of(file), where


# --- Names.

_NAME = re.compile(r"(?<![\w./-])(vescale(?:_[a-z]+)?(?:\.[A-Za-z_]\w*)+)")
_ENDINGS = {"md", "py", "svg", "toml", "json", "sh", "yaml"}


@of_pages
def test_names_of_the_api_that_a_page_mentions_exist(page: Path) -> None:
    foreign = "\n".join(b.code for b in blocks_of(page) if "not run" in b.marks)
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for name in _NAME.findall("" if line.strip() and line.strip() in foreign else line):
            if name not in LOGGERS and name.rsplit(".")[-1] not in _ENDINGS:
                _resolve(name, f"{name_of(page)}:{number}")


def _resolve(name: str, where: str) -> None:
    module, *attributes = name.split(".")
    value: Any = importlib.import_module(module)
    path = module
    for attribute in attributes:
        path = f"{path}.{attribute}"
        is_module = not hasattr(value, attribute) and attribute in _modules_in(value)
        value = importlib.import_module(path) if is_module else getattr(value, attribute, None)
        assert value is not None, f"{where}: there is no {name}"


def _modules_in(module: Any) -> set[str]:
    return {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))}


_SECTIONS = "|".join(sorted({key.split(".")[0] for key in constraint_keys() if "." in key}))
_KEY = re.compile(rf"[`\"']((?:{_SECTIONS})\.[a-z_]+)(?=[`\"'=\s])")


@of_pages
def test_constraints_that_a_page_mentions_exist(page: Path) -> None:
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for key in _KEY.findall(line):
            assert key in constraint_keys(), f"{name_of(page)}:{number}: {key}"


# --- What is refused.

KEYS_PAGE = ROOT / "docs" / "guide" / "plans.md"


def _key_rows() -> dict[str, str]:
    """Return the table of constraint keys: key to the rest of its row."""
    rows = re.findall(r"^\| (`[^|]*`) \|(.*)$", KEYS_PAGE.read_text(encoding="utf-8"), re.M)
    known = constraint_keys()
    return {
        key: rest for keys, rest in rows for key in re.findall(r"`([^`]+)`", keys) if key in known
    }


def test_every_constraint_has_a_row_in_the_guide() -> None:
    assert set(_key_rows()) == set(constraint_keys())


@of_pages
def test_a_page_says_of_nothing_that_works_that_it_is_refused(page: Path) -> None:
    """A sentence with "not available" or "refused" and a kind of parallelism is about the two."""
    text = " ".join(line for _, line in prose_of(page))
    for sentence in re.split(r"(?<=[.:;]) |\|", text):
        if re.search(r"not available|refuses?:? |refused", sentence):
            kinds = re.findall(r"(\w+)(?: and \w+)? parallelism", sentence)
            bad = {kind.lower() for kind in kinds} & {"sequence", "tensor", "data"}
            assert not bad, f"{name_of(page)}: {sentence}"


# --- Errors.


def _texts_of_sources() -> list[str]:
    """Return every text of the sources, with a NUL in place of each value that is filled in."""
    found: list[str] = []
    for file in (ROOT / "packages").glob("*/src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_errors_that_the_troubleshooting_page_explains_are_those_of_the_sources() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts = _texts_of_sources()
    titles = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(titles) >= 25
    for title in titles:
        pattern = re.compile(".*".join(map(re.escape, title.split("..."))), re.DOTALL)
        assert any(pattern.search(text) for text in texts), title


def test_every_public_name_has_an_entry_on_an_api_page() -> None:
    for package in PACKAGES:
        name = package.replace("-", "_")
        module = importlib.import_module(name)
        assert api_pages.public_names(name) == tuple(module.__all__)
        listing = api_pages.on_page_markdown((ROOT / f"docs/api/{name}.md").read_text("utf-8"))
        for public in module.__all__:
            assert f"::: {name}.{public}\n" in listing or f"{{#{name}.{public}}}" in listing
