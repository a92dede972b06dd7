"""Per-rank values: those that every rank has its own of."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from vescale_ckpt._comm.control_group import AllOrNone, ControlGroup
from vescale_ckpt._io.tensor_bytes import packed_chunks
from vescale_ckpt._state.local_shards import LocalShard


def collect(
    nodes: Mapping[str, list[Any]],
    tensors: Mapping[str, list[str]],
    shards: Mapping[str, LocalShard],
    ranks: ControlGroup,
) -> None:
    """Exchange the values of all ranks. Every rank must call this.

    ``nodes`` has, for each key, a list with this rank's value as tagged JSON. It gets the values
    of all ranks, or stays as it is if all have the same. ``tensors`` has the keys of the tensors
    in a value.
    """
    if not nodes:
        return
    with AllOrNone(ranks) as step:
        step.message = {
            key: [node[0], [_digest(shards[name]) for name in tensors[key]]]
            for key, node in nodes.items()
        }
    for key, node in nodes.items():
        values = [message[key] for message in step.messages]
        if any(value != values[0] for value in values):
            node[:] = [value[0] for value in values]


def _digest(shard: LocalShard) -> str:
    digest = sha256()
    for chunk in packed_chunks(shard.local):
        digest.update(chunk)
    return digest.hexdigest()
