"""Real text that every Python installation has: the sources of its standard library."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

# One token a byte, and one at either end of a file.
BEGIN, END = 256, 257
VOCABULARY = 258

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_VALIDATION_PART = 20  # one file of so many


class Windows(Dataset[dict[str, Tensor]]):
    """Consecutive pieces of a text, as a HuggingFace causal language model takes them.

    Args:
        tokens_T: The text.
        length: Tokens in a piece; what is left at the end is dropped.
    """

    def __init__(self, tokens_T: Tensor, length: int) -> None:
        self._windows_NL = tokens_T[: len(tokens_T) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._windows_NL)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids_L = self._windows_NL[index].long()
        # The model shifts the labels itself.
        return {"input_ids": ids_L, "labels": ids_L}


@dataclass(frozen=True, kw_only=True)
class Text:
    """The text in two parts that share no file.

    Attributes:
        length: Tokens in a sample.
        train: What to train on.
        validation: What to validate on.
    """

    length: int
    train: Windows
    validation: Windows

    def example_batch(self) -> dict[str, Tensor]:
        """Return one row, which shows what a batch looks like."""
        return default_collate([self.train[0]])

    def validation_batch(self, rows: int) -> dict[str, Tensor]:
        """Return samples spread evenly over the held-out files."""
        every = max(1, len(self.validation) // rows)
        return default_collate(
            [self.validation[i * every % len(self.validation)] for i in range(rows)]
        )


def gather_text(length: int) -> Text:
    """Read the standard library, the same on every rank of a machine.

    Args:
        length: Tokens in a sample.

    Raises:
        FileNotFoundError: If this Python has no sources.
    """
    train: list[Tensor] = []
    validation: list[Tensor] = []
    for name, source in _sources():
        held_out = zlib.crc32(name.encode()) % _VALIDATION_PART == 0
        (validation if held_out else train).append(_tokens(source))
    return Text(
        length=length,
        train=Windows(torch.cat(train), length),
        validation=Windows(torch.cat(validation), length),
    )


def _sources() -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every module that has any, ordered by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [name for name in names if not _SKIPPED & set(name.split("/"))]
    if len(kept) < _VALIDATION_PART:
        raise FileNotFoundError(
            f"expected the sources of the standard library in {root}, got {len(kept)} .py files; "
            "use a Python that was installed with them"
        )
    for name in kept:
        if source := (root / name).read_bytes():
            yield name, source


def _tokens(source: bytes) -> Tensor:
    # int16 holds every token in two bytes; a window becomes int64 when it is used.
    tokens_T = torch.empty(len(source) + 2, dtype=torch.int16)
    tokens_T[0], tokens_T[-1] = BEGIN, END
    tokens_T[1:-1] = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    return tokens_T
