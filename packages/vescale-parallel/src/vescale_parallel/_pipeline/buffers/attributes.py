"""Plain attributes that forward changes, under a pipeline or in micro-batches of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._model.copies import hooks_of_users
from vescale_parallel._model.several_runs.attributes import Attributes, Place, SeveralRuns
from vescale_parallel._model.user_line import warn_at_user_line

from .kept_by_hooks import kept_error, kept_for_forward


class StageAttributes:
    """The attributes of a model; see [Note: attributes of several runs].

    Ranks have what their own stages change. In the second call of a form they tell each other
    what that is, caches of the first one being made, and the program is warned by name of what
    others do not have.

    Args:
        model: The model.
        group: The ranks of its stages, None without a pipeline.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._attributes, self._model, self._group = Attributes(model), model, group
        self._calls: dict[object, int] = {}
        self._said = set[Place]()
        self._num_hooks, self._hooks = -1, set[int]()

    def of_call(self) -> SeveralRuns:
        """Begin a call."""
        return SeveralRuns(self._attributes)

    def end(self, runs: SeveralRuns, form: object) -> None:
        """End it. Every rank must call this.

        Raises:
            ValueError: If stages draw from generators that modules hold, or if forward reads
                what hooks of blocks keep.
        """
        if self._group is not None and torch.is_grad_enabled():
            self._check_hooks(self._group, is_first=not self._calls.get(form))
        runs.end()
        if self._group is None:
            return
        if runs.generators:
            raise ValueError(
                f"forward draws from a generator of its own ({', '.join(runs.generators)}), which "
                "every stage and data-parallel rank of a pipeline would move by itself; draw "
                "from Python's random, numpy.random or torch's default generator, or before the "
                "model is called, or use pipeline_parallel.size 1"
            )
        self._calls[form] = self._calls.get(form, 0) + 1
        if self._calls[form] != 2:
            return
        told: list[set[Place]] = gathered_objects({*runs.left}, (self._group,))
        missing = set[Place]().union(*told) - set.intersection(*told) - self._said
        if missing:
            self._said |= missing
            names = ", ".join(repr(".".join(at).strip(".")) for at in sorted(missing))
            warn_at_user_line(
                f"forward changes {names}, attributes of modules that one stage of the pipeline "
                "runs: ranks of other stages have them as they were. Make it a buffer "
                "(register_buffer) to have it on all ranks, or read it on that stage"
            )

    def _check_hooks(self, group: dist.ProcessGroup, *, is_first: bool) -> None:
        """Raise if forward reads what hooks keep; of those added later each rank sees its own."""
        is_new = self._are_hooks_new()
        if not (is_first or is_new):
            return
        kept = [kept_for_forward(self._model)]
        if is_first:
            kept = gathered_objects(kept[0], (group,))
        if found := sorted(set[tuple[str, str]]().union(*kept)):
            raise ValueError(kept_error(*found[0]))

    def _are_hooks_new(self) -> bool:
        """Whether a hook was added to a module since this was asked last."""
        before, self._num_hooks = self._num_hooks, RemovableHandle.next_id
        if self._num_hooks == before:
            return False
        known = self._hooks
        self._hooks = {id(each) for x in self._model.modules() for each in hooks_of_users(x)}
        return not self._hooks <= known
