"""A damaged checkpoint is refused with file and tensor named."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError
from vescale_ckpt._format.manifest import FORMAT_VERSION, MANIFEST_NAME, parse_manifest

STATE: dict[str, Any] = {
    "model": {
        "big": torch.arange(700_000.0),
        "small": torch.arange(5),
        "flag": torch.tensor(True),
    },
    "optimizer": {"m": torch.arange(3.0)},
    "values": {"lr": 0.1, "names": ["a", (1, 2)]},
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "ckpt"
    vescale_ckpt.save(path, STATE)
    return path


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "ckpt"))


def targets() -> dict[str, Any]:
    tensors = {key: torch.zeros_like(tensor) for key, tensor in STATE["model"].items()}
    return {"model": tensors, "optimizer": {"m": torch.zeros(3)}, "values": None}


def refused(checkpoint: Path) -> str:
    """Load both ways and return the message; nothing changes if all is verified first."""
    with pytest.raises(CheckpointError) as caught:
        vescale_ckpt.load(checkpoint, targets())
    state = targets()
    with pytest.raises(type(caught.value), match=re.escape(str(caught.value))):
        vescale_ckpt.load(checkpoint, state, verify_first=True)
    for tensor in [*state["model"].values(), state["optimizer"]["m"]]:
        assert not tensor.any()
    return str(caught.value)


def flip(file: Path, position: int, bit: int = 0) -> None:
    with open(file, "r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ (1 << bit)]))


POSITIONS: dict[str, Callable[[int], int]] = {
    "length of the header": lambda nbytes: 3,
    "start of the header": lambda nbytes: 8,
    "middle of the header": lambda nbytes: 60,
    "padding of the header": lambda nbytes: 4000,
    "first element": lambda nbytes: 4096,
    "end of a block": lambda nbytes: (1 << 20) - 1,
    "start of a block": lambda nbytes: 1 << 20,
    "last byte": lambda nbytes: nbytes - 1,
}


@pytest.mark.parametrize("where", POSITIONS)
def test_a_flipped_bit_of_a_tensor_file_is_found(checkpoint: Path, where: str) -> None:
    file = checkpoint / "model.safetensors"
    position = POSITIONS[where](file.stat().st_size)
    for bit in (0, 7):
        flip(file, position, bit)
        message = refused(checkpoint)
        assert str(file) in message
        assert "checksum" in message
        flip(file, position, bit)
    vescale_ckpt.load(checkpoint, targets())


def test_the_message_names_the_tensor_that_is_damaged(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    flip(file, 2 << 20)
    message = refused(checkpoint)
    assert "'model.big'" in message
    assert "'model.small'" not in message


def test_every_flipped_bit_of_the_commit_record_is_found(checkpoint: Path) -> None:
    file = checkpoint / MANIFEST_NAME
    text = file.read_bytes()
    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptCheckpointError, match=MANIFEST_NAME):
            parse_manifest(bytes(changed), MANIFEST_NAME)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("lost", [1, 5, 2000])
def test_a_truncated_file_is_refused(checkpoint: Path, name: str, lost: int) -> None:
    file = checkpoint / name
    nbytes = file.stat().st_size
    os.truncate(file, nbytes - lost)
    message = refused(checkpoint)
    assert name in message
    assert str(nbytes) in message


def test_a_file_with_more_at_its_end_is_refused(checkpoint: Path) -> None:
    with open(checkpoint / "optimizer.safetensors", "ab") as stream:
        stream.write(b"\0")
    assert "optimizer.safetensors" in refused(checkpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_missing_file_is_refused_with_its_tensors(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    message = refused(checkpoint)
    assert name in message
    assert f"'{name.split('.')[0]}." in message


def test_a_checkpoint_without_its_commit_record_is_refused(checkpoint: Path) -> None:
    (checkpoint / MANIFEST_NAME).unlink()
    assert "did not finish" in refused(checkpoint)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nowhere"):
        vescale_ckpt.load(tmp_path / "nowhere", {})


def test_a_file_swapped_with_one_of_another_checkpoint_is_refused(checkpoint: Path) -> None:
    other = checkpoint.parent / "other"
    changed = {**STATE, "optimizer": {"m": torch.arange(3.0) + 1}}
    vescale_ckpt.save(other, changed)
    shutil.copy(other / "optimizer.safetensors", checkpoint / "optimizer.safetensors")
    message = refused(checkpoint)
    assert "optimizer.safetensors" in message
    assert "'optimizer.m'" in message


def test_a_link_in_place_of_a_file_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.rename(checkpoint.parent / "elsewhere")
    file.symlink_to(checkpoint.parent / "elsewhere")
    assert "model.safetensors" in refused(checkpoint)


def test_files_that_are_no_part_of_the_checkpoint_do_not_disturb(checkpoint: Path) -> None:
    (checkpoint / "model-00002-of-00004.safetensors").write_bytes(b"stale")
    vescale_ckpt.load(checkpoint, targets())


HEAD = b'{"vescale_ckpt":%d,"crc32":"00000000",' % FORMAT_VERSION


def rewritten(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it a checksum that matches."""
    file = checkpoint / MANIFEST_NAME
    body = json.loads(file.read_bytes())
    change(body)
    version = body.pop("vescale_ckpt")
    body.pop("crc32")
    text = json.dumps(body).encode()
    blank = b'{"vescale_ckpt":%d,"crc32":"00000000",' % version + text[1:]
    file.write_bytes(blank.replace(b"00000000", b"%08x" % zlib.crc32(blank), 1))


