"""What ranks tell one another, and what a tensor takes in the manifest, stays small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import MismatchError
from vescale_ckpt._comm.control_group import current_control_group
from vescale_ckpt._format.manifest import MANIFEST_NAME
from vescale_ckpt._save.save import snapshot
from vescale_dtensor import distribute_tensor
from vescale_testing import World


class Overheard:
    """The sizes of all that this rank has gathered and reduced."""

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.reduced: list[int] = []

    @contextmanager
    def listen(self) -> Iterator[None]:
        all_gather, all_reduce = dist.all_gather, dist.all_reduce

        def gathering(received: list[torch.Tensor], sent: torch.Tensor, **kwargs: Any) -> Any:
            self.gathered.append(sent.nbytes)
            return all_gather(received, sent, **kwargs)

        def reducing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.reduced.append(tensor.nbytes)
            return all_reduce(tensor, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather", gathering)
            patch.setattr(dist, "all_reduce", reducing)
            yield


def bytes_gathered(path: str, num_tensors: int) -> tuple[list[int], list[int]]:
    """Save and load half a megabyte; return the sizes of all that is gathered or reduced."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.ones(1 << 17).reshape(num_tensors, -1)
    state = {
        f"layers.{index}.weight": distribute_tensor(full[index], mesh, (Shard(0),))
        for index in range(num_tensors)
    }
    overheard = Overheard()
    with overheard.listen():
        vescale_ckpt.save(path, {"model": state})
        vescale_ckpt.load(path, {"model": state})
    return overheard.gathered, overheard.reduced


def test_messages_do_not_grow_with_the_number_of_tensors(world2: World, tmp_path: Path) -> None:
    few = world2.run(bytes_gathered, str(tmp_path / "few"), 4)
    many = world2.run(bytes_gathered, str(tmp_path / "many"), 1024)
    for (few_gathered, few_reduced), (gathered, reduced) in zip(few, many, strict=True):
        assert gathered == few_gathered
        assert max(gathered) <= 1024
        assert len(gathered) < 12
        assert max(reduced) <= max(few_reduced) + 100


def bytes_gathered_of_copies(path: str, num_tensors: int) -> tuple[list[int], list[int]]:
    """Save a model of which each half of the ranks has a copy, on a mesh of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    full = torch.arange(4.0 * num_tensors).reshape(num_tensors, 4)
    state = {f"w{i}": distribute_tensor(full[i], mesh, (Shard(0),)) for i in range(num_tensors)}
    overheard = Overheard()
    with overheard.listen():
        vescale_ckpt.save(path, {"model": state})
    loaded = {f"w{i}": torch.zeros(4) for i in range(num_tensors)}
    vescale_ckpt.load(path, {"model": loaded})
    assert all(torch.equal(loaded[f"w{i}"], full[i]) for i in range(num_tensors))
    return overheard.gathered, overheard.reduced


def test_of_copies_on_other_meshes_ranks_reduce_one_number_a_tensor(
    world4: World, tmp_path: Path
) -> None:
    for gathered, reduced in world4.run(bytes_gathered_of_copies, str(tmp_path / "ckpt"), 500):
        assert max(gathered) <= 1024
        assert max(reduced) <= 8 * 500


def bytes_gathered_of_a_mistake(path: str, num_tensors: int) -> tuple[int, str]:
    """Save, but with two mistakes on rank 1."""
    state: dict[str, Any] = {f"w{index}": torch.zeros(2) for index in range(num_tensors)}
    state["text"] = "x" * 300 + str(dist.get_rank())
    if dist.get_rank() == 1:
        state["w7"] = torch.zeros(3)
    overheard = Overheard()
    with overheard.listen(), pytest.raises(MismatchError) as caught:
        vescale_ckpt.save(path, state)
    return max(overheard.gathered), str(caught.value)


def test_ranks_that_disagree_do_not_send_one_another_all_that_they_know(
    world2: World, tmp_path: Path
) -> None:
    for gathered, message in world2.run(bytes_gathered_of_a_mistake, str(tmp_path / "ckpt"), 3000):
        assert gathered <= 1024
        assert "'w7': F32 [2] bytes " in message
        assert "F32 [3] bytes" in message
        assert "value 'text': " in message
        assert "more" not in message


def messages_about_many_mistakes(path: str) -> str:
    first = float(dist.get_rank())
    state = {f"w{index}": torch.full((2,), first) for index in range(3000)}
    with pytest.raises(MismatchError) as caught:
        vescale_ckpt.save(path, state)
    return str(caught.value)


def test_of_many_differences_some_are_named(world2: World, tmp_path: Path) -> None:
    for message in world2.run(messages_about_many_mistakes, str(tmp_path / "ckpt")):
        assert message.count("tensor 'w") == 5
        assert "and at least " in message


def record_nbytes(path: Path, num_tensors: int) -> int:
    state = {f"layers.{1000 + i}.weight": torch.zeros(2, 3) for i in range(num_tensors)}
    vescale_ckpt.save(path, {"model": state})
    return (path / MANIFEST_NAME).stat().st_size


def test_the_commit_record_holds_little_more_than_the_names(tmp_path: Path) -> None:
    grown = record_nbytes(tmp_path / "many", 300) - record_nbytes(tmp_path / "few", 100)
    # Twice the name, in quotes: once with the file, once in the state, there with a colon and "$".
    one = 2 * len('"layers.1000.weight",') + len(':"$"')
    assert grown <= 200 * one + 16


def test_tensors_that_are_alike_share_their_layout() -> None:
    state = {f"layers.{index}": torch.zeros(2, 3) for index in range(100)}
    taken = snapshot({"model": state, "copy": dict(state)}, current_control_group())
    assert len({id(part.layout) for part in taken.shards.values()}) == 1
