"""What the modules of one model share that run on stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vescale_parallel._model.copies import copied_without_hooks, on_meta
from vescale_parallel._parameters.compute_dtypes import compute_dtypes
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding

from .cuts.forms import form_of
from .cuts.stage_run import StageRun


@dataclass(eq=False)
class Staging:
    """What the staged modules of one model share: the run in progress, if any.

    ``outlines`` are of modules by what they are called with; ``around`` are the modules, with
    their names, that all stages call, since no stage has them: they have no parameters or are
    around the blocks. ``alike`` has one copy of blocks that :func:`form_of` says are alike, where
    that is good enough: where stages are tried, not where they train. ``enters`` is told of a
    stage's first block and what it is called with, before that is replaced by what the stage
    before sent. ``blocks`` are the names of blocks in the order of their calls. ``sharding`` is
    how tensor-parallel ranks share the model. ``lent`` are the calls of modules
    outside of the one whose outline is being found, which it was given, by name. ``running`` is
    the staged module whose own code runs.
    """

    run: StageRun | None = None
    outlines: dict[Any, Any] = field(default_factory=dict[Any, Any])
    around: Mapping[nn.Module, str] = field(default_factory=dict[nn.Module, str])
    alike: dict[object, nn.Module] | None = None
    enters: Callable[[str, Sequence[Any]], None] = lambda fqn, leaves: None
    blocks: Sequence[str] = ()
    sharding: TensorSharding | None = None
    lent: list[str] | None = None
    running: str | None = None

    def run_own(self, fqn: str, call: Callable[[], Any]) -> Any:
        """Run a module's own code, which calls parts of it without a word to other stages."""
        before, self.running = self.running, fqn
        try:
            return call()
        finally:
            self.running = before

    def is_within(self, fqn: str) -> bool:
        """Whether a module is a part of the one whose own code runs."""
        return self.running is not None and fqn.startswith(f"{self.running}.")

    def skeleton_of(
        self, module: nn.Module, fqn: str, param_dtype: torch.dtype | None
    ) -> nn.Module:
        """Return a copy of a module without memory: one for all that are alike."""
        if self.alike is None:
            return empty_copy(module, param_dtype)
        form = form_of(module, fqn)
        if form not in self.alike:
            self.alike[form] = empty_copy(module, param_dtype)
        return self.alike[form]


def empty_copy(module: nn.Module, param_dtype: torch.dtype | None) -> nn.Module:
    """Copy a module without its tensors' memory."""
    dtypes = compute_dtypes(module, param_dtype)

    def empty_parameter(parameter: nn.Parameter) -> nn.Parameter:
        empty = torch.empty(parameter.shape, dtype=dtypes[id(parameter)], device="meta")
        return nn.Parameter(empty, requires_grad=False)

    return copied_without_hooks(module, empty_parameter, on_meta)
