from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, MismatchError, load_safetensors
from vescale_dtensor import distribute_tensor
from vescale_testing import World


class Net(nn.Module):
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 9)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight


def written(directory: Path, *, num_files: int = 1) -> dict[str, torch.Tensor]:
    """Write the weights of a Net as HuggingFace does, in bfloat16, tied weights once."""
    model = Net().to(torch.bfloat16)
    model.steps += 3
    tensors = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file = "model.safetensors" if num_files == 1 else f"model-{number}.safetensors"
        chosen = names[number::num_files]
        weight_map.update(dict.fromkeys(chosen, file))
        save_file({name: tensors[name].clone() for name in chosen}, directory / file)
    if num_files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def load_sharded(path: str, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Load into a sharded model and return what is wrong."""
    mesh = init_device_mesh("cpu", (2,))
    model = Net()
    shards = {
        "embed.weight": Shard(1),
        "up.weight": Shard(0),
        "up.bias": Shard(0),
    }
    for name, placement in shards.items():
        module, attribute = name.split(".")
        sharded = distribute_tensor(torch.zeros(tensors[name].shape), mesh, (placement,))
        setattr(model.get_submodule(module), attribute, nn.Parameter(sharded))
    model.head.weight = model.embed.weight
    load_safetensors(path, model)
    expected = {
        name: distribute_tensor(tensors[name].float(), mesh, (placement,)).to_local()
        for name, placement in shards.items()
    }
    wrong = [
        name
        for name, tensor in expected.items()
        if not torch.equal(model.get_parameter(name).to_local(), tensor)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]: a DTensor
    ]
    return wrong + ([] if int(model.steps) == 3 else ["steps"])


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_huggingface_directory_fills_a_sharded_model_of_another_dtype(
    world2: World, tmp_path: Path, num_files: int
) -> None:
    tensors = written(tmp_path, num_files=num_files)
    assert world2.run(load_sharded, str(tmp_path), tensors) == [[], []]


def test_names_are_changed_by_rules(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    changed = {f"transformer.{key}": value for key, value in tensors.items()}
    save_file(changed, tmp_path / "other.safetensors")
    model = Net()
    load_safetensors(tmp_path / "other.safetensors", model, rename={r"transformer\.(.*)": r"\1"})
    assert torch.equal(model.up.weight, tensors["up.weight"].float())


def test_names_that_do_not_fit_are_reported_together(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    tensors["extra"] = torch.ones(1)
    del tensors["up.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = Net()
    before = model.up.weight.clone()
    with pytest.raises(MismatchError, match=r"(?s)missing.*up\.bias.*unexpected.*extra"):
        load_safetensors(tmp_path, model)
    assert torch.equal(model.up.weight, before)
    with pytest.warns(UserWarning, match=r"(?s)missing.*up\.bias.*not loaded: extra"):
        load_safetensors(tmp_path, model, strict=False)
    assert torch.equal(model.up.weight, tensors["up.weight"].float())


HEADERS = {
    "no json": b"{",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "no dtype": b'{"up.bias":{"shape":[1],"data_offsets":[0,4]}}',
    "odd dtype": b'{"up.bias":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}',
    "negative": b'{"up.bias":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
    "too long": b'{"up.bias":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
    "absurd": b'{"up.bias":{"dtype":"U8","shape":[18446744073709551616],'
    b'"data_offsets":[0,18446744073709551616]}}',
    "other length": b'{"up.bias":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
    "three offsets": b'{"up.bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}',
    "numbers": b'{"up.bias":5}',
    "over one another": b'{"up.bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "a hole": b'{"up.bias":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "bytes of no tensor": b'{"up.bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "twice": b'{"up.bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"up.bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "twice within": b'{"up.bias":{"dtype":"F32","dtype":"F64","shape":[1],"data_offsets":[0,8]}}',
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, what: str) -> None:
    content = struct.pack("<Q", len(HEADERS[what])) + HEADERS[what] + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="no whole safetensors file"):
        load_safetensors(tmp_path, Net(), strict=False)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\0" * 7, struct.pack("<Q", 1 << 62)])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="no whole safetensors file"):
        load_safetensors(tmp_path, Net())


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/b", "", 5])
def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path, file: object) -> None:
    index = {"weight_map": {"up.bias": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError):
        load_safetensors(tmp_path, Net())


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        load_safetensors(tmp_path, Net())


def test_what_is_no_module_is_refused_before_the_files_are_opened(tmp_path: Path) -> None:
    given: Any = {"w": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"to be an nn.Module, got dict.*import_safetensors"):
        load_safetensors(tmp_path, given)


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def load_tied(path: str) -> bool:
    """Load weights of which some ranks have no row."""
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(torch.zeros(5, 3), mesh, (Shard(0),))
    vescale_ckpt.load(path, {"model": {"embed.weight": weight, "head.weight": weight}})
    own = torch.arange(15.0).view(5, 3).chunk(4)[dist.get_rank() :][:1]
    return weight.to_local().equal(own[0] if own else torch.zeros(0, 3))


def test_tied_weights_of_other_formats_are_found_under_one_name(
    world4: World, tmp_path: Path
) -> None:
    weight = torch.arange(15.0).view(5, 3)
    save_file({"embed.weight": weight}, tmp_path / "model.safetensors")
    vescale_ckpt.import_safetensors(tmp_path, tmp_path / "ckpt")
    model = TiedNet()
    vescale_ckpt.load(tmp_path / "ckpt", {"model": model})
    assert torch.equal(model.head.weight, weight)
    assert all(world4.run(load_tied, str(tmp_path / "ckpt")))
    model.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(MismatchError, match=r"missing in the checkpoint: model\.head\.weight"):
        vescale_ckpt.load(tmp_path / "ckpt", {"model": model})


def test_files_may_lack_what_is_said_to_be_optional(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    model = Net()
    model.register_buffer("positions", torch.arange(3))
    with pytest.raises(MismatchError, match="positions"):
        load_safetensors(tmp_path, model)
    load_safetensors(tmp_path, model, optional=lambda name: name == "positions")
    assert torch.equal(model.up.weight, tensors["up.weight"].float())
    assert torch.equal(model.get_buffer("positions"), torch.arange(3))


def test_a_layer_of_another_shape_is_left_as_it_is_by_only(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    model = Net()
    model.up = nn.Linear(6, 3)
    before = model.up.weight.clone()
    with pytest.raises(MismatchError, match=r"(?s)does not fit: up\.weight.*only=\["):
        load_safetensors(tmp_path, model, strict=False)
    load_safetensors(tmp_path, model, only=["embed", "steps"])
    assert torch.equal(model.up.weight, before)
    assert torch.equal(model.embed.weight, tensors["embed.weight"].float())
    assert int(model.steps) == 3


def test_only_is_a_list_of_patterns(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ValueError, match="expected a list of patterns as only"):
        load_safetensors(tmp_path, Net(), only="embed")
    with pytest.raises(MismatchError, match=r"only .embedding. matches nothing"):
        load_safetensors(tmp_path, Net(), only=["embedding"])
