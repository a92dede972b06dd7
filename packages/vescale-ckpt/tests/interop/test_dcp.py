"""Checkpoints of torch.distributed.checkpoint: what it wrote we read, what we write it reads."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    Placement,
    Replicate,
    Shard,
    distribute_tensor as torch_distribute_tensor,
)

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, MismatchError, PerRank, RngState
from vescale_dtensor import distribute_tensor
from vescale_testing import World
from vescale_testing.memory import peak_nbytes


def tensors() -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(7 * 6.0).reshape(7, 6),
        "b": torch.arange(5).to(torch.bfloat16),
        "n": torch.tensor(3),
        "flag": torch.tensor([True, False]),
        "none": torch.zeros(0, 3),
    }


def values() -> dict[str, Any]:
    return {
        "step": 5,
        "betas": (0.9, 0.95),
        "nested": {"name": "x", "list": [1, 2.5]},
        "milestones": {2: 1, 10: 1},
    }


def dcp_save(state: dict[str, Any], path: str | Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(state, checkpoint_id=path)


def dcp_load(state: dict[str, Any], path: str | Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(state, checkpoint_id=path)


def zeros() -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_state_that_dcp_saved_is_loaded_whole(tmp_path: Path) -> None:
    dcp_save({"model": tensors(), **values()}, tmp_path / "dcp")
    given = zeros()
    state = {"model": given, **dict.fromkeys(values())}
    loaded = vescale_ckpt.load_dcp(tmp_path / "dcp", state)
    assert same(given, tensors())
    assert {key: loaded[key] for key in values()} == values()


def test_a_part_is_loaded_under_other_names_and_dtypes(tmp_path: Path) -> None:
    dcp_save({"model": tensors(), **values()}, tmp_path / "dcp")
    given = {"net": {"w": torch.zeros(7, 6, dtype=torch.float64)}}
    rules = {r"model\.(.*)": r"net.\1"}
    vescale_ckpt.load_dcp(tmp_path / "dcp", given, only=[r"net\.w"], rename=rules, cast=True)
    assert torch.equal(given["net"]["w"], tensors()["w"].double())


def test_what_does_not_fit_is_reported_together(tmp_path: Path) -> None:
    dcp_save({"model": tensors()}, tmp_path / "dcp")
    given = {"model": {**zeros(), "w": torch.zeros(6, 7), "new": torch.zeros(1)}}
    del given["model"]["b"]
    with pytest.raises(
        MismatchError, match=r"(?s)does not fit.*missing.*new.*unexpected.*model.b"
    ):
        vescale_ckpt.load_dcp(tmp_path / "dcp", given)


def test_an_optimizer_that_has_not_made_a_step_gets_its_state(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp_save(state, tmp_path / "dcp")
    fresh = nn.Linear(3, 2)
    other = torch.optim.AdamW(fresh.parameters(), lr=9.0)
    vescale_ckpt.load_dcp(tmp_path / "dcp", {"model": fresh, "optimizer": other})
    vescale_ckpt.import_dcp(tmp_path / "dcp", tmp_path / "ckpt")
    third = torch.optim.AdamW(fresh.parameters(), lr=9.0)
    vescale_ckpt.load(tmp_path / "ckpt", {"optimizer": third}, only=["optimizer"])
    for candidate in (other, third):
        assert candidate.param_groups[0]["lr"] == 0.1
        for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            for name, value in optimizer.state[theirs].items():
                assert torch.equal(candidate.state[ours][name], value)


LAYOUTS: dict[str, tuple[Placement, ...]] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "copies": (Replicate(),),
}


def save_sharded(directory: str) -> None:
    """Save under each layout."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layout, placements in LAYOUTS.items():
        sharded = torch_distribute_tensor(tensors()["w"], mesh, placements)
        state = {"model": {**tensors(), "w": sharded}, "step": 5}
        save(state, checkpoint_id=f"{directory}/{layout}")


