"""What ranks ask each other, beside their collectives, before they leave the order of before.

They use the rendezvous store. A question has a number, which counts on all ranks of a group alike,
and is answered once: by the last rank that asks the same, by one that asks another thing, or by
one that waits in an exchange which whoever asks has not come to.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from vescale_dtensor import abandon, named_failures
from vescale_parallel._mesh.process_group import COLLECTIVE_TIMEOUT
from vescale_parallel._torch_private import default_store, group_timeout

_AGREED = "agreed"
_SHORTEST, _LONGEST = 1e-3, 0.1  # seconds between looks at the store


class OrderQuestions:
    """Those of a group of ranks.

    Args:
        group: The ranks.
        token: Tells models of a program apart; the same on all ranks of the group.

    Attributes:
        num_asked: How many there were.
    """

    def __init__(self, group: dist.ProcessGroup, token: bytes) -> None:
        self._group, self._ranks = group, dist.get_process_group_ranks(group)
        self._name = f"vescale/exchanges/{token.hex()}/{self._ranks[0]}.{self._ranks[1]}"
        self.num_asked, self._num_begun = 0, 0
        self._last: int | None = None  # exchange that was asked for

    def ask(self, number: int) -> None:
        """Wait until all ranks of the group ask for the same exchange.

        Raises:
            OthersDiffer: If a rank asks for another one, or waits in another one already.
        """
        store: Any = default_store()
        self.num_asked += 1
        with named_failures():
            if store.add(self._key("ranks"), 1) == 1:
                store.set(self._key("first"), f"{dist.get_rank()} {self._num_begun} {number}")
            first, _, of_first = store.get(self._key("first")).decode().split()
            if int(of_first) != number:
                store.set(self._key("answer"), f"{dist.get_rank()} {first}")
            elif store.add(self._key(number), 1) == len(self._ranks):
                store.set(self._key("answer"), _AGREED)
            answer = _wait_for(store, self._key("answer"))
        if answer != _AGREED:
            raise self._differs(answer)
        if dist.get_rank() == self._ranks[0]:
            # All ranks asked this one, so none still reads the one before.
            for each in ("ranks", "first", self._last, "answer"):
                store.delete_key(self._key(each, self.num_asked - 1))
        self._last = number

    def answer(self) -> None:
        """Answer ranks that ask while this one waits for them.

        Raises:
            OthersDiffer: If there are any: they should have come to what this one waits in.
        """
        store: Any = default_store()
        question = self.num_asked + 1
        if not store.check([self._key("first", question)]):
            return
        first, asked_at, _ = store.get(self._key("first", question)).decode().split()
        if int(asked_at) < self._num_begun:
            answer = f"{dist.get_rank()} {first}"
            store.set(self._key("answer", question), answer)
            raise self._differs(answer)

    def begin(self) -> None:
        """Note that an exchange begins."""
        self._num_begun += 1

    def _differs(self, answer: str) -> OthersDiffer:
        abandon(self._group, "ranks came to different blocks of the model in it")
        return OthersDiffer([int(each) for each in answer.split()])

    def _key(self, what: object, question: int | None = None) -> str:
        return f"{self._name}/{self.num_asked if question is None else question}/{what}"


class OthersDiffer(Exception):
    """Ranks came to different exchanges.

    Attributes:
        ranks: Two of them.
    """

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def _wait_for(store: Any, key: str) -> str:
    """Return what is at a key once it is there. Other threads may use the store meanwhile."""
    timeout = group_timeout() or COLLECTIVE_TIMEOUT
    deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"waited {timeout.total_seconds():g} seconds for data-parallel ranks to come to "
                "the same block of the model, which is not the one of the steps before; with ZeRO "
                "stages 2 and 3 every rank runs the same blocks, as often"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return str(store.get(key).decode())
