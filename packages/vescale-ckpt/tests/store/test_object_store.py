"""Checkpoints with a file per rank, in directories and at URLs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, PerRank, cli
from vescale_ckpt._save import rank_files
from vescale_dtensor import InterleavedShard, distribute_tensor
from vescale_testing import World

from .test_atomic_directory import _kill_and_check

PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "copies": (Replicate(),),
    "interleaved": (InterleavedShard(0, 2),),
}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(8, 12),
        "large": torch.randn(1000, 1200),
        "n": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "half": torch.arange(5).to(torch.bfloat16),
    }


def sharded(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        key: distribute_tensor(tensor, mesh, PLACEMENTS[kind]) if key in ("w", "large") else tensor
        for key, tensor in tensors.items()
    }


def save_sharded(path: str, kind: str) -> None:
    model = sharded(weights(), kind)
    state = {"model": {**model, "tied": model["w"]}, "step": 5, "own": PerRank(dist.get_rank())}
    vescale_ckpt.save(path, state, layout="per_rank")


def wrong_after_load(path: str, kind: str) -> list[str]:
    zeros = {key: torch.zeros_like(tensor) for key, tensor in weights().items()}
    model = sharded(zeros, kind)
    given = {"model": {**model, "tied": model["w"]}, "step": 0}
    loaded = vescale_ckpt.load(path, given, only=["model", "step"])
    expected = sharded(weights(), kind)
    wrong = [
        key
        for key, tensor in model.items()
        if not torch.equal(local(tensor), local(expected[key]))
    ]
    return wrong + ([] if loaded["step"] == 5 else ["step"])


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def load_whole(path: str | Path) -> None:
    """Load on one device and compare."""
    given = {key: torch.zeros_like(tensor) for key, tensor in weights().items()}
    given["tied"] = torch.zeros(8, 12)
    loaded = vescale_ckpt.load(path, {"model": given, "step": 0}, only=["model", "step"])
    assert loaded["step"] == 5
    for key, tensor in weights().items():
        assert torch.equal(given[key], tensor)
    assert torch.equal(given["tied"], weights()["w"])


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_files_of_ranks_load_under_other_placements(
    world2: World, world4: World, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "ckpt"
    world4.run(save_sharded, str(path), kind)
    # What all ranks have is too little to be shared.
    assert len(list(path.glob("rank-*.safetensors"))) == (1 if kind == "copies" else 4)
    load_whole(path)
    for other in PLACEMENTS:
        assert world2.run(wrong_after_load, str(path), other) == [[], []]


def test_files_of_ranks_are_checked_converted_and_compared(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    world2.run(save_sharded, str(path), "columns")
    assert cli.main(["verify", str(path)]) == 0
    assert cli.main(["inspect", str(path)]) == 0
    assert cli.main(["reshard", str(path), str(tmp_path / "whole")]) == 0
    load_whole(tmp_path / "whole")
    assert cli.main(["diff", str(path), str(tmp_path / "whole")]) == 0
    vescale_ckpt.export_safetensors(path, tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], weights()["w"])


def test_a_damaged_file_of_a_rank_is_refused_with_its_tensor(
    world2: World, tmp_path: Path
) -> None:
    path = tmp_path / "ckpt"
    world2.run(save_sharded, str(path), "rows")
    file = min(path.glob("rank-00001-*.safetensors"))
    with open(file, "r+b") as stream:
        stream.seek(1_000_000)
        stream.write(b"\xff\xff\xff\xff")
    with pytest.raises(CorruptCheckpointError, match=rf"{file.name}.*'model\.large'"):
        load_whole(path)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=file.name):
        load_whole(path)


def test_files_of_ranks_replace_shared_ones_and_the_other_way_round(tmp_path: Path) -> None:
    for layout in ("shared", "per_rank", "shared"):
        state = {"model": {**weights(), "tied": weights()["w"]}, "step": 5}
        vescale_ckpt.save(tmp_path / "ckpt-1", state, layout=layout, keep_last=1)
        load_whole(tmp_path / "ckpt-1")
        assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt-1"]


def save_rank_files(path: str, state: dict[str, Any]) -> None:
    vescale_ckpt.save(path, state, layout="per_rank")


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "effects"), [(0, 14), (1, 3)])
def test_a_killed_rank_leaves_the_old_checkpoint_or_the_new(
    world2: World, tmp_path: Path, rank: int, effects: int
) -> None:
    _kill_and_check(world2, tmp_path / "ckpt", rank, effects, save_rank_files)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("effects", range(30))
def test_a_rank_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new(
    world2: World, tmp_path: Path, rank: int, effects: int
) -> None:
    _kill_and_check(world2, tmp_path / "ckpt", rank, effects, save_rank_files)


def local_state() -> dict[str, Any]:
    model = weights()
    return {"model": {**model, "tied": model["w"]}, "step": 5}


@pytest.fixture
def memory(memory_bucket: str) -> str:
    return f"{memory_bucket}/ckpt"


def test_a_checkpoint_lives_in_memory(memory: str) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint at memory://bucket/ckpt"):
        load_whole(memory)
    vescale_ckpt.save(memory, {"other": torch.ones(3)})
    vescale_ckpt.save(memory, local_state())
    load_whole(memory)
    assert len(MemoryFileSystem.store) == 2
    assert vescale_ckpt.load(memory, {"step": 0}, only=["step"])["step"] == 5
    assert cli.main(["verify", memory]) == 0
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(memory, {**local_state(), "step": 6})
    assert vescale_ckpt.load(memory, {"step": 0}, only=["step"])["step"] == 6


def test_damage_at_a_url_is_refused(memory: str) -> None:
    vescale_ckpt.save(memory, local_state())
    name = next(name for name in MemoryFileSystem.store if "rank-" in name)
    content = MemoryFileSystem.store[name].getvalue()
    system = MemoryFileSystem()
    for changed in (content[:9000] + b"\xff" + content[9001:], content[:-1], b""):
        system.pipe_file(name, changed)
        with pytest.raises(CorruptCheckpointError, match="rank-00000"):
            load_whole(memory)
    system.rm_file(name)
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        load_whole(memory)


def test_an_error_while_writing_to_a_url_leaves_the_old_checkpoint(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vescale_ckpt.save(memory, local_state())

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("the bucket is full")

    monkeypatch.setattr("vescale_ckpt._io.object_store._DELAYS_SECONDS", (0, 0))
    for method in ("open", "pipe_file"):
        monkeypatch.setattr(MemoryFileSystem, method, full)
        with pytest.raises(CheckpointError, match="the bucket is full"):
            vescale_ckpt.save(memory, {"other": torch.ones(3)})
        monkeypatch.undo()
        monkeypatch.setattr("vescale_ckpt._io.object_store._DELAYS_SECONDS", (0, 0))
        load_whole(memory)


def test_a_save_that_fails_takes_its_files_with_it(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vescale_ckpt.save(memory, local_state())
    before = set(MemoryFileSystem.store)
    original = rank_files._write

    def fails(*args: Any) -> None:
        original(*args)
        raise OSError("the bucket is full")

    monkeypatch.setattr("vescale_ckpt._io.object_store._DELAYS_SECONDS", ())
    monkeypatch.setattr(rank_files, "_write", fails)
    with pytest.raises(CheckpointError, match="the bucket is full"):
        vescale_ckpt.save(memory, {"other": torch.ones(3)})
    assert set(MemoryFileSystem.store) == before


def test_requests_that_fail_now_and_then_are_tried_again(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vescale_ckpt._io.object_store._DELAYS_SECONDS", (0, 0, 0))
    failures: dict[str, int] = {}
    for method in ("open", "cat_file", "pipe_file", "size"):
        original = getattr(MemoryFileSystem, method)

        def flaky(*args: Any, _name: str = method, _do: Any = original, **kwargs: Any) -> Any:
            failures[_name] = failures.get(_name, 0) + 1
            if failures[_name] <= 2:
                raise ConnectionError("reset by peer")
            return _do(*args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, method, flaky)
    vescale_ckpt.save(memory, local_state())
    load_whole(memory)
    assert set(failures) == {"open", "cat_file", "pipe_file", "size"}


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/step-3"
    vescale_ckpt.save(url, local_state(), keep_last=1)
    assert (tmp_path / "step-3" / "model.safetensors").exists()
    load_whole(url)
    assert vescale_ckpt.latest(f"file://{tmp_path}") == tmp_path / "step-3"


def test_what_a_url_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ends with a number"):
        vescale_ckpt.save("memory://last", {}, keep_last=1)
    with pytest.raises(ValueError, match="ranks cannot share"):
        vescale_ckpt.save("memory://step-1", {}, layout="shared")
    vescale_ckpt.save(tmp_path / "ckpt", {"w": torch.ones(3)})
    with pytest.raises(ValueError, match="got the URL"):
        vescale_ckpt.import_safetensors(
            tmp_path / "ckpt" / "tensors.safetensors", "memory://step-1"
        )
    with pytest.raises(CheckpointError, match="cannot use nonsense://x"):
        vescale_ckpt.load("nonsense://x", {})


def make_bucket(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import s3fs

    s3fs.S3FileSystem().makedirs("bucket", exist_ok=True)


def save_to_s3(environment: dict[str, str], url: str) -> list[str]:
    os.environ.update(environment)
    for kind in ("columns", "rows"):
        save_sharded(url, kind)
    return wrong_after_load(url, "columns")


def test_ranks_save_to_s3_and_load_from_there(
    world1: World, world2: World, s3: dict[str, str]
) -> None:
    world1.run(make_bucket, s3)
    assert world2.run(save_to_s3, s3, "s3://bucket/step-1") == [[], []]
