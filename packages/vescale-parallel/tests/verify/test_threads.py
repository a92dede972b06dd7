"""Ranks that are threads of one process."""

from __future__ import annotations

import time

from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._verify.threads import run_in_threads


def test_one_rank_runs_at_a_time() -> None:
    running, most = [0], [0]

    def busy() -> None:
        running[0] += 1
        time.sleep(0.01)
        most[0] = max(most[0], running[0])
        running[0] -= 1

    def on_rank(rank: int, threads: ThreadExchange) -> list[int]:
        busy()
        found = threads.exchange(rank, rank)
        busy()
        return found

    assert run_in_threads(3, on_rank) == [[0, 1, 2]] * 3
    assert most == [1]
