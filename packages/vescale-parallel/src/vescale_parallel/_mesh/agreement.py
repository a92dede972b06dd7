"""Whether all ranks were given the same: compared before anything else is exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from vescale_dtensor import named_failures

_MAX_CHARACTERS = 200  # of a value in an error


def barrier() -> None:
    """Wait for all ranks, or raise what one of them did. Every rank must call this.

    New process groups meet by way of the store, which does not know that a rank has died: the
    others would wait there for their timeout. What user code does on one rank comes before this.
    """
    check_agreement()


def check_agreement(**described: Mapping[str, str]) -> None:
    """Raise on every rank if ranks were given different things. Every rank must call this.

    Args:
        described: What to compare, by the name the error uses: the parts of each by theirs.

    Raises:
        ValueError: Naming the first part that differs, and its value on two ranks. The same on
            every rank.
    """
    equal = all_equal({name: digest_of(parts) for name, parts in described.items()})
    for name, parts in described.items():
        if not equal[name]:
            raise ValueError(
                f"expected the same {name} on every rank, but {_difference(gathered(parts))}; "
                "start all ranks with the same script and arguments"
            )


def all_equal(values: Mapping[str, str]) -> dict[str, bool]:
    """Return which short texts all ranks have alike. Every rank must call this."""
    everyone = gathered(values)
    return {name: all(theirs[name] == values[name] for theirs in everyone) for name in values}


def gathered(values: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Return what each rank gave. Every rank must call this."""
    everyone: list[Mapping[str, str]] = [{} for _ in range(dist.get_world_size())]
    with named_failures():
        dist.all_gather_object(everyone, dict(values))
    return everyone


def gathered_objects(own: Any, groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """Return what each rank along several axes gave. Every rank of the groups must call this."""
    found = [own]
    for group in groups:
        theirs: list[list[Any]] = [[] for _ in range(group.size())]
        with named_failures():
            dist.all_gather_object(theirs, found, group=group)
        found = [each for some in theirs for each in some]
    return found


def digest_of(parts: Mapping[str, str]) -> str:
    """Return what tells some texts by name from others."""
    return hashlib.sha256(repr(list(parts.items())).encode()).hexdigest()[:16]


def _difference(everyone: Sequence[Mapping[str, str]]) -> str:
    """Say what the first rank that differs from rank 0 has otherwise."""
    first = everyone[0]
    rank, other = next((r, each) for r, each in enumerate(everyone) if each != first)
    differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
    if not differing:
        return f"ranks 0 and {rank} have its parts in another order"
    key = differing[0]
    more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
    return f"{key} is {_said(first, key)} on rank 0 and {_said(other, key)} on rank {rank}{more}"


def _said(parts: Mapping[str, str], key: str) -> str:
    value = parts.get(key, "missing")
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}.."
