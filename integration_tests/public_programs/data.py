"""The small data that scripts are given, made of nothing."""

from __future__ import annotations

import gzip
import json
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


def images(directory: Path) -> None:
    """Write a torchvision of random images, in place of the one that downloads."""
    package = directory / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "transforms.py").write_text(
        "Compose = ToTensor = Normalize = lambda *args: None\n", encoding="utf-8"
    )
    (package / "datasets.py").write_text(
        "import torch\n"
        "def CIFAR100(**kwargs):\n"
        "    made = torch.Generator().manual_seed(0)\n"
        "    return [(torch.randn(3, 32, 32, generator=made), i % 100) for i in range(96)]\n",
        encoding="utf-8",
    )


def packed_documents(directory: Path) -> None:
    """Write nanochat's loaders over random tokens, in place of those that read parquet files."""
    (directory / "tiny_documents.py").write_text(
        "import torch\n"
        "def with_state(tokenizer, rows, length, **kwargs):\n"
        "    made = torch.Generator().manual_seed(0)\n"
        "    while True:\n"
        "        tokens = torch.randint(64, (rows, length + 1), generator=made)\n"
        "        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()\n"
        "        yield x, y, {'epoch': 0, 'pq_idx': 0, 'rg_idx': 0}\n"
        "def without_state(*args, **kwargs):\n"
        "    return ((x, y) for x, y, _ in with_state(*args, **kwargs))\n",
        encoding="utf-8",
    )


def sentences(directory: Path) -> None:
    """Write loaders of sentences of unequal lengths, in place of those that download."""
    (directory / "tiny_sentences.py").write_text(
        "import torch\n"
        "from torch.nn.utils.rnn import pad_sequence\n"
        "from torch.utils.data import DataLoader\n"
        "def pad(samples):\n"
        "    tokens = pad_sequence(samples, batch_first=True)\n"
        "    labels = pad_sequence(samples, batch_first=True, padding_value=-100)\n"
        "    return {'input_ids': tokens[:, :-1], 'labels': labels[:, 1:]}\n"
        "def get_dataloaders(accelerator, batch_size):\n"
        "    made = torch.Generator().manual_seed(0)\n"
        "    data = [torch.randint(1, 64, (5 + i % 7,), generator=made) for i in range(48)]\n"
        "    loader = DataLoader(data, batch_size=batch_size, collate_fn=pad)\n"
        "    return loader, loader\n",
        encoding="utf-8",
    )


def token_modules(directory: Path) -> None:
    """Write a data module of litgpt over random tokens."""
    (directory / "tiny_tokens.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "from litgpt.data import DataModule\n"
        "class Tokens(DataModule):\n"
        "    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):\n"
        "        self.rows, self.length = batch_size, max_seq_length + 1\n"
        "    def train_dataloader(self):\n"
        "        made = torch.Generator().manual_seed(0)\n"
        "        tokens = torch.randint(64, (48, self.length), generator=made)\n"
        "        return DataLoader([*tokens], batch_size=self.rows, shuffle=True)\n"
        "    val_dataloader = train_dataloader\n",
        encoding="utf-8",
    )


def tiny_llama(directory: Path) -> None:
    """Write fifty words, a tokenizer of them and the configuration of a small Llama."""
    draw = random.Random(0)
    vocabulary = {f"w{index}": index for index in range(63)} | {"[UNK]": 63}
    lines = (" ".join(draw.choices([*vocabulary][:50], k=40)) for _ in range(60))
    (directory / "words.txt").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    llama = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "vocab_size": 64,
    }
    files = {"tokenizer": tokenizer, "tokenizer_config": names, "config": llama}
    for name, content in files.items():
        path = directory / "tiny" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")


def pictures(directory: Path) -> None:
    """Write folders of pictures of noise, one a class."""
    from PIL import Image  # of torchvision, which only scripts need

    made = numpy.random.default_rng(0)
    for split, count in (("train", 16), ("validation", 4)):
        for label in "abcd":
            folder = directory / "pictures" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                noise = made.integers(0, 256, (32, 32, 3)).astype(numpy.uint8)
                Image.fromarray(noise).save(folder / f"{number}.png")