def test_a_newer_format_is_refused(checkpoint: Path) -> None:
    rewritten(checkpoint, lambda body: body.update(vescale_ckpt=FORMAT_VERSION + 1))
    assert "upgrade" in refused(checkpoint)


def test_a_format_of_before_the_first_release_is_refused(checkpoint: Path) -> None:
    rewritten(checkpoint, lambda body: body.update(vescale_ckpt=1))
    assert "no release" in refused(checkpoint)


def _rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop("optimizer.safetensors")

    return change


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


def _set_small(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change what the manifest says about model.small: [dtype, shape, first byte, [name]]."""
    return _set("files", "model.safetensors", "tensors", 0, *path, value=value)


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "path traversal": _rename_file("../../etc/passwd"),
    "absolute path": _rename_file("/etc/passwd"),
    "hidden file": _rename_file(".ssh"),
    "nul in a name": _rename_file("a\0b"),
    "the manifest itself": _rename_file(MANIFEST_NAME),
    "offset into the header": _set_small(2, value=8),
    "offset of zero": _set_small(2, value=0),
    "offset that leaves a hole": _set_small(2, value=8192),
    "huge offset": _set_small(2, value=1 << 80),
    "negative offset": _set_small(2, value=-8),
    "offset behind the end": _set_small(2, value=2_804_130),
    "boolean offset": _set_small(2, value=True),
    "huge shape": _set_small(1, value=[1 << 61, 1 << 61]),
    "negative shape": _set_small(1, value=[-5, -1]),
    "float shape": _set_small(1, value=[5.0]),
    "endless shape": _set_small(1, value=[1] * 100_000),
    "unknown dtype": _set_small(0, value="I65"),
    "dtype that is no text": _set_small(0, value=[]),
    "names that are no list": _set_small(3, value="small"),
    "name that is no text": _set_small(3, value=["small", 5]),
    "more tensors than bytes": _set_small(3, value=[f"small{i}" for i in range(80_000)]),
    "tensors over one another": _set_small(3, value=["small", "other"]),
    "one key twice": _set_small(3, value=["big"]),
    "too few fields": _set("files", "model.safetensors", "tensors", value=[["F32", [3], 4096]]),
    "tensors that are no list": _set("files", "model.safetensors", "tensors", value=5),
    "prefix that is no text": _set("files", "model.safetensors", "prefix", value=5),
    "keys of another file": _set("files", "optimizer.safetensors", "prefix", value="model."),
    "file that is no object": _set("files", "model.safetensors", value=[]),
    "huge file": _set("files", "model.safetensors", "nbytes", value=1 << 60),
    "zero block": _set("block_nbytes", value=0),
    "block that cuts elements": _set("block_nbytes", value=(1 << 20) + 1),
    "offset within an element": _set_small(2, value=4097),
    "huge block": _set("block_nbytes", value=1 << 40),
    "no checksums": _set("files", "model.safetensors", "crc32", value=""),
    "odd checksums": _set("files", "optimizer.safetensors", "crc32", value="zzzzzzzz"),
    "spaced checksums": _set("files", "optimizer.safetensors", "crc32", value="ab cd ef"),
    "dangling reference": _set("state", "optimizer", value="$nothing"),
    "dangling alias": _set("aliases", "x", value="nothing"),
    "alias of an alias": _set("aliases", value={"x": "y", "y": "x"}),
    "dangling place": _set("state", "optimizer", value={"m": "$", "n": "$"}),
    "text that is no text": _set("state", "values", value={"$str": 5}),
    "two tags": _set("state", "optimizer", value={"$tuple": [], "$dict": []}),
    "unknown tag": _set("state", "values", value={"$pickle": "cos"}),
    "malformed dict": _set("state", "values", value={"$dict": 5}),
    "dict with odd keys": _set("state", "values", value={"$dict": [[[], 1]]}),
    "malformed float": _set("state", "values", value={"$float": "nano"}),
    "state that is a list": _set("state", value=[]),
    "files that are a list": _set("files", value=[]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_record_is_refused(checkpoint: Path, what: str) -> None:
    rewritten(checkpoint, HOSTILE[what])
    refused(checkpoint)


def test_a_record_with_two_members_of_one_name_is_refused(checkpoint: Path) -> None:
    file = checkpoint / MANIFEST_NAME
    text = file.read_bytes()
    body = text.split(b",", 2)[2].replace(b'"state":{', b'"state":{},"state":{', 1)
    blank = HEAD + body
    file.write_bytes(blank.replace(b"00000000", b"%08x" % zlib.crc32(blank), 1))
    assert "2 members called 'state'" in refused(checkpoint)


def test_a_tensor_within_a_longer_header_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[:8] = struct.pack("<Q", 3 * 4096 - 8)
    file.write_bytes(content)
    assert "do not match their checksum" in refused(checkpoint)
    sums = [zlib.crc32(content[at : at + (1 << 20)]) for at in range(0, len(content), 1 << 20)]
    digits = "".join(f"{checksum:08x}" for checksum in sums)
    rewritten(checkpoint, _set("files", "model.safetensors", "crc32", value=digits))
    message = refused(checkpoint)
    assert "model.safetensors: tensor" in message
    assert "within the header, which ends at byte 12288" in message


def test_a_record_of_endless_depth_is_refused(checkpoint: Path) -> None:
    text = HEAD + b'"state":' + b"[" * 200_000
    (checkpoint / MANIFEST_NAME).write_bytes(
        text.replace(b"00000000", b"%08x" % zlib.crc32(text), 1)
    )
    assert "makes no sense" in refused(checkpoint)


def _mutated(text: bytes, seed: int) -> bytes:
    """Replace numbers and strings of a manifest at random, keeping it valid JSON mostly."""
    chooser = random.Random(seed)
    tokens = re.split(rb'("[^"]*"|-?\d+)', text)
    for _ in range(chooser.randint(1, 4)):
        index = chooser.randrange(1, len(tokens), 2)
        other = tokens[chooser.randrange(1, len(tokens), 2)]
        tokens[index] = chooser.choice(
            [other, b"-1", b"0", b"1e400", b"9" * 30, b"null", b"true", b"[]", b"{}", b'""']
        )
    return b"".join(tokens)


def _load_mutated(checkpoint: Path, seed: int) -> None:
    file = checkpoint / MANIFEST_NAME
    text = file.read_bytes()
    _, body = text.split(b",", 2)[1:]
    mutated = HEAD + _mutated(body, seed)
    file.write_bytes(mutated.replace(b"00000000", b"%08x" % zlib.crc32(mutated), 1))
    state = targets()
    verify_first = seed % 2 == 0
    try:
        vescale_ckpt.load(checkpoint, state, verify_first=verify_first)
    except CheckpointError:
        assert not verify_first or not state["model"]["big"].any()
    finally:
        file.write_bytes(text)


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)


@settings(FUZZ, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_record_loads_or_is_refused(checkpoint: Path, seed: int) -> None:
    _load_mutated(checkpoint, seed)


@pytest.mark.nightly
@settings(FUZZ, max_examples=5000)
@given(seed=st.integers(0, 2**32))
def test_many_mutated_records_load_or_are_refused(checkpoint: Path, seed: int) -> None:
    _load_mutated(checkpoint, seed)


@settings(FUZZ, max_examples=100)
@given(content=st.binary(max_size=300))
def test_random_bytes_are_no_commit_record(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_manifest(content, "file")


@settings(FUZZ, max_examples=30)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(checkpoint: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["model.safetensors", "optimizer.safetensors"]))
    file = checkpoint / name
    position = data.draw(st.integers(0, file.stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    flip(file, position, bit)
    assert name in refused(checkpoint)
    flip(file, position, bit)


def test_the_header_length_of_each_file_is_what_safetensors_expects(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        content = file.read_bytes()
        (nbytes,) = struct.unpack("<Q", content[:8])
        assert (nbytes + 8) % 4096 == 0
        json.loads(content[8 : 8 + nbytes])


def test_a_record_of_absurd_length_is_refused_without_reading_it(checkpoint: Path) -> None:
    os.truncate(checkpoint / MANIFEST_NAME, 1 << 40)
    assert "too long" in refused(checkpoint)
