"""Consistency of a save: ranks compare one digest each, details only if they differ.

[Note: buckets]
To name what differs nobody sends all that it knows: a thousand ranks with 100,000 tensors would
receive gigabytes. Facts are put into buckets by the hash of their key. One reduction of a hash
of each bucket tells which buckets differ, and the ranks gather the facts of a few of those.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from vescale_ckpt._comm.control_group import AllOrNone, ControlGroup, name_ranks
from vescale_ckpt._format.crc32 import crc32
from vescale_ckpt._format.file_layout import TensorInfo, nbytes_of
from vescale_ckpt._format.state_encoding import Encoded
from vescale_ckpt._format.state_tree import Json, below
from vescale_ckpt._io.tensor_bytes import packed_chunks
from vescale_ckpt._state.local_shards import LocalShard
from vescale_ckpt.exceptions import MismatchError

_MAX_DIFFERENCES = 5
_MAX_FACT_LENGTH = 80
_NUM_BUCKETS = 1 << 12
_MAX_BUCKETS = 16
# Smaller tensors are not worth a request to the disk from every rank.
_MIN_SHARED_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What all ranks have found to be the same, and what this rank has to write of it.

    Attributes:
        tree: The state as tagged JSON, as rank 0 has it.
        table: The tensors to store.
        aliases: Keys stored under another key.
        owned: Keys of the tensors of whose boxes this rank writes its own.
        shared: Keys of the tensors that every rank holds all of, and writes a share of.
        same_layout: Whether meshes and placements are the same on all ranks, too.
    """

    tree: dict[str, Json]
    table: tuple[TensorInfo, ...]
    aliases: dict[str, str]
    owned: tuple[str, ...]
    shared: tuple[str, ...]
    same_layout: bool


class Fingerprint(NamedTuple):
    """Short texts about what a rank is about to save.

    Attributes:
        facts: Differs if a key, shape, dtype or value does, or the bytes of a copy.
        layouts: Differs if a mesh or placement does.
        ties: Differs if other tensors share their memory.
        has_all_bytes: Whether ``facts`` is about the bytes of large copies, too.
    """

    facts: str
    layouts: str
    ties: str
    has_all_bytes: bool = False


def fingerprint(
    encoded: Encoded,
    shards: Mapping[str, LocalShard],
    ties: Mapping[str, str],
    ranks: ControlGroup,
    *,
    all_bytes: bool = False,
) -> Fingerprint:
    """Return what ranks have to compare: plain tensors count as one value that all have.

    ``all_bytes`` has the bytes of large ones compared here, too.

    So their bytes are compared, too, and so are those of DTensors that are replicated to all
    ranks; those of large ones while they are written, see [Note: copies], if nothing else is said.
    """
    facts = _facts(encoded, shards, ranks, all_bytes=all_bytes)
    return Fingerprint(
        _digest([*facts, *facts.values()]),
        _digest(shard.layout.text for shard in shards.values()),
        _digest(map(repr, ties.items())),
        all_bytes,
    )


def plan_save(
    encoded: Encoded,
    shards: Mapping[str, LocalShard],
    ties: Mapping[str, str],
    by_rank: Sequence[Fingerprint],
    ranks: ControlGroup,
) -> SavePlan:
    """Check that every rank saves the same tensors and values. Every rank must call this.

    Raises:
        MismatchError: On every rank, naming keys and ranks.
    """
    all_bytes = any(prints.has_all_bytes for prints in by_rank)
    if len({prints.facts for prints in by_rank}) > 1:
        _raise_difference(_facts(encoded, shards, ranks, all_bytes=all_bytes), ranks)
    same_layout = len({prints.layouts for prints in by_rank}) == 1
    # Shapes are the same on all ranks by now, so this is the same decision on all.
    is_any_large = any(nbytes_of(p.dtype, p.shape) >= _MIN_SHARED_NBYTES for p in shards.values())
    if not same_layout and not all_bytes and is_any_large:
        _compare_all_bytes(encoded, shards, ranks)
    same_ties = len({prints.ties for prints in by_rank}) == 1
    aliases = dict(ties) if same_ties else _common_ties(shards, ties, ranks)
    elsewhere = frozenset[str]() if same_layout else _elsewhere(shards, ranks)
    table: list[TensorInfo] = []
    shared: list[str] = []
    owned: list[str] = []
    for key, shard in shards.items():
        if key in aliases:
            continue
        group = encoded.groups[key]
        entry = TensorInfo(key, group, below(key, group), shard.dtype, shard.shape)
        table.append(entry)
        if same_layout and _is_shared(shard, ranks):
            shared.append(key)
        elif shard.layout.is_first_replica and key not in elsewhere:
            owned.append(key)
    return SavePlan(
        tree=encoded.tree,
        table=tuple(table),
        aliases=aliases,
        owned=tuple(owned),
        shared=tuple(shared),
        same_layout=same_layout,
    )


