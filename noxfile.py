"""Every check this repository has; ``nox -s tests`` runs all that a change has to pass.

Sessions use uv where it is installed (``pip install "nox[uv]"``) and pip otherwise, and take
their versions from ``constraints/dev.txt``. On Linux torch brings CUDA libraries of several
GB; with uv, ``UV_TORCH_BACKEND=cpu nox ...`` takes its smaller build without them.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints" / "dev.txt")
DIST = ROOT / "dist"

# In the order in which they are tested: what a package builds on comes before it.
PUBLISHED = [
    "vescale-dtensor",
    "vescale-deferred",
    "vescale-ckpt",
    "vescale-parallel",
    "vescale-planner",
    "vescale",
]
LOCAL = {"vescale-testing": ROOT / "testing"} | {
    name: ROOT / "packages" / name for name in PUBLISHED
}
UNIT_SESSIONS = [f"unit-{name}" for name in LOCAL]
SOURCES = os.pathsep.join(str(path / "src") for path in LOCAL.values())
# Most tests take one processor. A rank is a process of its own, so a few workers are enough;
# ``nox -s integration -- -n 0 --pdb`` has one process only, which a debugger needs.
ON_ALL_PROCESSORS = ("-n", "auto", "--maxprocesses=4", "--dist=worksteal")
# GPU sessions run where nox was started if that has torch: it is the build for this machine.
HOST_HAS_TORCH = find_spec("torch") is not None
HOST_BACKEND = "none" if HOST_HAS_TORCH else None
HOST_PYTHON = sys.executable if HOST_HAS_TORCH else "python"

# uv does not read pip's variables: what this machine tells one of them, tell both.
for pip_variable, uv_variable, separator in (
    ("PIP_FIND_LINKS", "UV_FIND_LINKS", ","),
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", " "),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX", " "),
    ("PIP_CERT", "SSL_CERT_FILE", " "),
):
    if pip_variable in os.environ:
        os.environ.setdefault(uv_variable, separator.join(os.environ[pip_variable].split()))
if "PIP_EXTRA_INDEX_URL" in os.environ:  # pip takes the best version of all indexes
    os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
# Write .pyc files: without them every rank of every test compiles torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def closure(name: str, *, group: str | None = None) -> list[str]:
    """Return ``name`` and the local packages it declares, directly or through others."""
    project = tomllib.loads((LOCAL[name] / "pyproject.toml").read_text(encoding="utf-8"))
    specs: list[str] = [*project["project"]["dependencies"]]
    if group is not None:
        specs += project["dependency-groups"][group]
    declared = [re.split(r"[^\w.-]", spec)[0] for spec in specs]
    found = [name, *(local for dep in declared if dep in LOCAL for local in closure(dep))]
    return list(dict.fromkeys(found))


def install(
    session: nox.Session, *others: str, editable: list[str], constraints: str = CONSTRAINTS
) -> None:
    """Install local packages in place and ``others`` from an index."""
    local = [arg for name in editable for arg in ("-e", str(LOCAL[name]))]
    session.install("-c", constraints, *local, *others)


def install_everything(session: nox.Session, *others: str, constraints: str = CONSTRAINTS) -> None:
    """Install all local packages and what the tests of any of them need."""
    groups = [
        arg for path in LOCAL.values() for arg in ("--group", f"{path / 'pyproject.toml'}:test")
    ]
    install(session, *groups, *others, editable=[*LOCAL], constraints=constraints)


@nox.session
def train(session: nox.Session) -> None:
    """Train a small Llama here; ``nox -s train -- --help`` lists its options."""
    install(session, "transformers", "rich", "matplotlib", editable=PUBLISHED)
    session.run("python", "examples/train_llama.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint and the architecture contract; ``-- --fix`` mends. Needs no torch."""
    session.install("-c", CONSTRAINTS, "ruff", "import-linter")
    fix = "--fix" in session.posargs
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": SOURCES})


@nox.session
def types(session: nox.Session) -> None:
    """Type-check everything against the real torch."""
    install_everything(session, "pyright[nodejs]", "rich", "matplotlib", "griffelib")
    session.run("pyright")


