"""What a test sees when a rank does not return."""

from __future__ import annotations

from collections.abc import Mapping


class RankError(AssertionError):
    """At least one rank raised, died or gave no answer.

    Attributes:
        errors: Why, for each rank that did not return: a formatted traceback, an exit code,
            or the stack of a rank that was stopped while it was still running.
        exceptions: What those ranks raised, as far as it can be pickled; always a subset of
            the ranks in ``errors``.
    """

    def __init__(
        self, errors: Mapping[int, str], exceptions: Mapping[int, BaseException] | None = None
    ) -> None:
        self.errors = dict(sorted(errors.items()))
        self.exceptions = dict(sorted((exceptions or {}).items()))
        super().__init__(_report(self.errors))


def _report(errors: Mapping[int, str]) -> str:
    """Say each distinct error once, with the ranks that had it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, error in errors.items():
        ranks_of.setdefault(error.rstrip(), []).append(rank)
    return "\n\n".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {error}"
        for error, ranks in ranks_of.items()
    )
