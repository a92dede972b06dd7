"""What one rank does wrong, every rank hears of, and nothing is committed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_testing import World

Change = Callable[[dict[str, Any]], None]


def good_state() -> dict[str, Any]:
    return {"model": {"w": torch.ones(3), "b": torch.zeros(2)}, "lr": 0.1}


def message_of_save(path: str, change: Change) -> str:
    """Save a state that ``change`` has spoilt on rank 1 and return the error."""
    state = good_state()
    if dist.get_rank() == 1:
        change(state)
    try:
        vescale_ckpt.save(path, state)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def other_value(state: dict[str, Any]) -> None:
    state["lr"] = 99.0


def other_shape(state: dict[str, Any]) -> None:
    state["model"]["w"] = torch.ones(4)


def other_dtype(state: dict[str, Any]) -> None:
    state["model"]["w"] = torch.ones(3, dtype=torch.float64)


def other_bytes(state: dict[str, Any]) -> None:
    state["model"]["w"][1] = 2.0


def no_key(state: dict[str, Any]) -> None:
    del state["model"]["b"]


def extra_key(state: dict[str, Any]) -> None:
    state["model"]["extra"] = torch.ones(1)


def unknown_type(state: dict[str, Any]) -> None:
    state["lr"] = object()


SPOILT: dict[Change, str] = {
    other_value: "'lr': 0.1 on ranks 0, 2, 3; 99.0 on rank 1",
    other_shape: "'model.w'",
    other_dtype: "'model.w': F32",
    other_bytes: "'model.w': F32",
    no_key: "'model.b': F32 [2] bytes ",
    extra_key: "'model.extra': missing on ranks 0, 2, 3; F32 [1]",
    unknown_type: "cannot store 'lr'",
}


@pytest.mark.parametrize("change", SPOILT, ids=lambda change: change.__name__)
def test_a_rank_that_disagrees_is_named_on_every_rank(
    world4: World, tmp_path: Path, change: Change
) -> None:
    messages = world4.run(message_of_save, str(tmp_path / "ckpt"), change)
    assert len(set(messages)) == 1
    assert SPOILT[change] in messages[0]
    assert "rank 1" in messages[0]
    assert list(tmp_path.iterdir()) == []


def messages_when_writing_fails(path: str) -> list[str]:
    messages: list[str] = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((2,), float(dist.get_rank()))
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    vescale_ckpt.save(path, {"w": state["w"] * 0})
    original = os.pwrite

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        os.pwrite = fail
    try:
        vescale_ckpt.save(path, state)
    except CheckpointError as error:
        messages.append(str(error))
    finally:
        os.pwrite = original
    return messages


def test_an_error_while_writing_reaches_every_rank_and_the_old_checkpoint_stays(
    world2: World, tmp_path: Path
) -> None:
    messages = world2.run(messages_when_writing_fails, str(tmp_path / "ckpt"))
    assert messages[0] == messages[1]
    assert "No space left on device" in messages[0][0]
    assert "rank 1" in messages[0][0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]
    target = {"w": torch.ones(4)}
    vescale_ckpt.load(tmp_path / "ckpt", target)
    assert torch.equal(target["w"], torch.zeros(4))


def message_of_partial(path: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(CheckpointError) as caught:
        vescale_ckpt.save(path, {"grad": tensor})
    return str(caught.value)


def test_a_tensor_still_to_be_reduced_is_refused(world2: World, tmp_path: Path) -> None:
    for message in world2.run(message_of_partial, str(tmp_path / "ckpt")):
        assert "'grad'" in message
        assert "redistribute" in message


def message_of_load(path: str) -> str:
    width = 3 if dist.get_rank() == 0 else 4
    target: dict[str, Any] = {
        "model": {"w": torch.full((width,), 5.0), "b": torch.zeros(2)},
        "lr": 0.0,
    }
    with pytest.raises(CheckpointError) as caught:
        vescale_ckpt.load(path, target)
    assert bool((target["model"]["w"] == 5.0).all())
    return str(caught.value)


def test_a_rank_that_cannot_load_stops_all_before_anything_changes(
    world2: World, tmp_path: Path
) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", good_state())
    messages = world2.run(message_of_load, str(tmp_path / "ckpt"))
    assert messages[0] == messages[1]
    assert "model.w" in messages[0]
    assert "(on rank 1)" in messages[0]
