"""A tensor that stands for others has no memory of its own: reads of it are refused.

Where no operator does them torch's C++ asks no subclass, and reads or writes at address zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn


class WithoutMemory:
    """Mixed into a tensor, before its base; refuses what would crash, or read other memory.

    Attributes:
        has_memory: What to take instead, for errors to say.
    """

    has_memory: ClassVar[str]

    def __dlpack__(self, **options: Any) -> NoReturn:
        """Refuse: what is exported is an address."""
        raise self._refusal("__dlpack__()")

    def share_memory_(self) -> NoReturn:
        """Refuse: nothing could be moved to shared memory."""
        raise self._refusal("share_memory_()")

    def apply_(self, callable: Callable[[Any], Any]) -> NoReturn:
        """Refuse: Python would be called with what is at no address."""
        raise self._refusal("apply_()")

    def _refusal(self, asked: str) -> TypeError:
        return TypeError(
            f"a {type(self).__name__} has no memory of its own, which {asked} asks for: take "
            f"{self.has_memory}"
        )
