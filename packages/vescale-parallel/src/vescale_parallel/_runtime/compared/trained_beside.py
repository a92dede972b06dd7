"""Whether tensors that are trained beside a data-parallel model are trained alike on its ranks.

[Note: trained beside] A head, a temperature, a prompt or a loss with parameters that is no part of
the model has gradients of this rank's rows, and nothing averages them: each rank would train its
own, and the model by as many. What has the same values on all ranks when an optimizer steps and
other gradients is such a tensor. Not what has the rows of the batch: a perturbation of each.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_parallel._model.user_line import user_line

from .first_passes import FirstPasses

_WHY = (
    "a tensor that is trained beside a data-parallel model has the same values on all ranks and "
    "other gradients, of each rank's own rows: every rank would train its own. Make it a part of "
    "the model before parallelize, parallelize its module, too, or average its gradient over "
    "ranks before the step"
)


class TrainedBeside:
    """Notes the gradients of plain tensors that any optimizer is about to update.

    Args:
        passes: Compares them.

    Attributes:
        num_rows: Of this rank's latest batch.
    """

    def __init__(self, passes: FirstPasses) -> None:
        self._passes, self._steps, self.num_rows = passes, 0, 0
        # Emulated ranks are threads of one process, of which all see each optimizer.
        self._thread = threading.get_ident()
        if not passes.is_open:
            return
        held = weakref.WeakMethod(self._step)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            step = held()
            if step is None:
                handle.remove()
            else:
                step(optimizer)

        self._hook = handle = register_optimizer_step_pre_hook(before_step)

    def begin_pass(self) -> None:
        """Count steps anew; look at no more of them once nothing is compared."""
        self._steps = 0
        if not self._passes.is_open and hasattr(self, "_hook"):
            self._hook.remove()

    def _step(self, optimizer: Optimizer) -> None:
        if not self._passes.is_open or threading.get_ident() != self._thread:
            return
        path, line = user_line()
        updated: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        for index, each in enumerate(updated):
            if type(each) not in (Tensor, nn.Parameter) or each.grad is None:
                continue
            if each.dim() and len(each) == self.num_rows:
                continue
            name = (
                f"the gradient of a tensor of shape {tuple(each.shape)} that "
                f"{type(optimizer).__name__}.step updates in {Path(path).name}, line {line} "
                f"(step {self._steps}, tensor {index})"
            )
            self._passes.note(name, each.grad, _WHY, if_same=each)
        self._steps += 1
