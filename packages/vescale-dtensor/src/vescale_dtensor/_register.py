"""What is set up once, when the package is imported."""

from __future__ import annotations

from typing import Any, cast

import torch

from ._dispatch import dispatch
from ._dtensor import DTensor, rebuild
from ._linked import unversioned
from ._placements import InterleavedShard, RaggedShard
from ._torch_private import foreach_supported_types


def register_with_torch() -> None:
    """List our classes where torch lists its own.

    Clipping and optimizers then take their batched path, and ``torch.load`` trusts the classes
    with ``weights_only``.
    """
    supported = cast("list[Any]", foreach_supported_types)
    if DTensor not in supported:
        supported.append(DTensor)
    torch.serialization.add_safe_globals([rebuild, RaggedShard, InterleavedShard])


def register_rules() -> None:
    """Tell DTensor how operators run, and what its ``data`` is."""
    DTensor.rules = staticmethod(dispatch)
    DTensor.unversioned = staticmethod(unversioned)
