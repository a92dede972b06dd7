"""Checkpoints become HuggingFace directories and come from them, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError
from vescale_testing.memory import peak_nbytes


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(700, 512),
        "up.weight": torch.randn(300, 7, dtype=torch.float64),
        "steps": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "nothing": torch.zeros(0, 4),
        "half": torch.randn(5).to(torch.bfloat16),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = weights()
    tensors["head.weight"] = tensors["embed.weight"]
    vescale_ckpt.save(tmp_path / "ckpt", {"model": tensors, "step": 3, "other": torch.ones(2)})
    return tmp_path / "ckpt"


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """Read an exported directory with the safetensors library alone."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


@pytest.mark.parametrize("max_file_nbytes", [1 << 40, 10_000])
def test_the_safetensors_library_reads_what_was_exported(
    saved: Path, tmp_path: Path, max_file_nbytes: int
) -> None:
    vescale_ckpt.export_safetensors(saved, tmp_path / "hf", max_file_nbytes=max_file_nbytes)
    tensors = exported(tmp_path / "hf")
    expected = {**weights(), "head.weight": weights()["embed.weight"]}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    if max_file_nbytes == 10_000:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / "hf" / file)
    else:
        assert [file.name for file in (tmp_path / "hf").iterdir()] == ["model.safetensors"]


def test_names_change_some_are_left_out_and_floats_are_converted(
    saved: Path, tmp_path: Path
) -> None:
    vescale_ckpt.export_safetensors(
        saved,
        tmp_path / "hf",
        rename={r"(.*)\.weight": r"net.\1.w"},
        skip=[r"head\..*", "nothing"],
        dtype=torch.float16,
    )
    tensors = exported(tmp_path / "hf")
    assert tensors.keys() == {"net.embed.w", "net.up.w", "steps", "flags", "half"}
    assert torch.equal(tensors["net.embed.w"], weights()["embed.weight"].half())
    assert torch.equal(tensors["net.up.w"], weights()["up.weight"].half())
    assert torch.equal(tensors["steps"], torch.tensor(3))
    assert torch.equal(tensors["half"], weights()["half"].half())


def test_what_cannot_be_exported_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensors below 'net'.*'model', 'step', 'other'"):
        vescale_ckpt.export_safetensors(saved, tmp_path / "hf", key="net")
    with pytest.raises(CheckpointError, match="two tensors would be called 'x'"):
        vescale_ckpt.export_safetensors(saved, tmp_path / "hf", rename={".*weight": "x"})
    assert not (tmp_path / "hf").exists()
    vescale_ckpt.export_safetensors(saved, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"holds 'model\.safetensors' already"):
        vescale_ckpt.export_safetensors(saved, tmp_path / "hf")


def test_a_damaged_checkpoint_is_not_exported(saved: Path, tmp_path: Path) -> None:
    with open(saved / "model.safetensors", "r+b") as stream:
        stream.seek(1_200_000)
        stream.write(b"\xff\0\xff")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: bytes 1048576 to"):
        vescale_ckpt.export_safetensors(saved, tmp_path / "hf")
    assert [file.name for file in (tmp_path / "hf").iterdir()] == ["config.json"]


def test_huggingface_files_become_a_checkpoint_and_files_again(tmp_path: Path) -> None:
    names = sorted(weights())
    for number in range(2):
        chosen = {name: weights()[name] for name in names[number::2]}
        save_file(chosen, tmp_path / f"model-{number}.safetensors")
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    vescale_ckpt.import_safetensors(tmp_path, tmp_path / "ckpt", rename={"steps": "count"})
    given = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    given["count"] = given.pop("steps")
    vescale_ckpt.load(tmp_path / "ckpt", {"model": given})
    assert torch.equal(given["count"], torch.tensor(3))
    assert torch.equal(given["embed.weight"], weights()["embed.weight"])
    vescale_ckpt.export_safetensors(tmp_path / "ckpt", tmp_path / "hf", rename={"count": "steps"})
    for name, tensor in weights().items():
        assert torch.equal(exported(tmp_path / "hf")[name], tensor)


def test_an_export_needs_a_fraction_of_the_memory_of_the_model(tmp_path: Path) -> None:
    tensor = torch.ones(16 << 20)
    vescale_ckpt.save(tmp_path / "ckpt", {"model": {"w": tensor}})
    del tensor
    before = peak_nbytes(reset=True)
    vescale_ckpt.export_safetensors(tmp_path / "ckpt", tmp_path / "hf", dtype=torch.bfloat16)
    assert peak_nbytes() - before < 32 << 20
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 32 << 20


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=20,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("skip", [[], [r"lm_head\.weight"]])
def test_transformers_loads_an_exported_llama_with_tied_weights(
    tmp_path: Path, skip: list[str]
) -> None:
    model = tiny_llama()
    vescale_ckpt.save(tmp_path / "ckpt", {"model": model})
    model.config.save_pretrained(tmp_path / "hf")
    vescale_ckpt.export_safetensors(
        tmp_path / "ckpt", tmp_path / "hf", skip=skip, max_file_nbytes=5000
    )
    loaded: Any = LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    again, notes = loaded
    assert not any(notes.values())
    assert isinstance(again, nn.Module)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert again.get_parameter("lm_head.weight") is again.get_parameter(
        "model.embed_tokens.weight"
    )
