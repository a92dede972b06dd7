"""Ranks compare what they are about to save: one digest each, details only if they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

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


class Fingerprint(NamedTuple):
    """Three short texts about what a rank is about to save.

    Attributes:
        facts: Differs if a key, shape, dtype or value does, or the bytes of a copy.
        layouts: Differs if a mesh or placement does.
        ties: Differs if other tensors share their memory.
    """

    facts: str
    layouts: str
    ties: str


def fingerprint(encoded: Encoded, parts: Mapping[str, Part], ranks: Ranks) -> Fingerprint:
    """Return what ranks have to compare: plain tensors count as one value that all have.

    So their bytes are compared, too, and so are those of DTensors that are replicated to all
    ranks.
    """
    keys = sorted(parts)
    return Fingerprint(
        _digest(map(": ".join, _facts(encoded, parts, ranks))),
        _digest(f"{key!r} {parts[key].layout.text}" for key in keys),
        _digest(map(repr, _ties(parts).items())),
    )


def agree(
    encoded: Encoded, parts: Mapping[str, Part], by_rank: Sequence[Fingerprint], ranks: Ranks
) -> Agreed:
    """Check that every rank saves the same tensors and values. Every rank must call this.

    Args:
        encoded: The state of this rank.
        parts: This rank's part of each of its tensors.
        by_rank: What :func:`fingerprint` has returned on every rank.
        ranks: All ranks.

    Raises:
        MismatchError: On every rank, naming keys and ranks.
    """
    if len({prints.facts for prints in by_rank}) > 1:
        _raise_difference(encoded, parts, ranks)
    same_layout = len({prints.layouts for prints in by_rank}) == 1
    same_ties = len({prints.ties for prints in by_rank}) == 1
    aliases = _ties(parts) if same_ties else _common_ties(parts, ranks)
    table = tuple(
        TableEntry(key, *encoded.groups[key], part.dtype, part.shape)
        for key, part in parts.items()
        if key not in aliases
    )
    shared: list[str] = []
    owned: list[str] = []
    elsewhere = frozenset[str]() if same_layout else _elsewhere(parts, ranks)
    for entry in table:
        key, part = entry.key, parts[entry.key]
        large = part.layout.is_whole and entry.nbytes >= _MIN_SHARED_NBYTES
        if same_layout and large and _is_everywhere(part, ranks):
            shared.append(key)
        elif part.layout.is_first_replica and key not in elsewhere:
            owned.append(key)
    return Agreed(
        tree=encoded.tree,
        table=table,
        aliases=aliases,
        owned=tuple(owned),
        shared=tuple(shared),
        same_layout=same_layout,
    )


def _facts(encoded: Encoded, parts: Mapping[str, Part], ranks: Ranks) -> Iterator[tuple[str, str]]:
    """Yield the leaves of the state, each with a short text that is equal if the leaf is."""
    for key in sorted(encoded.values):
        yield f"value {key!r}", json.dumps(encoded.values[key])
    for key in sorted(parts):
        part = parts[key]
        text = f"{part.dtype} {[*part.shape]}"
        if part.layout.is_whole and ranks.size > 1 and _is_everywhere(part, ranks):
            text += f" bytes {_checksum(part):08x}"
        yield f"tensor {key!r}", text


def _is_everywhere(part: Part, ranks: Ranks) -> bool:
    layout = part.layout
    everywhere = layout.mesh_ranks is None or len(layout.mesh_ranks) == ranks.size
    return layout.is_whole and everywhere


def _checksum(part: Part) -> int:
    checksum = 0
    for chunk in packed_chunks(part.local):
        checksum = crc32(chunk, checksum)
    return checksum


def _digest(texts: Iterable[str]) -> str:
    return sha256("\n".join(texts).encode()).hexdigest()


def _raise_difference(encoded: Encoded, parts: Mapping[str, Part], ranks: Ranks) -> None:
    with Step(ranks) as step:
        step.message = dict(_facts(encoded, parts, ranks))
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


def _elsewhere(parts: Mapping[str, Part], ranks: Ranks) -> frozenset[str]:
    """Return the tensors that have another mesh on rank 0.

    Where sub-meshes hold copies of a tensor, the one that rank 0 is on writes.
    """
    keys = sorted(parts)
    with Step(ranks) as step:
        meshes = list(dict.fromkeys(parts[key].layout.mesh_ranks for key in keys))
        numbers = {mesh: number for number, mesh in enumerate(meshes)}
        if ranks.rank == 0:
            step.message = [meshes, [numbers[parts[key].layout.mesh_ranks] for key in keys]]
    theirs, which = step.messages[0]
    leading = [None if mesh is None else tuple(mesh) for mesh in theirs]
    return frozenset(
        key
        for key, number in zip(keys, which, strict=True)
        if parts[key].layout.mesh_ranks != leading[number]
    )


def _ties(parts: Mapping[str, Part]) -> dict[str, str]:
    """Return, for tensors that are the same memory seen the same way, the first such key."""
    by_address: dict[int, list[str]] = {}
    for key, part in parts.items():
        if address := part.local.data_ptr():
            by_address.setdefault(address, []).append(key)
    ties: dict[str, str] = {}
    for keys in by_address.values():
        if len(keys) > 1:
            first: dict[Any, str] = {}
            for key in sorted(keys):
                identity = parts[key].identity
                if identity is not None and first.setdefault(identity, key) != key:
                    ties[key] = first[identity]
    return dict(sorted(ties.items()))


def _common_ties(parts: Mapping[str, Part], ranks: Ranks) -> dict[str, str]:
    """Return the ties that no rank contradicts; one that holds nothing of a tensor cannot."""
    own = _ties(parts)
    with Step(ranks) as step:
        step.message = own
    claimed = sorted({pair for ties in step.messages for pair in ties.items()})
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