def _compare_all_bytes(
    encoded: Encoded, shards: Mapping[str, LocalShard], ranks: ControlGroup
) -> None:
    """Compare large tensors as well that each rank holds, but that are not written in shares."""
    facts: dict[str, str] = {}
    with AllOrNone(ranks) as step:
        facts = _facts(encoded, shards, ranks, all_bytes=True)
        step.message = _digest([*facts, *facts.values()])
    if len(set(step.messages)) > 1:
        _raise_difference(facts, ranks)


def _is_shared(shard: LocalShard, ranks: ControlGroup) -> bool:
    """Return whether ranks write shares of a tensor if they all agree about where it is."""
    large = shard.layout.is_whole and nbytes_of(shard.dtype, shard.shape) >= _MIN_SHARED_NBYTES
    return large and _is_everywhere(shard, ranks)


def _facts(
    encoded: Encoded, shards: Mapping[str, LocalShard], ranks: ControlGroup, *, all_bytes: bool
) -> dict[str, str]:
    """Return the leaves of the state, each with a short text that is equal if the leaf is."""
    facts = {f"value {key!r}": json.dumps(encoded.values[key]) for key in sorted(encoded.values)}
    kinds: dict[tuple[str, tuple[int, ...]], str] = {}
    for key, shard in shards.items():
        kind = (shard.dtype, shard.shape)
        text = kinds.get(kind) or kinds.setdefault(kind, f"{shard.dtype} {[*shard.shape]}")
        is_copy = shard.layout.is_whole and ranks.size > 1 and _is_everywhere(shard, ranks)
        if is_copy and (all_bytes or not _is_shared(shard, ranks)):
            text += f" bytes {_checksum(shard):08x}"
        facts[f"tensor {key!r}"] = text
    return facts


def _is_everywhere(shard: LocalShard, ranks: ControlGroup) -> bool:
    layout = shard.layout
    everywhere = layout.mesh_ranks is None or len(layout.mesh_ranks) == ranks.size
    return layout.is_whole and everywhere


def _checksum(shard: LocalShard) -> int:
    checksum = 0
    for chunk in packed_chunks(shard.local):
        checksum = crc32(chunk, checksum)
    return checksum


def _digest(texts: Iterable[str]) -> str:
    return sha256("\n".join(texts).encode()).hexdigest()


def _raise_difference(facts: Mapping[str, str], ranks: ControlGroup) -> None:
    """Name the first facts in which ranks differ; see [Note: buckets]."""
    by_bucket: dict[int, list[str]] = {}
    for key in facts:
        by_bucket.setdefault(crc32(key.encode()) % _NUM_BUCKETS, []).append(key)
    hashes = np.zeros(_NUM_BUCKETS, np.int64)
    for bucket, keys in by_bucket.items():
        hashes[bucket] = _short_hash("\n".join([*keys, *(facts[key] for key in keys)]))
    lowest_highest = np.stack([hashes, -hashes])
    ranks.reduce(lowest_highest, dist.ReduceOp.MIN)
    lowest, highest = lowest_highest[0], -lowest_highest[1]
    buckets: list[int] = np.flatnonzero(lowest != highest).tolist()
    looked_at = buckets[:_MAX_BUCKETS]
    with AllOrNone(ranks) as step:
        step.message = {
            key: _shortened(facts[key])
            for bucket in looked_at
            for key in by_bucket.get(bucket, ())
        }
    everything: list[dict[str, str]] = step.messages
    differing = [
        key
        for key in sorted(set[str]().union(*everything))
        if len({rank.get(key) for rank in everything}) > 1
    ]
    lines = [_difference(key, everything) for key in differing[:_MAX_DIFFERENCES]]
    num_more = len(differing) + len(buckets) - len(looked_at) - len(lines)
    if num_more:
        at_least = "at least " if len(buckets) > len(looked_at) else ""
        lines.append(f"and {at_least}{num_more} more")
    raise ranks.common(
        MismatchError(
            "expected the same state on every rank (shards as DTensors, all else equal); nothing "
            "was saved:\n" + "\n".join(lines)
        )
    )


