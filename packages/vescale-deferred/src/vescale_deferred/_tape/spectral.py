"""Functions that take another algorithm for a subclass of a tensor than for a tensor.

They ask LAPACK for vectors as well, in case that somebody will differentiate, and for values
alone otherwise. The two differ in the last bits, so a deferred tensor has to be a tensor for them.
"""

from __future__ import annotations

from typing import Any

import torch

# None: always; else where the order of the norm is among the arguments, and its name.
_ORDERS: dict[Any, tuple[int, str] | None] = {
    torch.linalg.svdvals: None,
    torch.linalg.eigvalsh: None,
    torch.linalg.cond: None,
    torch.linalg.matrix_rank: None,
    torch.nuclear_norm: None,
    torch.linalg.matrix_norm: (1, "ord"),
    torch.linalg.norm: (1, "ord"),
    torch.norm: (1, "p"),
    torch.Tensor.norm: (1, "p"),
}
_SPECTRAL_ORDERS = ("nuc", 2, -2)


def is_spectral(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call computes singular values or eigenvalues, and no vectors."""
    if func not in _ORDERS:
        return False
    order = _ORDERS[func]
    if order is None:
        return True
    position, name = order
    given = kwargs.get(name, args[position] if len(args) > position else None)
    return isinstance(given, int | float | str) and given in _SPECTRAL_ORDERS
