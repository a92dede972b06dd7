from __future__ import annotations

import subprocess
import sys

import pytest

import vescale_ckpt


def test_the_public_names_are_these() -> None:
    assert vescale_ckpt.__all__ == [
        "AsyncSaver",
        "CheckpointError",
        "CorruptCheckpointError",
        "MismatchError",
        "PerRank",
        "RngState",
        "SavedTensor",
        "StateTemplate",
        "Stateful",
        "export_dcp",
        "export_safetensors",
        "import_dcp",
        "import_safetensors",
        "latest",
        "list_checkpoints",
        "load",
        "load_dcp",
        "load_safetensors",
        "remove_older",
        "save",
        "save_safetensors",
    ]
    assert all(hasattr(vescale_ckpt, name) for name in vescale_ckpt.__all__)


IMPORT = """
import sys, torch
before = set(sys.modules)
import vescale_ckpt
added = set(sys.modules) - before
assert added == {"vescale_ckpt"}, sorted(added)
assert vescale_ckpt.CheckpointError.__module__ == "vescale_ckpt.exceptions"
assert "vescale_dtensor" not in sys.modules
assert "save" in dir(vescale_ckpt)
"""


@pytest.mark.slow
def test_an_import_adds_nothing_to_that_of_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True, timeout=120)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(AttributeError, match="'vescale_ckpt' has no attribute 'lod'"):
        _ = vescale_ckpt.lod  # pyright: ignore[reportAttributeAccessIssue]: what is tested
