"""Whether ranks have the same hooks, where hooks see what several ranks have.

What a hook is given is put together from all ranks, so all have to have it: one that the first
rank alone adds, to print, would wait there for ever, or meet another collective of the others.
Ranks ask each other by the rendezvous store when hooks have been added or removed, not in every
call.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from vescale_dtensor import named_failures
from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._mesh.process_group import COLLECTIVE_TIMEOUT
from vescale_parallel._torch_private import default_store, group_timeout

_SHORTEST, _LONGEST = 1e-3, 0.1  # seconds between looks at the store


class AgreedHooks:
    """The hooks of one model on the ranks of a group. Every rank must make this.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        token = gathered_objects(uuid.uuid4().hex, [group])[0]
        self._name = f"vescale/hooks/{token}"
        self._num_asked = 0
        self._agreed: tuple[str, ...] = ()

    def agree(self, hooks: Sequence[tuple[str, str]]) -> None:
        """Wait until all ranks have hooks in the same places, if these are others than before.

        Args:
            hooks: The place of each, in an order that ranks share, and what it is called here:
                ranks may have functions of their own, of which one prints.

        Raises:
            ValueError: If a rank has others, or has not come here.
        """
        places = tuple(place for place, _ in hooks)
        if places == self._agreed:
            return
        self._num_asked += 1
        store: Any = default_store()
        said = "\n".join(places)
        with named_failures():
            store.set(self._key(dist.get_rank()), said)
            for rank in self._ranks:
                if (other := self._said_by(store, rank)) != said:
                    self._refuse(dict(hooks), rank, other)
        self._agreed = places

    def _said_by(self, store: Any, rank: int) -> str | None:
        """Return what a rank has said, None if it has not within half of a timeout."""
        timeout = (group_timeout() or COLLECTIVE_TIMEOUT) / 2
        deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST
        while not store.check([self._key(rank)]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return str(store.get(self._key(rank)).decode())

    def _refuse(self, hooks: Mapping[str, str], rank: int, other: str | None) -> None:
        theirs = set() if other is None else {*other.split("\n")} - {""}
        here, there, more = dist.get_rank(), rank, sorted(hooks.keys() - theirs)
        if not more:
            here, there, more = there, here, sorted(theirs - hooks.keys())
        place = next(iter(more), "another place")
        name = f" ({hooks[place]})" if place in hooks else ""
        raise ValueError(
            f"rank {here} has a hook that rank {there} has not, of {place}{name}. What it sees is "
            "put together from these ranks, so all of them need it: add it on every rank, and "
            "have it print or write on one"
        )

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._num_asked}/{rank}"
