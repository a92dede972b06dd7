"""What lies in the files is decided without anybody being asked."""

from __future__ import annotations

import ast
from pathlib import Path

from vescale_ckpt import _format


def imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_format_imports_no_process_groups() -> None:
    assert _format.__file__ is not None
    sources = list(Path(_format.__file__).parent.glob("*.py"))
    names = {name for source in sources for name in imported(source.read_text())}
    assert len(sources) > 5
    assert "torch" in names
    assert not {name for name in names if name.startswith("torch.distributed")}
