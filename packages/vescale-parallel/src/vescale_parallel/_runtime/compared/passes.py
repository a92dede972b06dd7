"""What a loop does with a model that is the same on all data-parallel ranks, or wrong."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from .drawn_alike import DrawnAlike
from .first_passes import FirstPasses
from .loss_factors import LossFactors
from .plain_operands import PlainOperands
from .trained_beside import TrainedBeside


class ComparedPasses:
    """Compares it behind the first backward passes of a model.

    Args:
        mesh: The plan's mesh.

    Attributes:
        factors: Of losses that the model returned.
        beside: What is trained beside the model.
        drawn: Arguments that the loop may have drawn.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._passes = FirstPasses(mesh)
        self._operands = PlainOperands(mesh, self._passes)
        self.factors, self.beside = LossFactors(self._passes), TrainedBeside(self._passes)
        self.drawn = DrawnAlike(mesh)

    def compare(self) -> None:
        """Compare what happened since the last call. Every rank must call this.

        Raises:
            ValueError: On all ranks, if it differs between them.
        """
        self._passes.compare()
        for each in (self._operands, self.factors, self.beside):
            each.begin_pass()
        self.drawn.compare()
