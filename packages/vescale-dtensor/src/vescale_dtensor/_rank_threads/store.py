"""The store in which ranks of one process leave words for each other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from vescale_dtensor._torch_private import DistStoreError, StoreBase

from .baton import Baton


class ThreadStore(StoreBase):
    """A dictionary; whoever waits for a key lets the other ranks run."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton = baton
        self._values: dict[str, bytes] = {}

    def clone(self) -> ThreadStore:
        """Return another connection: the same, since there is none."""
        return self

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._values[key] = _bytes(value)
        self._baton.note_progress()

    def get(self, key: str) -> bytes:
        """Return a value, when it is there."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        number = int(self._values.get(key, b"0")) + amount
        if amount or key not in self._values:
            self.set(key, str(number))
        return number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Write a value where another is or none, and return what is there then."""
        now = self._values.get(key)
        if now == _bytes(expected) or (now is None and not _bytes(expected)):
            self.set(key, desired)
        return self._values.get(key, _bytes(expected))

    def append(self, key: str, value: Any) -> None:
        """Write at the end of a value."""
        self.set(key, self._values.get(key, b"") + _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there are values; whoever asks in vain lets the other ranks run."""
        if self._has(keys):
            return True
        if self._baton.is_rank:
            self._baton.pause(f"{_named(keys)} in the store")
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when there are values, and raise when there are none and no rank can go on."""
        if self._has(keys):
            return
        limit = timeout or self.timeout
        waits_for = f"{_named(keys)} in the store"
        if not self._baton.wait(lambda: self._has(keys), waits_for, limit.total_seconds()):
            raise DistStoreError(f"wait timeout after {limit}, keys: {_named(keys)}")

    def delete_key(self, key: str) -> bool:
        """Remove a value; whether there was one."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many values there are."""
        return len(self._values)

    # The names by which C++, a prefix store for example, asks for these two.
    deleteKey, getNumKeys = delete_key, num_keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values, when they are there."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Write values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether there are the methods that not every store has."""
        return True

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return bytes(value)


def _named(keys: Sequence[str]) -> str:
    return ", ".join(repr(key) for key in keys)