def wrong_after_load(directory: str) -> list[str]:
    """Load what was saved under each layout under each layout and return what is wrong."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong: list[str] = []
    for saved in LAYOUTS:
        for layout, placements in LAYOUTS.items():
            sharded = distribute_tensor(torch.zeros(7, 6), mesh, placements)
            given = {**zeros(), "w": sharded}
            loaded = vescale_ckpt.load_dcp(f"{directory}/{saved}", {"model": given, "step": 0})
            if not same({**given, "w": sharded.full_tensor()}, tensors()) or loaded["step"] != 5:
                wrong.append(f"{saved} as {layout}")
    return wrong


def test_shards_that_dcp_saved_are_loaded_under_other_placements(
    world2: World, world4: World, tmp_path: Path
) -> None:
    world4.run(save_sharded, str(tmp_path))
    assert world2.run(wrong_after_load, str(tmp_path)) == [[], []]
    for layout in LAYOUTS:
        vescale_ckpt.import_dcp(tmp_path / layout, tmp_path / f"{layout}-ckpt")
        given = zeros()
        loaded = vescale_ckpt.load(tmp_path / f"{layout}-ckpt", {"model": given, "step": 0})
        assert loaded["step"] == 5
        assert same(given, tensors())


def wrong_after_dcp_load(path: str) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong: list[str] = []
    for layout, placements in LAYOUTS.items():
        sharded = torch_distribute_tensor(torch.zeros(7, 6), mesh, placements)
        given = {**zeros(), "w": sharded}
        state = {"model": given, "step": 0}
        load(state, checkpoint_id=path)
        if not same({**given, "w": sharded.full_tensor()}, tensors()) or state["step"] != 5:
            wrong.append(layout)
    return wrong


def test_dcp_loads_what_was_exported(
    world2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vescale_ckpt._interop.dcp_export._MAX_CHUNK_NBYTES", 50)  # two rows
    vescale_ckpt.save(tmp_path / "ckpt", {"model": tensors(), **values()})
    vescale_ckpt.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    given = zeros()
    state: dict[str, Any] = {"model": given, **values(), "step": 0}
    dcp_load(state, tmp_path / "dcp")
    assert same(given, tensors())
    assert state["step"] == 5
    assert world2.run(wrong_after_dcp_load, str(tmp_path / "dcp")) == [[], []]


def test_an_export_needs_a_fraction_of_the_memory_of_the_model(tmp_path: Path) -> None:
    state = {"model": {str(i): torch.full((4 << 20,), float(i)) for i in range(6)}}
    vescale_ckpt.save(tmp_path / "ckpt", state)
    before = peak_nbytes(reset=True)
    vescale_ckpt.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    assert peak_nbytes() - before < 48 << 20
    given = {"model": {str(i): torch.zeros(4 << 20) for i in range(6)}}
    dcp_load(given, tmp_path / "dcp")
    assert same(given["model"], state["model"])


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"model": tensors()})
    with open(tmp_path / "ckpt" / "model.safetensors", "r+b") as stream:
        stream.seek(4100)
        stream.write(b"\xff")
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: bytes 0 to"):
        vescale_ckpt.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def test_tied_tensors_are_exported_under_each_key_and_tied_again(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    vescale_ckpt.save(tmp_path / "ckpt", {"model": {"a": tensor, "b": tensor}})
    vescale_ckpt.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    given = {"model": {"a": torch.zeros(4), "b": torch.zeros(4)}}
    dcp_load(given, tmp_path / "dcp")
    assert torch.equal(given["model"]["a"], tensor)
    assert torch.equal(given["model"]["b"], tensor)
    shared = torch.zeros(4)
    vescale_ckpt.load_dcp(tmp_path / "dcp", {"model": {"a": shared, "b": shared}})
    assert torch.equal(shared, tensor)


def test_two_tensors_that_are_tied_only_here_are_refused(tmp_path: Path) -> None:
    dcp_save({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path / "dcp")
    shared = torch.zeros(4)
    with pytest.raises(MismatchError, match="'b' shares its memory"):
        vescale_ckpt.load_dcp(tmp_path / "dcp", {"a": shared, "b": shared})


class Opaque:
    pass


def test_a_value_that_names_code_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    dcp_save({"model": tensors(), "run": {"what": Opaque()}}, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"'run\.what' cannot be read without running code"):
        vescale_ckpt.load_dcp(tmp_path / "dcp", {"model": zeros()})
    with pytest.raises(CheckpointError, match=r"'run\.what'"):
        vescale_ckpt.import_dcp(tmp_path / "dcp", tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()
    given = {"model": zeros()}
    vescale_ckpt.load_dcp(tmp_path / "dcp", given, only=["model"])
    assert same(given["model"], tensors())


def test_shards_that_leave_a_hole_are_refused(tmp_path: Path, world2: World) -> None:
    world2.run(save_sharded, str(tmp_path))
    file = tmp_path / "rows" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["model.w"].chunks.pop()
    file.write_bytes(pickle.dumps(metadata))
    given = {"model": zeros(), "step": 0}
    with pytest.raises(CorruptCheckpointError, match=r"shards of 'model\.w' cover 24 of 42"):
        vescale_ckpt.load_dcp(tmp_path / "rows", given)


def test_directories_that_are_no_dcp_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no DCP checkpoint"):
        vescale_ckpt.load_dcp(tmp_path, {})
    (tmp_path / ".metadata").write_bytes(b"\x80\x04")
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata is damaged"):
        vescale_ckpt.load_dcp(tmp_path, {})
    vescale_ckpt.save(tmp_path / "ckpt", {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="is not empty"):
        vescale_ckpt.export_dcp(tmp_path / "ckpt", tmp_path)


def test_a_missing_file_of_a_dcp_checkpoint_is_an_error(tmp_path: Path) -> None:
    dcp_save({"model": tensors()}, tmp_path / "dcp")
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match="cannot read"):
        vescale_ckpt.load_dcp(tmp_path / "dcp", {"model": zeros()})


def save_own(path: str) -> torch.Tensor:
    """Save what each rank has its own of; return the state of torch's generator."""
    torch.manual_seed(dist.get_rank())
    own = {"words": torch.arange(3.0) + dist.get_rank(), "rank": dist.get_rank()}
    state = {"own": PerRank(own), "same": PerRank("all"), "rng": RngState(), "w": torch.ones(2)}
    vescale_ckpt.save(path, state)
    return torch.get_rng_state()


def test_what_each_rank_has_its_own_of_is_exported_by_rank(world2: World, tmp_path: Path) -> None:
    expected = world2.run(save_own, str(tmp_path / "ckpt"))
    vescale_ckpt.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    own = {f"rank_{rank}": {"words": torch.zeros(3), "rank": -1} for rank in range(2)}
    rng = {f"rank_{rank}": torch.zeros_like(expected[rank]) for rank in range(2)}
    given: dict[str, Any] = {"own": own, "same": {"rank_0": ""}, "rng": {"torch": rng}}
    given["w"] = torch.zeros(2)
    dcp_load(given, tmp_path / "dcp")
    assert given["same"] == {"rank_0": "all"}
    assert torch.equal(given["w"], torch.ones(2))
    for rank in range(2):
        loaded: dict[str, Any] = given["own"][f"rank_{rank}"]
        assert torch.equal(loaded["words"], torch.arange(3.0) + rank)
        assert loaded["rank"] == rank
        assert torch.equal(rng[f"rank_{rank}"], expected[rank])
