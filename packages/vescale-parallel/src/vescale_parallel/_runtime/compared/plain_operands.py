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
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, tell_plain_operands
from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._mesh.mesh import data_axes
from vescale_parallel._model.user_line import user_line
from vescale_parallel._torch_private import is_in_backward

from .digest import Digest, Leaf, difference, digest_of
from .same_inputs import gathered_rows, groups_along

_FIRST_PASSES = 4
# Of one place in the program, and of one tensor, that are looked at between two backward passes.
_MOST_CALLS, _MOST_ELEMENTS = 4, 2**20

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
    """Compares plain tensors that operators take beside parameters and gradients.

    Args:
        mesh: The plan's mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._groups = mesh, groups_along(mesh, *reversed(data_axes(mesh)))
        self._device = torch.device(mesh.device_type)
        self._passes_left = _FIRST_PASSES if self._groups else 0
        self._calls = Counter[str]()
        self._met: list[Digest] = []
        self._stop = tell_plain_operands(self._meet) if self._groups else lambda: None

    def compare(self) -> None:
        """Compare what was met since the last call. Every rank must call this.

        Raises:
            ValueError: On all ranks, if a tensor differs between them.
        """
        if not self._passes_left:
            return
        self._passes_left -= 1
        met, self._met = self._met, []
        self._calls.clear()
        rows = [torch.zeros(2, dtype=torch.int64, device=self._device), *(m.row for m in met)]
        totals = gathered_rows(torch.stack(rows).sum(0), self._groups)
        if len({tuple(each) for each in totals.tolist()}) == 1:
            return
        own = (dist.get_rank(), [leaf for each in met for leaf in each.with_numbers()])
        found: list[tuple[int, list[Leaf]]] = gathered_objects(own, self._groups)
        # What some ranks alone do, as the first one that prints, is theirs.
        common = set[str].intersection(*({leaf.name for leaf in leaves} for _, leaves in found))
        of_all = {rank: [x for x in leaves if x.name in common] for rank, leaves in sorted(found)}
        if told := difference(of_all):
            raise ValueError(
                f"{told}: a plain tensor that differs between data-parallel ranks was combined "
                "with parameters or gradients of a parallelized model, outside of its call. What "
                "comes out would be other on each rank, and would be trained with. Compute it in "
                "the model's forward, or sum it over ranks before"
            )

    def _meet(self, func: Any, plain: Sequence[Tensor], distributed: Sequence[DTensor]) -> None:
        if not self._passes_left:
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
        named = {
            f"{place} (call {self._calls[place]}, tensor {index})": each.flatten()[:_MOST_ELEMENTS]
            for index, each in enumerate(plain)
        }
        with torch.no_grad():
            self._met.append(digest_of(named, self._device))
