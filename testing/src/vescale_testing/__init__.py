"""Run a function on N ranks from a test, without paying for N interpreters each time."""

from ._error import RankError as RankError
from ._world import World as World

__all__ = ["RankError", "World"]
