"""Hooks around forward and backward of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vescale_parallel._data_parallel.block_hooks import BlockHooks, PartsOfBlocks


def refuse(module: nn.Module, args: Any) -> None:
    raise ValueError("not here")


def test_what_another_hook_raises_before_a_block_is_told_alone() -> None:
    block, runs = nn.Linear(2, 2), list[str]()
    BlockHooks(
        block,
        [],
        before_forward=lambda: runs.append("before"),
        runs_again=lambda: False,
        after_forward=lambda *, has_backward: runs.append(f"after {has_backward}"),
        before_backward=lambda: runs.append("backward"),
        is_ready=lambda: True,
        num_backwards=lambda: 0,
        frees=True,
        parts=PartsOfBlocks(),
    ).install()
    handle = block.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="not here"):  # and no warning of what was raised besides
        block(torch.ones(1, 2))
    assert not runs
    handle.remove()
    block(torch.ones(1, 2)).sum().backward()
    assert runs == ["before", "after True", "backward"]
