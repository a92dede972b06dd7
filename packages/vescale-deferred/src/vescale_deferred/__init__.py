"""Construct a module of any size without memory; give each rank the bits of one device.

Rooms, in the order in which a tensor passes through them:

- ``_deferred_init.py``: runs a constructor, again if some part of it cannot be deferred
- ``_recording/``: the modes it runs in; records operators, moves generators without drawing
- ``_tape/``: deferred tensors, and what was written to each of their storages
- ``_skip_init.py``: leaves values to a checkpoint
- ``_fingerprint.py``, ``_recorded_draws.py``: compare ranks; have one draw what another would
- ``_materialize.py``: puts real tensors, or shards, in the place of deferred ones
- ``_evaluation/``: runs the recorded writes for all of a storage, or for a part of a tensor

``_module_tensors.py`` says where a module keeps tensors. A room imports only those below it in
this order: the public files, ``_recording``, ``_evaluation``, ``_tape``.
"""

from ._deferred_init import deferred_init as deferred_init, is_deferred as is_deferred
from ._fingerprint import fingerprint as fingerprint, fingerprints as fingerprints
from ._materialize import ShardMaker as ShardMaker, materialize as materialize, read as read
from ._recorded_draws import (
    RecordedDraws as RecordedDraws,
    recorded_draws as recorded_draws,
    replace_draws as replace_draws,
)
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
    "RecordedDraws",
    "ShardMaker",
    "deferred_init",
    "fingerprint",
    "fingerprints",
    "is_deferred",
    "materialize",
    "read",
    "recorded_draws",
    "replace_draws",
    "skip_init",
]
