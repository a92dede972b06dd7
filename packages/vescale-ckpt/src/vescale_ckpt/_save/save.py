"""Save: plan, lay out, write, commit."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vescale_ckpt._comm.control_group import (
    DEFAULT_TIMEOUT,
    AllOrNone,
    ControlGroup,
    current_control_group,
)
from vescale_ckpt._comm.options import check_same_options
from vescale_ckpt._format.crc32 import PartialBlockCrcs, checksums_by_file
from vescale_ckpt._format.file_layout import FilePlan, plan_files
from vescale_ckpt._format.manifest import Manifest, StoredFile
from vescale_ckpt._format.state_encoding import Encoded, encode
from vescale_ckpt._state.arguments import check_arguments, checked
from vescale_ckpt._state.local_shards import LocalShard, local_shard_of, stacked_shard
from vescale_ckpt._store.retention import keep_newest
from vescale_ckpt._store.storage import Storage
from vescale_ckpt.exceptions import CheckpointError
from vescale_dtensor import package_logger

from .consistency import Fingerprint, SavePlan, fingerprint, plan_save, ties_of
from .destination import Destination, FileLayout, destination_of
from .per_rank import collect
from .rank_files import write_rank_files
from .replica_check import ReplicaCheck
from .shared_files import WriteAssignment, create_files, write_files
from .two_phase_write import needs_two_phase

_BLOCK_NBYTES = 1 << 20
_NOTHING = np.empty(0, np.uint32)
_log = package_logger("vescale.ckpt")


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    keep_last: int | None = None,
    layout: FileLayout | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Write ``state`` to the directory ``path``, replacing the checkpoint that is there.

    Every rank of the default process group must call this, with the same keys and values and
    a path that all ranks see; without a process group it works for one process. Each rank
    writes the shards that it holds. Until the last rank has written its last byte the old
    checkpoint stays what it is; a crash leaves the old one or the new one, never a mix.

    Args:
        path: The checkpoint's directory. Files in it that are no part of the checkpoint, a
            ``config.json`` for example, stay. Or a URL, ``s3://bucket/step-100`` for example, of
            a place that fsspec can write to.
        state: Nested dicts and lists of tensors, DTensors, JSON-able Python values, and
            objects with ``state_dict()`` and ``load_state_dict()``. Each top-level key gets
            safetensors files of its own.
        keep_last: How many of the whole checkpoints beside this one to keep, itself included,
            once it is committed: those whose names begin alike and end with the highest
            numbers. None to delete nothing. What dead writers have left goes as well, see
            :func:`remove_older`.
        layout: ``"shared"``: files of whole tensors, to which all ranks write, so that others
            can read them. ``"per_rank"``: one file for every rank, for places where ranks cannot
            share files. None for what the place allows. Both load on any number of ranks.
        timeout: How long ranks wait for one another, for the slowest writer too, before they give
            up on one that hangs.

    Raises:
        MismatchError: If ranks disagree about a key, a shape, a dtype or a value.
        CheckpointError: If on any rank ``path`` is no path, ``state`` no dict, or something in it
            cannot be stored; ``keep_last`` is less than one, or ``path`` does not end with a
            number then; a URL is to take shared files; or writing failed. Nothing was committed.

    Example:
        >>> import tempfile, torch
        >>> from vescale_ckpt import load
        >>> model = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(f"{directory}/step-1", {"model": model, "step": 1})
        ...     load(f"{directory}/step-1", {"model": model, "step": 0})["step"]
        1
    """

    def choose() -> Destination:
        check_arguments("save", path, state)
        return destination_of(path, layout=layout, keep_last=keep_last)

    ranks = current_control_group(timeout)
    write_checkpoint(choose, lambda: snapshot(state, ranks), ranks)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state as it is to be saved.

    Attributes:
        encoded: Its Python values, and which tensors it has.
        shards: This rank's shard of each tensor, in the order of their keys.
    """

    encoded: Encoded
    shards: dict[str, LocalShard]


def snapshot(state: Mapping[str, Any], ranks: ControlGroup) -> Snapshot:
    """Return ``state`` as it is to be saved; the tensors' memory is not copied.

    Raises:
        CheckpointError: If something in it cannot be stored.
    """
    with torch.no_grad():
        encoded = encode(state)
        stacked = {key for keys in encoded.per_rank_tensors.values() for key in keys}
        shards = {
            key: stacked_shard(key, tensor, ranks.rank, ranks.size)
            if key in stacked
            else local_shard_of(key, tensor, ranks.rank)
            for key, tensor in sorted(encoded.tensors.items(), key=itemgetter(0))
        }
    return Snapshot(encoded, shards)


def write_checkpoint(
    choose: Callable[[], Destination],
    take: Callable[[], Snapshot],
    ranks: ControlGroup,
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write and commit what ``take`` returns. Every rank of ``ranks`` must call this.

    ``choose`` returns where to write, or raises what is wrong with that; ``progress`` is called
    with the number of bytes of each request to write.
    """
    with ranks.together():
        ranks.meet()
        _write_checkpoint(choose, take, ranks, progress)


