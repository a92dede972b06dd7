"""Whether ranks differentiate the loss that the model returned by the same factor.

[Note: factors of losses] What a model returns as its loss is the mean over all data-parallel ranks
already. A loop that multiplies it with something of its own rows (the number of its tokens, as
loops for DistributedDataParallel do) weighs each rank's part, and not the loss.
"""

from __future__ import annotations

from torch import Tensor

from .first_passes import FirstPasses

_WHY = (
    "a loss that the model returned is the mean over all data-parallel ranks already, and was "
    "multiplied with another number on each of them. Their gradients do not add up to one "
    "device's then. Leave the factor out if it makes up for numbers of tokens or rows, or "
    "compute it in the model's forward, or average it over ranks before. What comes beside "
    "features, a temperature of a contrast for example, is such a number, too: have forward "
    "return the loss, or parallelize a module that calls the model and computes it"
)


class LossFactors:
    """Notes the gradients at which backward passes enter returned losses.

    Args:
        passes: Compares them.
    """

    def __init__(self, passes: FirstPasses) -> None:
        self._passes, self._count = passes, 0

    def note(self, grad: Tensor) -> None:
        """Note the gradient of a returned scalar."""
        if self._passes.is_open and grad.numel() == 1:
            name = f"the factor of a loss in backward (number {self._count})"
            self._passes.note(name, grad.detach(), _WHY)
            self._count += 1

    def begin_pass(self) -> None:
        """Count anew."""
        self._count = 0
