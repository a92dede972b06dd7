"""The values of a distributed tensor as Python's own, or NumPy's."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from vescale_dtensor._comm.without_memory import WithoutMemory


class PythonValues(WithoutMemory):
    """Mixed into the distributed tensor, before its base."""

    has_memory = (
        "x.full_tensor() for the global values, on every rank, or x.to_local() for this "
        "rank's part"
    )

    def __format__(self: Any, spec: str) -> str:
        """Format a scalar as the number it is on one device; every rank must call this."""
        return self.item().__format__(spec) if self.ndim == 0 else object.__format__(self, spec)

    def tolist(self: Any) -> Any:
        """Return the global tensor as nested lists; every rank must call this."""
        with torch.no_grad():
            full = self.full_tensor()
        return full.tolist()

    def numpy(self: Any, *, force: bool = False) -> Any:
        """Refuse, but where a mode knows better: an array would share memory, which is a part."""
        if has_torch_function((self,)):
            return handle_torch_function(PythonValues.numpy, (self,), self, force=force)
        raise TypeError(
            "a distributed tensor cannot be a NumPy array, which would share its memory: take "
            "x.full_tensor().detach().numpy() for the global values, on every rank, or "
            "x.to_local().detach().numpy() for this rank's part"
        )
