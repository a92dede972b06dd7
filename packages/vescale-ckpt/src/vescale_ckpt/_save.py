"""Save: agree, lay out, write, commit."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._agree import Agreed, agree
from ._boxes import Part, part_of
from ._commit import Staging, check_replaceable, staging_directory
from ._crc import combine
from ._files import MAX_FILE_NBYTES, FilePlan, plan_files
from ._group import Ranks, Step, current_ranks
from ._record import RECORD_NAME, Record, StoredFile, dump_record
from ._slabs import needs_slabs
from ._tree import Encoded, encode
from ._write import Work, Written, create_files, write_files
from .exceptions import CheckpointError

_BLOCK_NBYTES = 1 << 20


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write ``state`` to the directory ``path``, replacing the checkpoint that is there.

    Every rank of the default process group must call this, with the same keys and values and
    a path that all ranks see; without a process group it works for one process. Each rank
    writes the shards that it holds. Until the last rank has written its last byte the old
    checkpoint stays what it is; a crash leaves the old one or the new one, never a mix.

    Args:
        path: The checkpoint's directory. Files in it that are no part of the checkpoint, a
            ``config.json`` for example, stay.
        state: Nested dicts and lists of tensors, DTensors, JSON-able Python values, and
            objects with ``state_dict()`` and ``load_state_dict()``. Each top-level key gets
            safetensors files of its own.

    Raises:
        MismatchError: If ranks disagree about a key, a shape, a dtype or a value.
        CheckpointError: If something in ``state`` cannot be stored, or writing failed on any
            rank. Nothing was committed then.

    Example:
        >>> import tempfile, torch
        >>> from vescale_ckpt import load
        >>> model = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(f"{directory}/step-1", {"model": model, "step": 1})
        ...     load(f"{directory}/step-1", {"model": model, "step": 0})["step"]
        1
    """
    ranks = current_ranks()
    write_checkpoint(path, lambda: snapshot(state, ranks), ranks)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state as it is to be saved.

    Attributes:
        encoded: Its Python values, and which tensors it has.
        parts: This rank's part of each tensor.
    """

    encoded: Encoded
    parts: dict[str, Part]


def snapshot(state: Mapping[str, Any], ranks: Ranks) -> Snapshot:
    """Return ``state`` as it is to be saved; the tensors' memory is not copied.

    Raises:
        CheckpointError: If something in it cannot be stored.
    """
    encoded = encode(state)
    parts = {key: part_of(key, tensor, ranks.rank) for key, tensor in encoded.tensors.items()}
    return Snapshot(encoded, parts)


def write_checkpoint(
    path: str | os.PathLike[str],
    take: Callable[[], Snapshot],
    ranks: Ranks,
    *,
    max_file_nbytes: int = MAX_FILE_NBYTES,
) -> None:
    """Write and commit what ``take`` returns. Every rank of ``ranks`` must call this."""
    target = Path(os.path.abspath(path))
    with Step(ranks) as step:
        check_replaceable(target)
        taken = take()
        step.message = uuid.uuid4().hex
    token: str = step.messages[0]
    agreed = agree(taken.encoded, taken.parts, ranks)
    plan = plan_files(agreed.table, max_file_nbytes)
    staging: Staging | None = None
    try:
        with Step(ranks):
            if ranks.rank == 0:
                staging = Staging(target, token)
                create_files(staging.directory, plan)
        work = _divide(agreed, taken.parts, plan)
        written = _write_all(staging_directory(target, token), plan, work, ranks)
        with Step(ranks):
            if staging is not None:
                _commit(staging, plan, agreed, written)
    finally:
        if staging is not None:
            staging.close()


def _divide(agreed: Agreed, parts: Mapping[str, Part], plan: FilePlan) -> Work:
    exchanged = {
        entry.key: parts[entry.key]
        for entry in agreed.table
        if agreed.same_layout and needs_slabs(parts[entry.key], plan.tensors[entry.key].itemsize)
    }
    own = {key: parts[key] for key in agreed.owned if key not in exchanged}
    shared = {key: parts[key] for key in agreed.shared}
    return Work(own=own, shared=shared, exchanged=exchanged)


def _write_all(
    directory: Path, plan: FilePlan, work: Work, ranks: Ranks
) -> list[dict[str, Written]]:
    with Step(ranks):
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory}, made by rank 0, is not visible here; save to a path on a file "
                f"system that all ranks share"
            )
    with Step(ranks) as step:
        written = write_files(directory, plan, work, ranks=ranks, block_nbytes=_BLOCK_NBYTES)
        step.message = {
            name: [part.nbytes, list(part.blocks), list(part.blocks.values())]
            for name, part in written.items()
        }
    return [
        {
            name: Written(nbytes=nbytes, blocks=dict(zip(blocks, words, strict=True)))
            for name, (nbytes, blocks, words) in message.items()
        }
        for message in step.messages
    ]


def _commit(
    staging: Staging, plan: FilePlan, agreed: Agreed, parts: Sequence[Mapping[str, Written]]
) -> None:
    files: dict[str, StoredFile] = {}
    for name, file in plan.files.items():
        written = [part[name] for part in parts if name in part]
        total = sum(part.nbytes for part in written)
        if total != file.nbytes:
            raise CheckpointError(
                f"the ranks wrote {total} bytes of file {name!r}, which has {file.nbytes}: their "
                f"shards do not make up the tensors exactly once; nothing was committed"
            )
        checksums = combine(file.nbytes, _BLOCK_NBYTES, [part.blocks for part in written])
        files[name] = StoredFile(nbytes=file.nbytes, checksums=tuple(checksums))
    record = Record(
        block_nbytes=_BLOCK_NBYTES,
        files=files,
        tensors=plan.tensors,
        aliases=agreed.aliases,
        tree=agreed.tree,
    )
    with open(staging.directory / RECORD_NAME, "xb") as stream:
        stream.write(dump_record(record))
        stream.flush()
        os.fsync(stream.fileno())
    staging.publish()
