"""Saves and loads work where the system lacks what Linux has."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt._io import buffer_pool

LINUX_ONLY = ["posix_fallocate", "posix_fadvise", "RWF_NOWAIT", "O_DIRECT", "sched_getaffinity"]


@pytest.mark.parametrize("missing", [*([name] for name in LINUX_ONLY), LINUX_ONLY], ids=str)
def test_a_system_may_lack_what_only_linux_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    for name in missing:
        monkeypatch.delattr(os, name)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    monkeypatch.setattr(buffer_pool, "_kept", [])
    state: dict[str, Any] = {"a": torch.randn(3 << 20), "b": torch.randn(700, 900).t(), "n": 5}
    target: dict[str, Any] = {"a": torch.zeros(3 << 20), "b": torch.zeros(900, 700), "n": 0}
    vescale_ckpt.save(tmp_path / "step-1", state)
    vescale_ckpt.save(tmp_path / "step-1", state)
    for verify_first in (False, True):
        loaded = vescale_ckpt.load(tmp_path / "step-1", target, verify_first=verify_first)
        assert torch.equal(loaded["a"], state["a"])
        assert torch.equal(loaded["b"], state["b"])
    assert vescale_ckpt.latest(tmp_path, thorough=True) == tmp_path / "step-1"


def test_a_file_system_that_cannot_reserve_space_is_no_reason_not_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    vescale_ckpt.save(tmp_path / "ckpt", {"w": torch.ones(5)})
    assert vescale_ckpt.load(tmp_path / "ckpt", {"w": torch.zeros(5)})["w"].tolist() == [1] * 5
