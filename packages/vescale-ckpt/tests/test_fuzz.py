"""Whatever is in the files: they load, or are refused with a clear error, in bounded memory."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import vescale_ckpt
from vescale_ckpt import CheckpointError, MismatchError, cli
from vescale_ckpt._format.file_layout import HEADER_ALIGNMENT
from vescale_ckpt._format.manifest import FORMAT_VERSION, MANIFEST_NAME
from vescale_testing.memory import peak_nbytes

FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
HEAD = b'{"vescale_ckpt":%d,"crc32":"00000000",' % FORMAT_VERSION
# Replaced at random by one another: what a header or an index consists of.
ODD = [
    *(b"-1", b"0", b"1e400", b"9" * 30, b"4611686018427387904", b"null", b"true", b"[]", b"{}"),
    *(b'"$"', b'"$b"'),
    *(b'""', b'"../../etc/passwd"', b'"/etc/passwd"', b'"\\u0000"', b'"U8"', b"[[]]", b"1.5"),
]


def mutated(text: bytes, seed: int) -> bytes:
    """Replace numbers and strings of a JSON text at random."""
    chooser = random.Random(seed)
    tokens = re.split(rb'("[^"]*"|-?\d+)', text)
    for _ in range(chooser.randint(1, 4)):
        index = chooser.randrange(1, len(tokens), 2)
        other = tokens[chooser.randrange(1, len(tokens), 2)]
        tokens[index] = chooser.choice([other, *ODD])
    return b"".join(tokens)


def load_foreign(path: Path) -> None:
    """Load HuggingFace files, or see them refused by an error of this package."""
    with suppress(CheckpointError):
        vescale_ckpt.load_safetensors(path, nn.Linear(4, 3), strict=False)


@pytest.mark.filterwarnings("ignore:passed over", "ignore:only in", "ignore:missing in")
@settings(FUZZ, max_examples=60)
@given(content=st.binary(max_size=200), length=st.integers(0, 300))
@example(content=b"", length=1 << 62)
def test_random_bytes_in_a_safetensors_file_are_refused(
    tmp_path: Path, content: bytes, length: int
) -> None:
    for head in (b"", struct.pack("<Q", length)):
        (tmp_path / "model.safetensors").write_bytes(head + content)
        load_foreign(tmp_path)


def load_mutated_header(directory: Path, seed: int) -> None:
    file = directory / "model.safetensors"
    save_file({"weight": torch.ones(3, 4), "bias": torch.ones(3), "x": torch.ones(2)}, file)
    content = file.read_bytes()
    (nbytes,) = struct.unpack("<Q", content[:8])
    header = mutated(content[8 : 8 + nbytes], seed)
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + nbytes :])
    load_foreign(directory)


@pytest.mark.filterwarnings("ignore:passed over", "ignore:only in", "ignore:missing in")
@settings(FUZZ, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_header_loads_or_is_refused(tmp_path: Path, seed: int) -> None:
    load_mutated_header(tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:passed over", "ignore:only in", "ignore:missing in")
@settings(FUZZ, max_examples=5000)
@given(seed=st.integers(0, 2**32))
def test_many_mutated_headers_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    load_mutated_header(tmp_path, seed)


def load_mutated_index(directory: Path, seed: int) -> None:
    for number, name in enumerate(["weight", "bias"]):
        tensors = {name: torch.ones(3, 4) if name == "weight" else torch.ones(3)}
        save_file(tensors, directory / f"model-{number}.safetensors")
    weight_map = {"weight": "model-0.safetensors", "bias": "model-1.safetensors"}
    text = json.dumps({"metadata": {"total_size": 60}, "weight_map": weight_map}).encode()
    (directory / "model.safetensors.index.json").write_bytes(mutated(text, seed))
    load_foreign(directory)


@pytest.mark.filterwarnings("ignore:passed over", "ignore:only in", "ignore:missing in")
@settings(FUZZ, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_index_loads_or_is_refused(tmp_path: Path, seed: int) -> None:
    load_mutated_index(tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:passed over", "ignore:only in", "ignore:missing in")
@settings(FUZZ, max_examples=3000)
@given(seed=st.integers(0, 2**32))
def test_many_mutated_indices_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    load_mutated_index(tmp_path, seed)


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b"\xff\xfe", b'{"weight_map":{"a":"\\ud800"}}']
)
def test_an_index_that_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        vescale_ckpt.load_safetensors(tmp_path, nn.Linear(4, 3))


def signed(body: dict[str, Any]) -> bytes:
    """Return a manifest whose checksum is right."""
    blank = HEAD + json.dumps(body).encode()[1:]
    return blank.replace(b"00000000", b"%08x" % zlib.crc32(blank), 1)


def vast(directory: Path, key: str, *, nbytes: int) -> Path:
    """Write a checkpoint that is whole and holds one tensor of zeros, but takes no space."""
    block_nbytes = 4 << 20
    zeros = f"{zlib.crc32(bytes(block_nbytes)):08x}"
    file = directory / "tensors.safetensors"
    file.touch()
    os.truncate(file, nbytes)
    tree: Any = "$"
    for part in reversed(key.split(".")):
        tree = {part: tree}
    body = {
        "block_nbytes": block_nbytes,
        "files": {
            file.name: {
                "nbytes": nbytes,
                "crc32": zeros * (nbytes // block_nbytes),
                "prefix": "",
                "tensors": [["U8", [nbytes - HEADER_ALIGNMENT], HEADER_ALIGNMENT, [key]]],
            }
        },
        "aliases": {},
        "state": tree,
    }
    (directory / MANIFEST_NAME).write_bytes(signed(body))
    return directory


def test_a_tensor_of_absurd_size_takes_no_memory(tmp_path: Path) -> None:
    path = vast(tmp_path, "optimizer.state.0.x", nbytes=1 << 40)
    before = peak_nbytes(reset=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(MismatchError):
        vescale_ckpt.load(path, {"optimizer": optimizer})
    with pytest.raises(MismatchError):
        vescale_ckpt.load(path, {"optimizer": {"state": {"0": {"x": torch.zeros(3)}}}})
    with pytest.raises(CheckpointError):
        vescale_ckpt.load_safetensors(path / "tensors.safetensors", nn.Linear(2, 2))
    assert cli.main(["inspect", str(path)]) == 0
    assert peak_nbytes() - before < 128 << 20


def test_an_optimizer_ignores_state_of_parameters_that_it_does_not_have(tmp_path: Path) -> None:
    path = vast(tmp_path, f"optimizer.state.{'9' * 5000}.x", nbytes=4 << 20)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(MismatchError, match="unexpected"):
        vescale_ckpt.load(path, {"optimizer": optimizer})


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1, 2],
        "x",
        ["$nothing"],
        [{"$per_rank": [1]}],
        {"a": 1},
        ["$x"],
    ],
)
def test_odd_values_per_rank_are_refused(tmp_path: Path, values: Any) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"x": torch.tensor(1.0), "own": vescale_ckpt.PerRank(1)})
    file = tmp_path / "ckpt" / MANIFEST_NAME
    body = json.loads(file.read_bytes())
    body["state"]["own"] = {"$per_rank": values}
    file.write_bytes(signed({k: v for k, v in body.items() if k not in ("vescale_ckpt", "crc32")}))
    given: dict[str, Any] = {"own": vescale_ckpt.PerRank(torch.tensor(0.0))}
    with pytest.raises(CheckpointError):
        vescale_ckpt.load(tmp_path / "ckpt", given)


def command_on_mutated(checkpoint: Path, text: bytes, seed: int, command: list[str]) -> None:
    _, body = text.split(b",", 2)[1:]
    blank = HEAD + mutated(body, seed)
    manifest = blank.replace(b"00000000", b"%08x" % zlib.crc32(blank), 1)
    (checkpoint / MANIFEST_NAME).write_bytes(manifest)
    assert cli.main(command) in (0, 1, 2)


@pytest.mark.filterwarnings("ignore:passed over", "ignore:only in", "ignore:missing in")
@settings(FUZZ, max_examples=40)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["inspect", "verify", "diff", "hf", "gc"]))
def test_the_command_line_survives_mutated_records(tmp_path: Path, seed: int, name: str) -> None:
    path = tmp_path / "ckpt-1"
    if path.exists():
        (path / MANIFEST_NAME).unlink()
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    vescale_ckpt.save(path, {"model": {"a": torch.arange(9), "b": torch.ones(2)}, "n": (1, 2.5)})
    good = (path / MANIFEST_NAME).read_bytes()
    commands = {
        "diff": ["diff", str(path), str(path)],
        "hf": ["convert", str(path), str(tmp_path / str(seed)), "--to", "hf"],
        "gc": ["gc", str(tmp_path), "--keep", "1"],
    }
    command_on_mutated(path, good, seed, commands.get(name, [name, str(path)]))


BOXES: dict[str, Any] = {
    "a hole": [["f", "w", [0], [3], 4096]],
    "outside": [["f", "w", [2], [4], 4096]],
    "negative": [["f", "w", [-1], [4], 4096]],
    "other dims": [["f", "w", [0, 0], [4, 1], 4096]],
    "no file": [["g", "w", [0], [4], 4096]],
    "behind the end": [["f", "w", [0], [4], 1 << 40]],
    "torn": [["f", "w", [0], [4], 4097]],
    "too few fields": [["f", "w", [0], [4]]],
    "no list": 5,
    "path": [["../f", "w", [0], [4], 4096]],
}


@pytest.mark.parametrize("what", BOXES)
def test_boxes_that_make_no_sense_are_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ckpt"
    vescale_ckpt.save(path, {"w": torch.ones(4)}, layout="per_rank")
    body = json.loads((path / MANIFEST_NAME).read_bytes())
    (file,) = body["files"]
    rows = BOXES[what]
    if isinstance(rows, list):
        rows = [[file if row[0] == "f" else row[0], *row[1:]] for row in rows]
    body["boxes"]["w"][2] = rows
    kept = {key: item for key, item in body.items() if key not in ("vescale_ckpt", "crc32")}
    (path / MANIFEST_NAME).write_bytes(signed(kept))
    with pytest.raises(CheckpointError):
        vescale_ckpt.load(path, {"w": torch.zeros(4)})


@pytest.mark.filterwarnings("ignore:passed over", "ignore:only in", "ignore:missing in")
@settings(FUZZ, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_record_of_boxes_loads_or_is_refused(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "ckpt"
    vescale_ckpt.save(path, {"w": torch.ones(4, 3), "n": torch.tensor(2)}, layout="per_rank")
    text = (path / MANIFEST_NAME).read_bytes()
    _, body = text.split(b",", 2)[1:]
    blank = HEAD + mutated(body, seed)
    manifest = blank.replace(b"00000000", b"%08x" % zlib.crc32(blank), 1)
    (path / MANIFEST_NAME).write_bytes(manifest)
    with suppress(CheckpointError):
        vescale_ckpt.load(path, {"w": torch.zeros(4, 3), "n": torch.tensor(0)})
    (path / MANIFEST_NAME).write_bytes(text)
