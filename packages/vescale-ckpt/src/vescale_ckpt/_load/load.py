"""Load: match, check, fill, hand over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from vescale_ckpt._comm.control_group import (
    DEFAULT_TIMEOUT,
    AllOrNone,
    ControlGroup,
    current_control_group,
)
from vescale_ckpt._comm.hosts import this_host
from vescale_ckpt._comm.options import check_same_options
from vescale_ckpt._state.arguments import check_arguments, checked
from vescale_ckpt._state.key_filter import KeyFilter, key_filter_of
from vescale_ckpt._store.open import open_checkpoint
from vescale_ckpt._store.reader import CheckpointReader
from vescale_ckpt.exceptions import CheckpointError
from vescale_dtensor import package_logger

from .fill import check, fill
from .hand_over import hand_over
from .match import EVERYTHING, match
from .read_items import read_items_of
from .shared_memory import apart, settle

_MAX_ATTEMPTS = 5
_log = package_logger("vescale.ckpt")


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    only: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    verify_first: bool = False,
    exchange: bool | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> dict[str, Any]:
    r"""Read the checkpoint in the directory ``path`` into ``state``.

    Every rank of the default process group must call this. Tensors and DTensors are filled in
    place, each rank reading the bytes of its own shards, however the checkpoint was sharded when
    it was saved. What several ranks need is read from the storage once: by way of the page cache
    if all ranks are on one host, otherwise by one rank, which sends the others their share. A
    checkpoint that a save replaces meanwhile is read to its end.

    Every block is checked as it is read. If one is damaged, every rank raises an error that names
    the file and the tensors, and what the tensors of ``state`` hold then is undefined; nothing
    has been given to objects with ``load_state_dict()`` yet. Load another checkpoint into them,
    or pass ``verify_first=True`` to have everything read twice and no tensor changed unless all is
    well.

    Args:
        path: The checkpoint's directory, or its URL, ``s3://...`` for example, if it lies where
            fsspec can read.
        state: What to fill, with the keys of the saved state. Objects with ``state_dict()`` get
            their state through ``load_state_dict()``; an object that implements
            :class:`StateTemplate` is asked for the tensors to fill.
        strict: Whether keys that only the checkpoint or only ``state`` has are an error, and
            patterns that match nothing in the checkpoint; if not, a warning lists them. A tensor
            that the checkpoint lacks but for a tied one is no error. To read a part of a
            checkpoint, the model without its optimizer for example, say so with
            ``only=["model"]``: what else there is does not matter then.
        only: What of ``state`` to fill, as regular expressions for whole dotted keys; all that
            lies below a key that matches counts, so ``["model"]`` is the whole model. The rest
            of ``state`` stays as it is, and objects of which nothing is wanted are not touched.
        rename: Regular expressions for whole dotted keys of the checkpoint's tensors and
            values, and what such a key is called in ``state`` (``\1`` stands for the first
            group). The first that matches counts.
        cast: Whether to convert tensors whose dtype in ``state`` is another than in the
            checkpoint. Floats never become integers, nor complex numbers real; an integer that
            the given dtype lacks is an error.
        verify_first: Whether to check all that is going to be read before the first tensor
            changes.
        exchange: Whether a block of the files that several ranks need is read by one of them and
            sent to the others, rather than read by each; None to do so if they are on several
            hosts, or at a URL, where no page cache serves them all.
        timeout: How long ranks wait for one another before they give up on one that hangs.

    Returns:
        A dict like ``state``: the same tensors and objects, and the stored Python values.

    Raises:
        CorruptCheckpointError: If anything in the checkpoint is damaged or missing.
        MismatchError: If keys, shapes or dtypes differ from those of the checkpoint.
        CheckpointError: If on any rank ``path`` is no path, or ``state`` no dict; there is no
            checkpoint, it is of a newer format, or a rank failed.
    """

    def chosen() -> KeyFilter:
        check_arguments("load", path, state)
        return key_filter_of(only, rename)

    begin = time.perf_counter()
    ranks = current_control_group(timeout)
    with ranks.together():
        ranks.meet()
        options = {"exchange": exchange, "verify_first": verify_first}
        reader, hosts, key_filter = _open_same(path, ranks, chosen, options)
    with ranks.together(), reader, torch.no_grad():
        with AllOrNone(ranks):
            try:
                matched = match(
                    state,
                    reader.manifest,
                    ranks.rank,
                    num_ranks=ranks.size,
                    strict=strict,
                    cast=cast,
                    key_filter=key_filter,
                )
            except CheckpointError as error:
                raise type(error)(f"cannot load {reader.path}:\n{error}") from error
            items = read_items_of(reader.manifest, matched.targets)
            own_copies = apart(items)
        matched.report(strict=strict)
        if verify_first:
            with AllOrNone(ranks), ranks.together():
                check(reader, items, ranks)
        with AllOrNone(ranks), ranks.together():
            fill(reader, items, ranks, hosts, exchange=exchange)
        with AllOrNone(ranks):
            settle(own_copies)
            hand_over(matched.stateful)
        _log.info("loaded %s in %.2f s", reader.path, time.perf_counter() - begin)
        _log.debug("read %d boxes of tensors", len(items))
        return matched.result


def _open_same(
    path: str | os.PathLike[str],
    ranks: ControlGroup,
    chosen: Callable[[], KeyFilter],
    options: Mapping[str, bool | None],
) -> tuple[CheckpointReader, list[str], KeyFilter]:
    """Open the checkpoint on every rank, the same one even if a save is replacing it.

    Returned are what reads it, the host of each rank, and what is wanted: ``chosen`` says that, or
    raises what is wrong with it.
    """
    paths: Sequence[str] = ()
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        reader: CheckpointReader | None = None
        key_filter = EVERYTHING
        try:
            with AllOrNone(ranks) as step:
                key_filter = checked(chosen)
                try:
                    reader = open_checkpoint(path)
                    step.message = reader.digest, this_host(), options, str(reader.path)
                except (CheckpointError, OSError):
                    # Perhaps the directory was replaced under our hands: look once more.
                    if attempt > 1:
                        raise
        except BaseException:
            _close(reader)
            raise
        if reader is not None and None not in step.messages:
            digests, hosts, given, paths = zip(*step.messages, strict=True)
            check_same_options(given, ranks)
            if len(set(digests)) == 1:
                return reader, list(hosts), key_filter
        _close(reader)
    given_paths = "; ".join(f"{where} on rank {rank}" for rank, where in enumerate(paths[:8]))
    remedy = (
        f"ranks were given {given_paths}: have one of them choose, and broadcast what it chose"
        if len(set(paths)) > 1
        else "is a job saving to it?"
    )
    raise ranks.common(CheckpointError(f"{path} is not the same on all ranks; {remedy}"))


def _close(reader: CheckpointReader | None) -> None:
    if reader is not None:
        reader.close()
