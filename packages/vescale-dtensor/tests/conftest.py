"""Every test sees the warnings of a fresh process."""

import pytest
from torch._ops import OpOverload

from vescale_dtensor._sharding import replicate_fallback


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that were gathered warn once a process: no test may count on one before it."""
    warned: set[OpOverload] = set()
    monkeypatch.setattr(replicate_fallback, "_warned", warned)
