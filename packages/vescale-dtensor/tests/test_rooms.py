"""What decides where elements go never communicates; import-linter has the rooms themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vescale_dtensor

SOURCES = Path(vescale_dtensor.__file__).parent
DECIDES = [
    *sorted((SOURCES / "_layout").glob("*.py")),
    *sorted((SOURCES / "_redistribute").glob("[!_]*.py")),
]
# Collectives are elsewhere: in torch.distributed itself, for example.
ALLOWED = ("torch.distributed.tensor", "torch.distributed.device_mesh")


def _imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("path", DECIDES, ids=lambda path: path.stem)
def test_a_file_that_decides_imports_no_collectives(path: Path) -> None:
    names = {name for name in _imported(path) if name.startswith("torch.distributed")}
    assert all(name.startswith(ALLOWED) for name in names)
