"""What is set up once, when the package is imported."""

from __future__ import annotations

from typing import Any, cast

from ._dispatch import dispatch
from ._dtensor import DTensor
from ._torch_private import foreach_supported_types


def register_with_torch() -> None:
    """List DTensor among the classes that take the batched path of clipping and optimizers."""
    supported = cast("list[Any]", foreach_supported_types)
    if DTensor not in supported:
        supported.append(DTensor)


def register_rules() -> None:
    """Tell DTensor how operators run."""
    DTensor.rules = staticmethod(dispatch)