def _difference(key: str, everything: Sequence[Mapping[str, str]]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, facts in enumerate(everything):
        by_text.setdefault(facts.get(key, "missing"), []).append(rank)
    common = Counter({text: len(where) for text, where in by_text.items()}).most_common(4)
    return f"{key}: " + "; ".join(f"{text} on {name_ranks(by_text[text])}" for text, _ in common)


def _shortened(fact: str) -> str:
    """Return a text that is short and differs nevertheless if the fact does."""
    if len(fact) <= _MAX_FACT_LENGTH:
        return fact
    return f"{fact[:_MAX_FACT_LENGTH]}... (hash {_short_hash(fact):x})"


def _elsewhere(shards: Mapping[str, LocalShard], ranks: ControlGroup) -> frozenset[str]:
    """Return the tensors that have another mesh on rank 0.

    Where sub-meshes hold copies of a tensor, the one that rank 0 is on writes.
    """
    own = [_mesh_hash(shard.layout.mesh_ranks) for shard in shards.values()]
    theirs = np.array(own, np.int64) * (ranks.rank == 0)
    ranks.reduce(theirs, dist.ReduceOp.SUM)
    which: list[int] = theirs.tolist()
    return frozenset(
        key for key, mine, leading in zip(shards, own, which, strict=True) if mine != leading
    )


@lru_cache(maxsize=64)
def _mesh_hash(mesh_ranks: tuple[int, ...] | None) -> int:
    return _short_hash(repr(mesh_ranks))


def _short_hash(text: str) -> int:
    """Return an integer that differs if the text does, small enough to be negated."""
    return int.from_bytes(sha256(text.encode()).digest()[:7])


def ties_of(shards: Mapping[str, LocalShard]) -> dict[str, str]:
    """Return, for tensors that are the same memory seen the same way, the first such key."""
    by_address: dict[int, str] = {}
    alike: dict[int, list[str]] = {}
    for key, shard in shards.items():
        address = shard.local.data_ptr()
        if address and (first := by_address.setdefault(address, key)) is not key:
            alike.setdefault(address, [first]).append(key)
    ties: dict[str, str] = {}
    for keys in alike.values():
        firsts: dict[Any, str] = {}
        for key in keys:
            identity = shards[key].identity
            if identity is not None and firsts.setdefault(identity, key) != key:
                ties[key] = firsts[identity]
    return dict(sorted(ties.items()))


def _common_ties(
    shards: Mapping[str, LocalShard], own: Mapping[str, str], ranks: ControlGroup
) -> dict[str, str]:
    """Return the ties that no rank contradicts; one that holds nothing of a tensor cannot."""
    with AllOrNone(ranks) as step:
        step.message = dict(own)
    claimed = sorted({pair for ties in step.messages for pair in ties.items()})
    with AllOrNone(ranks) as step:
        step.message = [
            own.get(alias) == key or not (shards[alias].local.numel() or shards[key].local.numel())
            for alias, key in claimed
        ]
    confirmed = [all(votes) for votes in zip(*step.messages, strict=True)]
    save_plan: dict[str, str] = {}
    for (alias, key), yes in zip(claimed, confirmed, strict=True):
        if yes and key not in save_plan:
            save_plan.setdefault(alias, key)
    return save_plan
