"""What a search found: candidates with their prices, and which of them are the best."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from vescale_planner._prices.cost import Cost
from vescale_planner._prices.memory import Memory
from vescale_planner._space.candidates import Candidate

# Candidates within this factor of the fastest count as equally fast: the simplest is chosen.
TIE = 1.03


class Pricing(Protocol):
    """Knows the terms of a candidate's price."""

    def cost(self, candidate: Candidate) -> Cost:
        """Return what its step is spent on."""
        ...

    def memory(self, candidate: Candidate) -> Memory:
        """Return what is in the memory of its fullest rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScoredCandidate:
    """A candidate with its predictions.

    Attributes:
        candidate: The plan.
        step_seconds: Of one optimizer step.
        needed_bytes: Of the device of the fullest rank.
        search: What priced it, for the terms of the sums: few are ever asked for.
    """

    candidate: Candidate
    step_seconds: float
    needed_bytes: int
    search: Pricing = field(compare=False, repr=False)

    @property
    def cost(self) -> Cost:
        """What the step is spent on."""
        return self.search.cost(self.candidate)

    @property
    def memory(self) -> Memory:
        """What is in the memory of the fullest rank."""
        return self.search.memory(self.candidate)

    @property
    def seconds_per_row(self) -> float:
        """What candidates are compared by: replicas may get different numbers of rows."""
        return self.step_seconds / (self.candidate.layout.dp * self.candidate.rows)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Everything that was looked at.

    Attributes:
        fits: Candidates that fit in memory, best first.
        too_large: The others, smallest first.
        rejected: Why layouts are impossible, in the order found, each once.
    """

    fits: tuple[ScoredCandidate, ...]
    too_large: tuple[ScoredCandidate, ...]
    rejected: tuple[str, ...]


def distinct(sentences: Iterable[str]) -> list[str]:
    """Return the first of those that differ in numbers alone."""
    first: dict[str, str] = {}
    for sentence in sentences:
        first.setdefault(re.sub(r"\d+", "#", sentence), sentence)
    return list(first.values())


def ranked(fits: list[ScoredCandidate]) -> list[ScoredCandidate]:
    """Sort by time; of those about as fast as the fastest, the simplest first."""
    if not fits:
        return []
    fastest = min(each.seconds_per_row for each in fits)

    def key(each: ScoredCandidate) -> tuple[bool, float, float, Candidate]:
        tied = each.seconds_per_row <= TIE * fastest
        simplicity = each.candidate.moving_parts if tied else 0
        return not tied, simplicity, each.seconds_per_row, each.candidate

    return sorted(fits, key=key)


def divided(
    scored: Iterable[ScoredCandidate], rejected: Iterable[str], memory_bytes: int
) -> SearchResult:
    """Divide candidates into those that fit and those that do not."""
    fits, too_large = list[ScoredCandidate](), list[ScoredCandidate]()
    for each in scored:
        (fits if each.needed_bytes <= memory_bytes else too_large).append(each)
    return SearchResult(
        fits=tuple(ranked(fits)),
        too_large=tuple(sorted(too_large, key=lambda s: (s.needed_bytes, s.candidate))),
        rejected=tuple(rejected),
    )
