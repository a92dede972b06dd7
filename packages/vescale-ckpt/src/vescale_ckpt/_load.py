"""Load: match, check, fill, hand over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ._commit import interrupted
from ._group import Ranks, Step, current_ranks
from ._match import match
from ._read import Piece, Reader, blocks_of, merged, share
from ._record import RECORD_NAME
from ._threads import in_threads
from .exceptions import CheckpointError, CorruptCheckpointError

_MAX_ATTEMPTS = 5


def load(
    path: str | os.PathLike[str], state: Mapping[str, Any], *, strict: bool = True
) -> dict[str, Any]:
    """Read the checkpoint in the directory ``path`` into ``state``.

    Every rank of the default process group must call this. Tensors and DTensors are filled in
    place, each rank reading the bytes of its own shards, however the checkpoint was sharded when
    it was saved. Every block that any rank needs is checked before the first tensor changes, and
    a checkpoint that a save replaces meanwhile is read to its end.

    Args:
        path: The checkpoint's directory.
        state: What to fill, with the keys of the saved state. A top-level key of the checkpoint
            that ``state`` leaves out, an optimizer for example, is not read. Objects with
            ``state_dict()`` get their state through ``load_state_dict()``; an object that
            implements :class:`StateTemplate` is asked for the tensors to fill.
        strict: Whether other keys that only the checkpoint or only ``state`` has are an error.

    Returns:
        A dict like ``state``: the same tensors and objects, and the stored Python values.

    Raises:
        CorruptCheckpointError: If anything in the checkpoint is damaged or missing.
        MismatchError: If keys, shapes or dtypes differ from those of the checkpoint.
        CheckpointError: If there is no checkpoint, it is of a newer format, or a rank failed.
    """
    ranks = current_ranks()
    with _open_same(Path(os.path.abspath(path)), ranks) as reader, torch.no_grad():
        with Step(ranks):
            try:
                matched = match(state, reader.record, ranks.rank, strict=strict)
            except CheckpointError as error:
                raise type(error)(f"cannot load {reader.path}:\n{error}") from error
            pieces = reader.pieces(matched.targets)
            check_targets(pieces)
        _check_blocks(reader, pieces, ranks)
        with Step(ranks):
            in_threads(reader.fill, pieces)
        with Step(ranks):
            for given, filled in matched.stateful:
                given.load_state_dict(filled)
        return matched.result


def _open_same(path: Path, ranks: Ranks) -> Reader:
    """Open the checkpoint on every rank, the same one even if a save is replacing it."""
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        reader: Reader | None = None
        try:
            with Step(ranks) as step:
                try:
                    reader = _open(path)
                    step.message = reader.digest
                except (CheckpointError, OSError):
                    # Perhaps the directory was replaced under our hands: look once more.
                    if attempt > 1:
                        raise
        except BaseException:
            _close(reader)
            raise
        if reader is not None and len(set(step.messages)) == 1:
            return reader
        _close(reader)
    raise CheckpointError(f"{path} is not the same on all ranks; is a job saving to it?")


def _close(reader: Reader | None) -> None:
    if reader is not None:
        reader.close()


def _open(path: Path) -> Reader:
    where = path if path.exists() else interrupted(path) or path
    if not where.exists():
        raise CheckpointError(f"there is no checkpoint at {path}: no such directory")
    if not (where / RECORD_NAME).is_file():
        raise CorruptCheckpointError(
            f"there is no checkpoint at {path}: {RECORD_NAME}, the file written last, is missing; "
            f"the save did not finish, or this is another kind of directory"
        )
    return Reader(where)


def check_targets(pieces: list[Piece]) -> None:
    """Refuse to read two stored tensors into the same memory."""
    keys: dict[tuple[int, torch.Size], Piece] = {}
    for piece in pieces:
        first = keys.setdefault((piece.target.data_ptr(), piece.target.shape), piece)
        if first.stored != piece.stored and first.target.device == piece.target.device:
            raise CheckpointError(
                f"{first.key!r} and {piece.key!r} share their memory in the given state, but are "
                f"two tensors in the checkpoint; untie them or load only one of them"
            )


def _check_blocks(reader: Reader, pieces: list[Piece], ranks: Ranks) -> None:
    """Check every block that any rank needs, each on one rank."""
    with Step(ranks) as step:
        step.message = blocks_of(pieces, reader.record.block_nbytes)
    needed: dict[str, list[tuple[int, int]]] = {
        file: merged(
            (start, stop) for message in step.messages for start, stop in message.get(file, [])
        )
        for file in reader.record.files
    }
    with Step(ranks):
        own = share(needed, reader.record.block_nbytes, ranks.rank, ranks.size)
        in_threads(reader.check_blocks, own)
