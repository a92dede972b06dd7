"""Whether tensors that are trained beside a data-parallel model are trained alike on its ranks.

[Note: trained beside] A head, a temperature, a prompt or a loss with parameters that is no part of
the model has gradients of this rank's rows, and nothing averages them: each rank would train its
own, and the model by as many. What has the same values on all ranks when an optimizer steps and
other gradients is such a tensor. Not what has the rows of the batch: a perturbation of each.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
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

# Between two backward passes of a model, that are noted.
_MOST_STEPS = 8


class TrainedBeside:
    """Notes the gradients of plain tensors that any optimizer is about to update.

    Args:
        passes: Compares them.

    Attributes:
        num_rows: Of this rank's latest batch.
    """

    def __init__(self, passes: FirstPasses) -> None:
        self._passes, self._steps, self.num_rows = passes, 0, 0
        if passes.is_open:
            _listen()
            _here.methods.append(weakref.WeakMethod(self._note))

    def begin_pass(self) -> None:
        """Count steps anew."""
        self._steps = 0

    def _note(self, optimizer: Optimizer) -> bool:
        """Note what an optimizer updates; return whether to be told of others."""
        if not self._passes.is_open:
            return False
        # A model that is not trained, a teacher's, has no pass that ends what is noted.
        if not self._passes.has_begun or self._steps == _MOST_STEPS:
            return True
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
            grad = each.grad.coalesce().values() if each.grad.is_sparse else each.grad
            self._passes.note(name, grad, _WHY, if_same=each)
        self._steps += 1
        return True


class _Here(threading.local):
    """Of this thread: emulated ranks are threads, and torch tells of the steps of all."""

    def __init__(self) -> None:
        self.methods = list[weakref.WeakMethod[Callable[[Optimizer], bool]]]()


_here = _Here()


@functools.cache
def _listen() -> None:
    # Once and for good: another thread may be about to call the hooks that torch has.
    register_optimizer_step_pre_hook(_tell)


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    told = [(method, method()) for method in _here.methods]
    _here.methods = [method for method, note in told if note is not None and note(optimizer)]
