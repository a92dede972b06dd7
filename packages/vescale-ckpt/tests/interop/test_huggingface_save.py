"""A sharded model is written whole, or every rank hears at once why not."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._interop import gather
from vescale_dtensor import distribute_tensor
from vescale_testing import World

# Long enough for every test to fail if ranks wait for it, or for the world's own.
TIMEOUT = timedelta(seconds=30)
PROMPTLY_SECONDS = 20.0


def full_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "rows": torch.randn(1001, 37),
        "columns": torch.randn(64, 1000, 3).bfloat16(),
        "copies": torch.randn(30, 20),
        "plain": torch.arange(50),
        "transposed": torch.randn(40, 70).t(),
        "few": torch.randn(1, 5),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
    }


def placements_of(name: str) -> Placement:
    dims = {"rows": 0, "columns": 1, "transposed": 1, "few": 0, "none": 0}
    return Shard(dims[name]) if name in dims else Replicate()


def sharded() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: tensor
        if name == "plain"
        else distribute_tensor(tensor, mesh, (placements_of(name),))
        for name, tensor in full_tensors().items()
    }


def save(path: str) -> None:
    vescale_ckpt.save_safetensors(path, sharded(), timeout=TIMEOUT)


def check_written(directory: Path) -> None:
    written, expected = load_file(directory / "model.safetensors"), full_tensors()
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name


def save_in_rounds(path: str, nbytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_ROUND_NBYTES", nbytes)
        save(path)


@pytest.mark.parametrize("nbytes", [1 << 30, 10_000])
def test_tensors_are_written_whole_however_they_are_sharded(
    world2: World, tmp_path: Path, nbytes: int
) -> None:
    world2.run(save_in_rounds, str(tmp_path), nbytes)
    check_written(tmp_path)


class Unreadable(dict[str, Any]):
    """Tensors of which one rank cannot read one when its turn has come."""

    def __init__(self, directory: str, error: BaseException) -> None:
        super().__init__(sharded())
        self.directory, self.error = Path(directory), error

    def __getitem__(self, name: str) -> Any:
        # Its shape is asked for before files are begun.
        if name == "transposed" and any(self.directory.glob(".*")):
            raise self.error
        return super().__getitem__(name)


def cannot_write(error: BaseException) -> Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]:
    """Return what fails where rank 0 writes."""

    def convert(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if "columns" in given and not given["columns"].is_meta:
            raise error
        return given

    return convert


def options_that_fail(path: str, where: str, error: BaseException) -> dict[str, Any]:
    if where == "writing":
        return {"convert": cannot_write(error)}
    return {"tensors": Unreadable(path, error)}


def outcome(path: str, rank: int, options: dict[str, Any]) -> tuple[str, str, float]:
    """Save while something is wrong on one rank; return the error and how long it took."""
    given: dict[str, Any] = {"directory": path, "tensors": sharded(), "timeout": TIMEOUT}
    start = time.monotonic()
    raised: BaseException | None = None
    try:
        vescale_ckpt.save_safetensors(**given | (options if dist.get_rank() == rank else {}))
    except (CheckpointError, KeyboardInterrupt) as error:
        raised = error
    return type(raised).__name__, str(raised), time.monotonic() - start


def save_with_a_failure(
    path: str, rank: int, where: str, error: BaseException
) -> tuple[str, str, float]:
    answer = outcome(path, rank, options_that_fail(path, where, error))
    save(path)
    return answer


FULL = OSError(errno.ENOSPC, "No space left on device")
FAILURES = [(1, "reading"), (0, "reading"), (0, "writing")]


@pytest.mark.parametrize(("rank", "where"), FAILURES)
def test_a_failure_amid_the_tensors_is_told_to_all(
    world2: World, tmp_path: Path, rank: int, where: str
) -> None:
    for kind, message, seconds in world2.run(
        save_with_a_failure, str(tmp_path), rank, where, FULL
    ):
        assert kind == "CheckpointError"
        assert f"No space left on device (on rank {rank})" in message
        assert seconds < PROMPTLY_SECONDS
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    check_written(tmp_path)  # by the next save


@pytest.mark.parametrize(("rank", "where"), FAILURES)
def test_ranks_do_not_wait_for_one_that_was_interrupted(
    world2: World, tmp_path: Path, rank: int, where: str
) -> None:
    answers = world2.run(save_with_a_failure, str(tmp_path), rank, where, KeyboardInterrupt())
    assert answers[rank][0] == "KeyboardInterrupt"
    assert answers[1 - rank][0] == "CheckpointError"
    assert f"rank {rank} has died or hangs" in answers[1 - rank][1]
    assert max(seconds for _, _, seconds in answers) < PROMPTLY_SECONDS
    check_written(tmp_path)


WRONG: dict[str, Any] = {
    "directory": 3,
    "tensors": {"rows": "a word"},
    "convert": "a word",
    "together": 3,
    "max_file_nbytes": "5GB",
    "stem": 3,
    "metadata": 3,
}


def save_with_wrong_arguments(path: str, rank: int) -> list[tuple[str, str, float]]:
    return [outcome(path, rank, {name: value}) for name, value in WRONG.items()]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_argument_that_is_wrong_on_one_rank_is_told_to_all(
    world2: World, tmp_path: Path, rank: int
) -> None:
    for answers in world2.run(save_with_wrong_arguments, str(tmp_path), rank):
        for name, (kind, message, seconds) in zip(WRONG, answers, strict=True):
            assert kind == ("MismatchError" if name == "stem" else "CheckpointError"), name
            assert f"on rank {rank}" in message, (name, message)
            assert seconds < PROMPTLY_SECONDS, name


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}


def test_what_is_no_dict_of_tensors_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    model: Any = WithExtraState(2, 2)
    with pytest.raises(CheckpointError, match=r"got a WithExtraState; pass its state_dict\(\)"):
        vescale_ckpt.save_safetensors(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"'_extra_state' is a dict, .* leave it out"):
        vescale_ckpt.save_safetensors(tmp_path, model.state_dict())
    assert list(tmp_path.iterdir()) == []


def save_what_ranks_see_otherwise(path: str) -> None:
    """Save tensors on sub-meshes with copies, with an axis of copies, and cut twice."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = full_tensors()["rows"]
    tensors: dict[str, DTensor] = {
        "of_sub_meshes": distribute_tensor(full, two["tp"], (Shard(0),)),
        "copies_of_columns": distribute_tensor(full, two, (Replicate(), Shard(1))),
        "both": distribute_tensor(full, two, (Shard(1), Shard(0))),
        "twice": distribute_tensor(full, two, (Shard(0), Shard(0))),
    }
    vescale_ckpt.save_safetensors(path, tensors, timeout=TIMEOUT)


def test_meshes_that_ranks_see_otherwise_are_gathered_as_rank_0_sees_them(
    world4: World, tmp_path: Path
) -> None:
    world4.run(save_what_ranks_see_otherwise, str(tmp_path))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, full_tensors()["rows"]), name


def save_placed_otherwise(path: str) -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, (Shard(dist.get_rank()),))
    return outcome(path, dist.get_rank(), {"tensors": {"w": tensor}})


def test_another_placement_on_one_rank_is_told_to_all(world2: World, tmp_path: Path) -> None:
    for kind, message, seconds in world2.run(save_placed_otherwise, str(tmp_path)):
        assert kind == "MismatchError"
        assert "expected the same mesh and placements of 'w'" in message
        assert seconds < PROMPTLY_SECONDS