def _write_checkpoint(
    choose: Callable[[], Destination],
    take: Callable[[], Snapshot],
    ranks: ControlGroup,
    progress: Callable[[int], None],
) -> None:
    begin = time.perf_counter()
    with AllOrNone(ranks) as step:
        destination = checked(choose)
        destination.storage.check_replaceable()
        taken = take()
        ties = ties_of(taken.shards)
        # Files of ranks hold whole tensors, not shares of them.
        all_bytes = destination.has_rank_files
        prints = fingerprint(taken.encoded, taken.shards, ties, ranks, all_bytes=all_bytes)
        step.message = [uuid.uuid4().hex, prints, destination.options]
    check_same_options([options for _, _, options in step.messages], ranks)
    token: str = step.messages[0][0]
    by_rank = [Fingerprint(*prints) for _, prints, _ in step.messages]
    save_plan = plan_save(taken.encoded, taken.shards, ties, by_rank, ranks)
    collect(taken.encoded.per_rank, taken.encoded.per_rank_tensors, taken.shards, ranks)
    storage, staged = destination.storage, None
    directory = None if destination.has_rank_files else storage.staging_directory(token)
    plan = plan_files(save_plan.table if directory else ())
    try:
        with AllOrNone(ranks):
            if ranks.rank == 0:
                staged = storage.stage(token)
                if directory is not None:
                    create_files(directory, plan)
        if directory is None:
            manifest = write_rank_files(storage, token, save_plan, taken.shards, ranks)
        else:
            manifest = _write_shared(directory, plan, save_plan, taken.shards, ranks, progress)
        with AllOrNone(ranks):
            if staged is not None:
                staged.commit(manifest())
    finally:
        if staged is not None:
            staged.close()
    _log.info(
        "saved %d tensors of %d ranks to %s in %.2f s",
        len(taken.shards),
        ranks.size,
        storage.where,
        time.perf_counter() - begin,
    )
    if destination.keep_last is not None:
        with AllOrNone(ranks):
            if ranks.rank == 0:
                _keep_newest(storage, destination.keep_last)


def _keep_newest(storage: Storage, keep_last: int) -> None:
    try:
        keep_newest(storage, keep_last)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"{storage.where} is committed, but which older checkpoints to delete could not be "
            f"found out, and not all of them are: {error}"
        ) from error


def _write_shared(
    directory: Path,
    plan: FilePlan,
    save_plan: SavePlan,
    shards: Mapping[str, LocalShard],
    ranks: ControlGroup,
    progress: Callable[[int], None],
) -> Callable[[], Manifest]:
    """Write this rank's bytes of files of whole tensors, and return what makes the manifest."""
    assignment = divide(save_plan, shards, plan)
    words = _write_all(directory, plan, assignment, ranks, progress)
    return lambda: Manifest(
        block_nbytes=_BLOCK_NBYTES,
        files={
            name: StoredFile(nbytes=file.nbytes, checksums=tuple(words[name]))
            for name, file in plan.files.items()
        },
        tensors=plan.tensors,
        aliases=save_plan.aliases,
        tree=save_plan.tree,
    )


def divide(
    save_plan: SavePlan, shards: Mapping[str, LocalShard], plan: FilePlan
) -> WriteAssignment:
    """Return which tensors this rank writes, and how."""
    exchanged = {
        entry.key: shards[entry.key]
        for entry in save_plan.table
        if save_plan.same_layout and needs_two_phase(shards[entry.key])
    }
    own = {key: shards[key] for key in save_plan.owned if key not in exchanged}
    shared = {key: shards[key] for key in save_plan.shared}
    _log.debug("writes %d tensors alone, %d with other ranks", len(own), len(shared | exchanged))
    return WriteAssignment(own=own, shared=shared, exchanged=exchanged)


def _write_all(
    directory: Path,
    plan: FilePlan,
    assignment: WriteAssignment,
    ranks: ControlGroup,
    progress: Callable[[int], None],
) -> dict[str, list[int]]:
    """Write this rank's bytes and return the checksums of all files' blocks."""
    with AllOrNone(ranks) as step, ranks.together():
        sums = {
            name: PartialBlockCrcs(file.nbytes, _BLOCK_NBYTES, progress)
            for name, file in plan.files.items()
        }
        replicas = ReplicaCheck(plan, _BLOCK_NBYTES, progress)
        write_files(directory, plan, assignment, sums, replicas, ranks)
        step.message = [
            own.written_nbytes + replicas.written[name].written_nbytes
            for name, own in sums.items()
        ]
    for (name, file), counts in zip(
        plan.files.items(), zip(*step.messages, strict=True), strict=True
    ):
        if sum(counts) != file.nbytes:
            text = (
                f"the ranks wrote {sum(counts)} bytes of file {name!r}, which has {file.nbytes}: "
                f"their shards do not make up the tensors exactly once; nothing was committed"
            )
            raise ranks.common(CheckpointError(text))
    # Registers of all ranks combine by XOR; see [Note: partial checksums].
    written = [own.folded() ^ replicas.written[name].folded() for name, own in sums.items()]
    compared = [replicas.registers()] if assignment.shared and ranks.size > 1 else []
    registers = np.concatenate([_NOTHING, *written, *compared])
    ranks.reduce(registers.view(np.int32), dist.ReduceOp.BXOR)
    registers, differing = np.split(registers, [sum(map(len, written))])
    if differing.any():
        raise ranks.common(replicas.difference(differing, assignment.shared, ranks))
    return checksums_by_file(sums, registers)
