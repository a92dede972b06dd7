"""Whether plain tensors that meet parameters and gradients are the same on all ranks.

[Note: plain tensors beside parameters] A loop may compute with parameters and gradients, which are
distributed tensors there. A plain tensor beside them counts as the same on all ranks: what comes
out is whole, and its gradients are not summed. Made of this rank's rows (features that a matrix of
the model is applied to in the loop, a loss that is weighted by a parameter, a covariance that
gradients are multiplied with) it is not, and each rank would train with its own. In the first
steps ranks compare such tensors behind each backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, tell_plain_operands
from vescale_parallel._model.user_line import user_line
from vescale_parallel._torch_private import is_in_backward

from .first_passes import FirstPasses

_MOST_CALLS = 4  # of one place in the program, that are looked at between two backward passes
_WHY = (
    "a plain tensor that differs between data-parallel ranks was combined with parameters or "
    "gradients of a parallelized model, outside of its call. What comes out would be other on "
    "each rank, and would be trained with. Compute it in the model's forward, or sum it over "
    "ranks before"
)

# Of one number: a loss and a penalty. What is added to a rank's own loss has the gradient that it
# has beside another one.
_SUMS = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.sub_.Tensor,
    torch.ops.aten.rsub.Tensor,
    torch.ops.aten.stack.default,
    torch.ops.aten.cat.default,
}


class PlainOperands:
    """Notes plain tensors that operators take beside parameters and gradients.

    Args:
        mesh: The plan's mesh.
        passes: Compares them.
    """

    def __init__(self, mesh: DeviceMesh, passes: FirstPasses) -> None:
        self._mesh, self._passes = mesh, passes
        self._calls = Counter[str]()
        self._stop = tell_plain_operands(self._meet) if passes.is_open else lambda: None

    def begin_pass(self) -> None:
        """Count calls of a place anew."""
        self._calls.clear()

    def _meet(self, func: Any, plain: Sequence[Tensor], distributed: Sequence[DTensor]) -> None:
        if not self._passes.is_open:
            # Here, on the thread that is told: backward may end on another one.
            return self._stop()
        if any(each.device_mesh != self._mesh for each in distributed):
            return
        if is_in_backward() or torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled() and all(each.requires_grad for each in distributed):
            return  # an evaluation of this rank's rows
        if func in _SUMS and all(each.numel() == 1 for each in plain):
            return
        path, line = user_line()
        place = f"an operand of {func.overloadpacket.__name__} in {Path(path).name}, line {line}"
        self._calls[place] += 1
        if self._calls[place] > _MOST_CALLS:
            return
        for index, each in enumerate(plain):
            self._passes.note(f"{place} (call {self._calls[place]}, tensor {index})", each, _WHY)