def unit(session: nox.Session) -> None:
    """Test one package in a venv that holds what it declares and no more."""
    name = session.name.removeprefix("unit-")
    group = ["--group", f"{LOCAL[name] / 'pyproject.toml'}:test"]
    install(session, *group, editable=closure(name, group="test"))
    session.run("pytest", *ON_ALL_PROCESSORS, str(LOCAL[name]), *session.posargs)


for unit_session in UNIT_SESSIONS:
    nox.session(unit, name=unit_session)


@nox.session
def integration(session: nox.Session) -> None:
    """Test all packages together, on several CPU ranks."""
    install_everything(session, "rich", "matplotlib")
    session.run("pytest", *ON_ALL_PROCESSORS, "integration_tests", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into ``site/``; ``-- serve`` shows it."""
    session.install(
        "-c", CONSTRAINTS, "mkdocs-material", "mkdocstrings", "mkdocstrings-python", "ruff"
    )
    if "serve" in session.posargs:
        session.run("mkdocs", "serve")
    else:
        session.run("mkdocs", "build", "--strict")
        session.run("python", "docs/api_pages.py", "site")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the sdist of every package into ``dist/``."""
    session.install("-c", CONSTRAINTS, "build", "hatchling", "check-wheel-contents")
    shutil.rmtree(DIST, ignore_errors=True)
    for name in PUBLISHED:
        session.run("python", "-m", "build", "-n", "-o", str(DIST), str(LOCAL[name]), silent=True)
    session.run("check-wheel-contents", str(DIST))


@nox.session(requires=["build"], reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Use the built wheels in a venv that has never seen the sources."""
    session.install("-c", CONSTRAINTS, *map(str, DIST.glob("*.whl")))
    session.chdir(session.create_tmp())
    session.run("python", "-I", str(ROOT / "integration_tests" / "wheel_smoke.py"))


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("package", PUBLISHED)
def wheel_alone(session: nox.Session, package: str) -> None:
    """Install one package as a stranger does, from a folder of wheels, and import it."""
    module = package.replace("-", "_")
    wheel = next(DIST.glob(f"{module}-*.whl"))
    session.install("-c", CONSTRAINTS, "--find-links", str(DIST), str(wheel))
    session.chdir(session.create_tmp())
    names = f"import {module} as m; [getattr(m, name) for name in m.__all__]"
    session.run("python", "-I", "-c", names)


@nox.session(requires=["lint", "types", *UNIT_SESSIONS, "integration", "docs", "wheels"])
def tests(session: nox.Session) -> None:
    """Run every check there is but those that need a GPU or a night."""
    session.log("all checks passed")


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the tests that take minutes, of all packages."""
    install_everything(session, "rich", "matplotlib")
    pytest = ("pytest", *ON_ALL_PROCESSORS)
    # Random cases that no earlier night has seen; a failure prints its seed and its case.
    first = str(2000 * (int(time.time()) // 86400 % 100000))
    tests = ("-m", "nightly", "packages", "integration_tests")
    session.run(*pytest, *tests, *session.posargs, env={"VESCALE_FUZZ_FIRST": first})
    rules = [str(path) for path in LOCAL["vescale-dtensor"].glob("tests/rules/test_rules_*.py")]
    session.run(*pytest, *rules, env={"VESCALE_RULE_CASES": "24"})


# Of models of transformers, and not of what one release of it alone has or says.
OF_TRANSFORMERS = [
    "accumulation", "context_dropout", "context_evaluation", "context_inputs", "lists_of_rows",
    "context_joint", "context_parallel", "deferred_checkpoint", "emulate", "fused_outputs",
    "generate_with_encoders", "generate_with_experts", "global_face", "layers_in_lists",
    "listed_experts", "load_other_heads", "loss_in_the_loop", "masked_tokens",
    "one_device_equivalence", "optimizers", "own_checkpoints", "packed_projections",
    "pipeline_cuts", "pipeline_losses", "pipeline_schedules", "pipeline_shared_blocks",
    "predicted_memory", "proposed_plans", "recompute", "resume", "ring_attention",
    "selective_recompute", "tensor_parallel", "verify", "vocabulary_parallel",
]  # fmt: skip


@nox.session
@nox.parametrize("version", ["4.57.6", "5.24.0"])
def other_transformers(session: nox.Session, version: str) -> None:
    """Run tests of models on another release of transformers than the one of development."""
    install_everything(session, "rich", "matplotlib")
    # With what it asks of others of its makers, which the pinned ones of these may not fit.
    session.install(f"transformers=={version}")
    files = [f"integration_tests/test_{name}.py" for name in OF_TRANSFORMERS]
    session.run("pytest", *ON_ALL_PROCESSORS, *files, *session.posargs)


@nox.session
@nox.parametrize("version", ["2.11.0", "2.12.1", "2.14.1", "2.15.0"])
def other_torch(session: nox.Session, version: str) -> None:
    """Run the tests of all packages on another version of torch than the one of development."""
    pins = Path(CONSTRAINTS).read_text(encoding="utf-8")
    constraints = Path(session.create_tmp()) / "constraints.txt"
    # What torch asks of setuptools has changed, too.
    others = re.sub(r"(?m)^(torch|setuptools)==.*$", "", pins)
    constraints.write_text(f"{others}\ntorch=={version}\n", "utf-8")
    install_everything(session, "rich", "matplotlib", constraints=str(constraints))
    session.run(
        "pytest", *ON_ALL_PROCESSORS, "packages", "testing", "integration_tests", *session.posargs
    )


@nox.session(python=["3.12", "3.13"])
def other_python(session: nox.Session) -> None:
    """Run the tests of all packages on another version of Python than the one of development."""
    install_everything(session, "rich", "matplotlib")
    session.run(
        "pytest", *ON_ALL_PROCESSORS, "packages", "testing", "integration_tests", *session.posargs
    )


@nox.session(venv_backend=HOST_BACKEND)
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU, in the environment nox was started from if it has torch.

    Then the rules of operators and torch's operator database, on the GPU instead of the CPU.
    """
    if not HOST_HAS_TORCH:
        install_everything(session)
    # The sources may be on the path only: name the plugin rather than find it installed.
    env = {"PYTHONPATH": SOURCES, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    pytest = (HOST_PYTHON, "-m", "pytest", "-p", "vescale_testing.plugin")
    if not HOST_HAS_TORCH or find_spec("xdist"):
        pytest = (*pytest, "-p", "xdist", "-n", "8", "--dist", "worksteal")
    session.run(*pytest, "-m", "gpu", "packages", "integration_tests", *session.posargs, env=env)
    tests = LOCAL["vescale-dtensor"] / "tests" / "rules"
    rules = map(str, [*tests.glob("test_rules_*.py"), tests / "test_opinfo.py"])
    on_gpu = {**env, "VESCALE_TEST_DEVICE": "cuda"}
    session.run(*pytest, "-m", "not gpu", *rules, *session.posargs, env=on_gpu)


@nox.session(venv_backend=HOST_BACKEND)
def bench(session: nox.Session) -> None:
    """Run one benchmark or all, in the environment nox was started from if it has torch.

    ``nox -s bench -- ckpt --ranks 4`` runs a script that starts its own ranks, or needs none;
    ``nox -s bench -- --nproc-per-node=gpu all_reduce`` starts it under torchrun.
    """
    if not HOST_HAS_TORCH:
        install(session, "transformers", editable=PUBLISHED)
    options = [*itertools.takewhile(lambda arg: arg.startswith("-"), session.posargs)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", *options] if options else []
    chosen = session.posargs[len(options) :]
    every = [[path.stem] for path in sorted((ROOT / "benchmarks").glob("[!_]*.py"))]
    env = {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    for name, *arguments in [chosen] if chosen else every:
        script = str(ROOT / "benchmarks" / f"{name}.py")
        session.run(HOST_PYTHON, *torchrun, script, *arguments, env=env)
