"""What an index shows of a package: complete, the same for all, and readable on its own."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))

of_packages = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


def project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]


@of_packages
def test_metadata_is_complete(package: Path) -> None:
    data = project(package)
    assert data["name"] == package.name
    assert data["authors"] == [{"name": "veScale authors"}]
    assert data["license"] == "Apache-2.0"
    assert "pytorch" in data["keywords"]
    assert data["keywords"] == sorted(data["keywords"])
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= {*data["urls"]}
    assert all(url.startswith("https://") for url in data["urls"].values())
    assert data["urls"]["Source"].endswith(f"/packages/{package.name}")
    assert len(data["description"]) < 100


def test_classifiers_are_the_same_everywhere_and_fit_the_oldest_python() -> None:
    (classifiers,) = {tuple(project(package)["classifiers"]) for package in PACKAGES}
    assert list(classifiers) == sorted(classifiers)
    assert "Typing :: Typed" in classifiers
    pythons = {c.rpartition(" ")[2] for c in classifiers if c.count("Python :: 3.")}
    (requires,) = {project(package)["requires-python"] for package in PACKAGES}
    assert min(pythons) == requires.removeprefix(">=")


@of_packages
def test_a_readme_stands_alone(package: Path) -> None:
    text = (package / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://"), f"{target} leads nowhere on an index page"
        local = re.match(r"https://github.com/vescale/vescale/(?:blob|tree)/main/(.*)", target)
        assert local is None or (ROOT / local[1]).exists(), target
