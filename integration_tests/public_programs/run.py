"""Run one public script, as it is or under a plan, and write down its losses and gradients.

torchrun starts this, once a rank; ``measure`` starts that.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import random
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from integration_tests.public_programs.program import Program
from vescale_dtensor import DTensor

STEPS = 6
_GIVEN_TO_SCRIPTS = "CONSTRAINTS"


class EnoughError(BaseException):
    """Raised in the backward pass after the last loss that is compared."""


class Record:
    """What is compared, and the warnings on the way to it.

    Attributes:
        losses: Those that ``backward`` was called on.
        norms: Of all gradients, whenever they are clipped and whenever an optimizer steps.
            Optimizers that ``parallelize`` made hold shards, and are passed over.
        warnings: Texts of veScale's warnings.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.warnings: list[str] = []

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return ``Tensor.backward`` that notes what it is called on."""

        def noted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if loss.is_meta:  # a script that counts operations
                return backward(loss, *args, **kwargs)
            if len(self.losses) == STEPS:
                raise EnoughError
            self.losses.append(float(loss.detach()))
            return backward(loss, *args, **kwargs)

        return noted

    def clip(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``clip_grad_norm_`` that notes the norm."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            self.norms.append(_whole(norm))
            return norm

        return noted

    def step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the norm of an optimizer's gradients."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if dist.is_initialized() and not any(isinstance(p, DTensor) for p in parameters):
            return
        norms = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]
        self.norms.append(math.hypot(*map(_whole, norms)))

    def warned(self, message: Warning | str, category: type[Warning], file: str, *_: Any) -> None:
        """Note a warning in the words of veScale."""
        text = str(message)
        if "data_parallel" in text or "rank" in text or "vescale" in text:
            self.warnings.append(text)
        print(f"{file}: {category.__name__}: {text}", file=sys.stderr)


def _whole(norm: torch.Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def program_at(reference: str) -> Program:
    """Return the program that ``module:name of it`` is in the ``PROGRAMS`` of."""
    module, _, name = reference.partition(":")
    return next(each for each in importlib.import_module(module).PROGRAMS if each.name == name)


def main(reference: str, directory: str, constraints: str) -> None:
    """Run the script of a program in a checkout, under a plan if there are constraints."""
    program = program_at(reference)
    for stub in program.stubs:
        # Others ask for the spec, to know whether it is installed.
        sys.modules[stub] = MagicMock(__spec__=ModuleSpec(stub, None))
    script = Path(directory, program.script).resolve()
    sys.path[:0] = [str(script.parent), *(str(Path(directory, each)) for each in program.paths)]
    os.chdir(script.parent)
    sys.argv = [str(script), *program.argv]
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    if not program.float32:
        torch.set_default_dtype(torch.float64)
    record = Record()
    torch.Tensor.backward = record.backward(torch.Tensor.backward)
    torch.nn.utils.clip_grad_norm_ = record.clip(torch.nn.utils.clip_grad_norm_)
    register_optimizer_step_pre_hook(record.step)
    warnings.showwarning = record.warned  # pyright: ignore[reportAttributeAccessIssue]
    given = {"__name__": "__main__", "__file__": str(script)}
    given[_GIVEN_TO_SCRIPTS] = json.loads(constraints)
    with contextlib.suppress(EnoughError):
        exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), given)
    rank = os.environ.get("RANK", "0")
    Path(directory, f"record.{rank}.json").write_text(json.dumps(vars(record)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
