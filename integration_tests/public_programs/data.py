"""The small data that scripts are given, made of nothing."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path

import numpy
import torch


def tokens(count: int, vocabulary: int) -> numpy.ndarray:
    """Return random tokens, the same ones each time."""
    made = numpy.random.default_rng(0).integers(0, vocabulary, count)
    return made.astype(numpy.uint16)


def characters(directory: Path) -> None:
    """Write what nanoGPT's scripts make of a text."""
    data = directory / "data" / "characters"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        tokens(4000, 61).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 61}))


def stories(directory: Path) -> None:
    """Write two shards of pretokenized stories."""
    data = directory / "data" / "tok64"
    data.mkdir(parents=True)
    for shard in range(2):
        tokens(4000, 64).tofile(data / f"data{shard:02}.bin")


def names(directory: Path) -> None:
    """Write a list of names."""
    draw = random.Random(0)
    made = {"".join(draw.choices("abcdefgh", k=draw.randrange(2, 9))) for _ in range(400)}
    (directory / "names.txt").write_text("\n".join(sorted(made)), encoding="utf-8")


def words(directory: Path) -> None:
    """Write three texts of fifty words."""
    draw = random.Random(0)
    for split in ("train", "valid", "test"):
        text = " ".join(f"w{draw.randrange(50)}" for _ in range(2000))
        path = directory / "data" / "words" / f"{split}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")


def sines(directory: Path) -> None:
    """Write sine waves that start anywhere."""
    x = numpy.arange(40)[None] + numpy.random.default_rng(2).integers(-80, 80, 11)[:, None]
    torch.save(numpy.sin(x / 20.0), directory / "traindata.pt")


def story(directory: Path) -> None:
    """Write a short story, and a tokenizer of bytes in place of tiktoken, which downloads."""
    draw = random.Random(0)
    text = "".join(draw.choices("abcdefgh ,.", k=4000))
    (directory / "the-verdict.txt").write_text(text, encoding="utf-8")
    (directory / "tiktoken.py").write_text(
        "class Bytes:\n"
        "    def encode(self, text, **kwargs):\n"
        "        return [*text.encode()]\n"
        "    def decode(self, ids):\n"
        "        return bytes(i % 128 for i in ids).decode()\n"
        "def get_encoding(name):\n"
        "    return Bytes()\n",
        encoding="utf-8",
    )


def enwik8(directory: Path) -> None:
    """Write compressed bytes."""
    (directory / "data").mkdir(exist_ok=True)
    with gzip.open(directory / "data" / "enwik8.gz", "wb") as file:
        file.write(tokens(20000, 256).astype(numpy.uint8).tobytes())
