"""Checkpoints that former versions have written load, and today's are the same to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import vescale_ckpt
from vescale_testing import World

from .former.make import LAYOUTS, state

FORMER = Path(__file__).with_name("former")


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a state, with the types of what they lie in."""
    if isinstance(value, vescale_ckpt.PerRank):
        value = value.value
    if isinstance(value, torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, dict):
        items = [(f"{path}.{key!r}", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}.{index}", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    leaves: dict[str, Any] = {path: (type(value), [key for key, _ in items])}
    for key, item in items:
        leaves |= flat(item, key)
    return leaves


def erase(leaves: dict[str, Any]) -> None:
    with torch.no_grad():
        for leaf in leaves.values():
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()


def local(leaf: Any) -> Any:
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def is_same(a: Any, b: Any) -> bool:
    a, b = local(a), local(b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def wrong_after_load(path: str, only: list[str] | None = None) -> list[str]:
    """Load into a state of zeros and return where it is not what was saved."""
    target, expected = state(dist.get_rank()), flat(state(dist.get_rank()))
    erase(flat(target))
    target["values"]["plain"], target["step"] = [], 0
    filled = flat(vescale_ckpt.load(path, target, only=only))
    if only is not None:
        expected = {key: leaf for key, leaf in expected.items() if key.startswith(".'model'")}
        filled = {key: filled[key] for key in expected}
    assert list(filled) == list(expected)
    return [key for key, leaf in expected.items() if not is_same(leaf, filled[key])]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_former_checkpoint_loads_as_it_was_saved(world2: World, layout: str) -> None:
    assert world2.run(wrong_after_load, str(FORMER / layout)) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_former_model_loads_on_another_number_of_ranks(world4: World, layout: str) -> None:
    assert world4.run(wrong_after_load, str(FORMER / layout), ["model"]) == [[]] * 4


def save_again(path: str) -> None:
    vescale_ckpt.save(path, state(dist.get_rank()))


def test_what_is_written_today_is_what_was_written_to_the_byte(
    world2: World, tmp_path: Path
) -> None:
    world2.run(save_again, str(tmp_path / "ckpt"))
    former = {path.name: path.read_bytes() for path in (FORMER / "shared").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "ckpt").iterdir()} == former
