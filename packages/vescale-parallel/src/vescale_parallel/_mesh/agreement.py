"""Whether all ranks were given the same: compared before anything else is exchanged."""

from __future__ import annotations

import hashlib

import torch.distributed as dist

from vescale_dtensor import named_failures


def barrier() -> None:
    """Wait for all ranks, or raise what one of them did. Every rank must call this.

    New process groups meet by way of the store, which does not know that a rank has died: the
    others would wait there for their timeout. What user code does on one rank comes before this.
    """
    check_agreement()


def check_agreement(**described: str) -> None:
    """Raise on every rank if ranks were given different things. Every rank must call this.

    Args:
        described: What to compare, by the name the error uses.

    Raises:
        ValueError: Naming what differs and the ranks that differ from rank 0.
    """
    digests = {k: hashlib.sha256(v.encode()).hexdigest()[:16] for k, v in described.items()}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    with named_failures():
        dist.all_gather_object(everyone, digests)
    for name in described:
        differing = [r for r, theirs in enumerate(everyone) if theirs[name] != everyone[0][name]]
        if differing:
            raise ValueError(
                f"expected the same {name} on every rank, but ranks {differing} differ from "
                f"rank 0; this is rank {dist.get_rank()} with {described[name][:500]!r}; "
                "start all ranks with the same script and arguments"
            )
