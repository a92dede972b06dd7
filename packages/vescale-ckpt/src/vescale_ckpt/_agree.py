"""Ranks compare what they are about to save: one digest each, details only if they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ._boxes import Part
from ._crc import crc32
from ._files import TableEntry
from ._group import Ranks, Step, name_ranks
from ._tensor_bytes import packed_chunks
from ._tree import Encoded, Json
from .exceptions import MismatchError

_MAX_DIFFERENCES = 5
# Smaller tensors are not worth a request to the disk from every rank.
_MIN_SHARED_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
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
    table: tuple[TableEntry, ...]
    aliases: dict[str, str]
    owned: tuple[str, ...]
    shared: tuple[str, ...]
    same_layout: bool


def agree(encoded: Encoded, parts: Mapping[str, Part], ranks: Ranks) -> Agreed:
    """Check that every rank saves the same tensors and values. Every rank must call this.

    Plain tensors count as one value that every rank holds, so their bytes are compared, too, and
    so are those of DTensors that are replicated to all ranks.

    Args:
        encoded: The state of this rank.
        parts: This rank's part of each of its tensors.
        ranks: All ranks.

    Raises:
        MismatchError: On every rank, naming keys and ranks.
    """
    with Step(ranks) as step:
        facts = _facts(encoded, parts, ranks)
        meshes = {key: part.mesh_ranks for key, part in parts.items()}
        step.message = [_digest(facts), _digest(_layouts(parts)), _ties(parts)]
    if len({message[0] for message in step.messages}) > 1:
        _raise_difference(facts, ranks)
    same_layout = len({message[1] for message in step.messages}) == 1
    leading = meshes if same_layout else _of_rank_0(meshes, ranks)
    aliases = _common_ties(parts, [message[2] for message in step.messages], ranks)
    table = tuple(
        TableEntry(
            key=key,
            group=encoded.groups[key][0],
            name=encoded.groups[key][1],
            dtype=part.dtype,
            shape=part.shape,
        )
        for key, part in parts.items()
        if key not in aliases
    )
    shared = tuple(
        entry.key
        for entry in table
        if same_layout
        and entry.nbytes >= _MIN_SHARED_NBYTES
        and _is_everywhere(parts[entry.key], ranks)
    )
    elsewhere = set(shared)
    owned = tuple(
        entry.key
        for entry in table
        if entry.key not in elsewhere
        and parts[entry.key].is_first_replica
        and meshes[entry.key] == leading[entry.key]
    )
    return Agreed(
        tree=encoded.tree,
        table=table,
        aliases=aliases,
        owned=owned,
        shared=shared,
        same_layout=same_layout,
    )


def _facts(encoded: Encoded, parts: Mapping[str, Part], ranks: Ranks) -> dict[str, str]:
    """Return one short text per leaf of the state, equal if and only if the leaf is."""
    facts = {f"value {key!r}": json.dumps(value) for key, value in encoded.values.items()}
    for key, part in parts.items():
        text = f"{part.dtype} {list(part.shape)}"
        if ranks.size > 1 and _is_everywhere(part, ranks):
            text += f" bytes {_checksum(part):08x}"
        facts[f"tensor {key!r}"] = text
    return facts


def _is_everywhere(part: Part, ranks: Ranks) -> bool:
    return part.is_whole and (part.mesh_ranks is None or len(part.mesh_ranks) == ranks.size)


def _layouts(parts: Mapping[str, Part]) -> dict[str, Any]:
    return {
        key: [part.mesh_ranks, part.mesh_shape, repr(part.placements)]
        for key, part in parts.items()
    }


def _checksum(part: Part) -> int:
    checksum = 0
    for chunk in packed_chunks(part.local):
        checksum = crc32(chunk, checksum)
    return checksum


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _raise_difference(facts: Mapping[str, str], ranks: Ranks) -> None:
    with Step(ranks) as step:
        step.message = facts
    everything: list[dict[str, str]] = step.messages
    differing = [
        key
        for key in sorted(set[str]().union(*everything))
        if len({rank.get(key) for rank in everything}) > 1
    ]
    lines = [_difference(key, everything) for key in differing[:_MAX_DIFFERENCES]]
    if len(differing) > _MAX_DIFFERENCES:
        lines.append(f"and {len(differing) - _MAX_DIFFERENCES} more")
    raise MismatchError(
        "expected the same state on every rank (shards as DTensors, all else equal); nothing "
        "was saved:\n" + "\n".join(lines)
    )


def _difference(key: str, everything: Sequence[Mapping[str, str]]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, facts in enumerate(everything):
        by_text.setdefault(facts.get(key, "missing")[:80], []).append(rank)
    common = Counter({text: len(where) for text, where in by_text.items()}).most_common(4)
    return f"{key}: " + "; ".join(f"{text} on {name_ranks(by_text[text])}" for text, _ in common)


def _of_rank_0(
    meshes: Mapping[str, tuple[int, ...] | None], ranks: Ranks
) -> dict[str, tuple[int, ...] | None]:
    """Return the meshes of rank 0: where sub-meshes hold copies of a tensor, its mesh writes."""
    with Step(ranks) as step:
        step.message = meshes if ranks.rank == 0 else None
    return {key: None if mesh is None else tuple(mesh) for key, mesh in step.messages[0].items()}


def _ties(parts: Mapping[str, Part]) -> dict[str, str]:
    """Return, for tensors that are the same memory seen the same way, the first such key."""
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for key in sorted(parts):
        identity = parts[key].identity
        if identity is not None and first.setdefault(identity, key) != key:
            ties[key] = first[identity]
    return ties


def _common_ties(
    parts: Mapping[str, Part], by_rank: Sequence[Mapping[str, str]], ranks: Ranks
) -> dict[str, str]:
    """Return the ties that no rank contradicts; one that holds nothing of a tensor cannot."""
    if all(ties == by_rank[0] for ties in by_rank):
        return dict(by_rank[0])
    claimed = sorted({pair for ties in by_rank for pair in ties.items()})
    own = by_rank[ranks.rank]
    with Step(ranks) as step:
        step.message = [
            own.get(alias) == key or not (parts[alias].local.numel() or parts[key].local.numel())
            for alias, key in claimed
        ]
    confirmed = [all(votes) for votes in zip(*step.messages, strict=True)]
    agreed: dict[str, str] = {}
    for (alias, key), yes in zip(claimed, confirmed, strict=True):
        if yes and key not in agreed:
            agreed.setdefault(alias, key)
    return agreed
