"""What is set up once, when the package is imported."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from ._dispatch import dispatch
from ._layout.placements import InterleavedShard, RaggedShard
from ._sharding.gathered_views import unversioned
from ._tensor import autograd
from ._tensor.dtensor import DTensor, rebuild
from ._torch_private import foreach_supported_types

# What pickles of the flat package call the modules of what they hold.
_FORMER_MODULES = {
    "vescale_dtensor._tensor.dtensor": "vescale_dtensor._dtensor",
    "vescale_dtensor._layout.placements": "vescale_dtensor._placements",
}


def register_with_torch() -> None:
    """List our classes where torch lists its own.

    Clipping and optimizers then take their batched path, and ``torch.load`` trusts the classes
    with ``weights_only``, under their former names, too.
    """
    supported = cast("list[Any]", foreach_supported_types)
    if DTensor not in supported:
        supported.append(DTensor)
    pickled = [rebuild, RaggedShard, InterleavedShard]
    formerly = [(each, f"{_FORMER_MODULES[each.__module__]}.{each.__name__}") for each in pickled]
    torch.serialization.add_safe_globals([*pickled, *formerly])
    for module, former in _FORMER_MODULES.items():
        sys.modules.setdefault(former, sys.modules[module])


def register_rules() -> None:
    """Tell DTensor how operators run, what its ``data`` is, and what autograd records."""
    DTensor.rules = staticmethod(dispatch)
    DTensor.unversioned = staticmethod(unversioned)
    DTensor._FromLocal, DTensor._ToLocal = autograd.FromLocal, autograd.ToLocal
    DTensor._ToFull, DTensor._Redistribute = autograd.ToFull, autograd.Redistribute
