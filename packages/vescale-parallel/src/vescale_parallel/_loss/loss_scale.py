"""The factor of a loss whose gradients are computed before its ``backward`` is called.

A pipeline, and accumulation inside of a call, run backward in the call. By how much the program
scales the loss, as ``torch.amp.GradScaler`` does so that float16 keeps small gradients, it says
afterwards. So gradients are computed with the factor of the step before, and corrected. Only
powers of two are kept: they change no bits but of what is too small or too large.
"""

from __future__ import annotations

import math

from torch import Tensor

_LARGEST = 2.0**40


class LossScale:
    """What the next loss is multiplied with.

    Attributes:
        value: A power of two, 1 or larger.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def correction(self, wanted: Tensor, used: float) -> Tensor | None:
        """Return what gradients are still multiplied with, and keep the factor for the next step.

        None, where that is 1, saves a copy of all gradients.

        Args:
            wanted: The gradient of the loss, ().
            used: What :attr:`value` was when they were computed.
        """
        factor = float(wanted)
        is_kept = 1.0 <= factor <= _LARGEST and math.frexp(factor)[0] == 0.5
        self.value = factor if is_kept else 1.0
        return None if factor == used else wanted / used
