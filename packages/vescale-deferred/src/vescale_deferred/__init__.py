"""Construct a module of any size without memory; give each rank the bits of one device."""

from ._deferred_init import deferred_init as deferred_init, is_deferred as is_deferred
from ._fingerprint import fingerprint as fingerprint
from ._materialize import ShardMaker as ShardMaker, materialize as materialize, read as read
from ._skip_init import skip_init as skip_init
from .exceptions import (
    CannotDefer as CannotDefer,
    DeferredError as DeferredError,
    DeferredWarning as DeferredWarning,
    ReadError as ReadError,
)

__version__ = "0.1.0"
__all__ = [
    "CannotDefer",
    "DeferredError",
    "DeferredWarning",
    "ReadError",
    "ShardMaker",
    "deferred_init",
    "fingerprint",
    "is_deferred",
    "materialize",
    "read",
    "skip_init",
]
