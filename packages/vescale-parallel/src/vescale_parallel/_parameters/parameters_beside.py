"""Parameters beside a data-parallel model, of a head or a temperature that the loop has.

What trains them are this rank's rows. Nothing averages their gradients, so each rank would go its
own way and nothing would fail.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_parallel._model.user_line import warn_at_user_line

_hooks: list[Any] = []


def watch_parameters_beside() -> None:
    """Have first steps of all optimizers of this process looked at, from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_tell))


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if vars(optimizer).get("_vescale_told_beside"):
        return
    held: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    beside = [p for p in held if type(p) in (Tensor, nn.Parameter) and p.grad is not None]
    if not beside:
        return
    optimizer.__dict__["_vescale_told_beside"] = True
    warn_at_user_line(
        f"this {type(optimizer).__name__} steps {len(beside)} parameters, the first of shape "
        f"{tuple(beside[0].shape)}, that belong to no parallelized model, in a program with a "
        "data-parallel one. If their loss is of what that returned, each rank steps by the "
        "gradients of its own rows, and the ranks grow apart. Have one nn.Module contain both and "
        "give that to parallelize, or average their gradients"
    )
