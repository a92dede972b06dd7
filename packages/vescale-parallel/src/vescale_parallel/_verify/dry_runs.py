"""The dry runs of a model on one batch, each made once for all who ask."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from vescale_parallel._model.blocks import blocks_of
from vescale_parallel._model.copies import tensors_within
from vescale_parallel._model.inputs import bind, opened, small_examples
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import (
    DryRunError,
    ModuleCall,
    asks_for_values,
    dry_run_whole,
    equal_blocks,
    readers_of,
)
from vescale_parallel._trace.fake_run import FakeRun
from vescale_parallel._trace.modes import differs_in_training
from vescale_parallel._trace.rng_trace import DrawNotes, NotedDraw

from .rank_dry_run import draws_of_rank, dry_run_rank

NotedDraws = tuple[NotedDraw, ...]
_Found = TypeVar("_Found")


class DryRuns:
    """Runs a model on fakes, whole and as one rank's part, and keeps what was seen.

    It lives as long as what asks: the making of one plan, or one check. The model must not change
    meanwhile. It is run as it is, or ``training``.
    """

    def __init__(self, model: nn.Module, batch: Any, *, training: bool = False) -> None:
        self.model, self.batch, self.training = model, batch, training
        self._blocks: dict[str, ModuleCall] | DryRunError | None = None
        self._readers: dict[str, set[str]] | DryRunError | None = None
        self._draws: NotedDraws | None = None
        self._parts: list[tuple[TensorSharding, dict[str, ModuleCall], NotedDraws]] = []
        self._misfits: list[tuple[TensorSharding, DryRunError]] = []

    def blocks(self) -> dict[str, ModuleCall]:
        """Return how the whole model calls its blocks, or the model itself.

        If it has none, or if blocks are given or return tensors in objects that pytree does not
        open: what is in them would be no input of a block that is run by itself, and no result.

        Raises:
            DryRunError: If the forward needs values.
        """
        if self._blocks is None:
            blocks = blocks_of(self.model) or ("",)
            notes = DrawNotes()
            try:
                self._blocks = dry_run_whole(
                    self.model, self.batch, blocks, notes, prepare=self._prepare
                )
                self._draws = self._heard(notes)
                if any(map(_has_shut_tensors, self._blocks.values())):
                    self._blocks = dry_run_whole(
                        self.model, self.batch, ("",), prepare=self._prepare
                    )
            except DryRunError as error:
                self._blocks = error
        return _or_raise(self._blocks)

    @functools.cached_property
    def in_training(self) -> DryRuns | None:
        """Runs in training, if these are not, and forward computes something else there."""
        if self.training or not differs_in_training(self.model, self.batch):
            return None
        return DryRuns(self.model, self.batch, training=True)

    def _prepare(self, copied: nn.Module) -> None:
        if self.training:
            copied.train()

    def readers(self) -> dict[str, set[str]]:
        """Return what :func:`readers_of` does."""
        if self._readers is None:
            try:
                self._readers = readers_of(self.model, self.batch)
            except DryRunError as error:
                self._readers = error
        return _or_raise(self._readers)

    def part(self, sharding: TensorSharding) -> Mapping[str, ModuleCall]:
        """Return the first call of every block on the first rank.

        Raises:
            DryRunError: If shapes do not fit each other, or the whole model does not run.
        """
        forward = _forward_of(sharding)
        for seen, calls, _ in self._parts:
            if seen == forward:
                return calls
        for seen, misfit in self._misfits:
            if seen == forward:
                raise misfit
        watched, notes = list(self.blocks()), DrawNotes()
        try:
            calls = dry_run_rank(
                self.model, self.batch, watched, sharding, notes, prepare=self._prepare
            )
        except DryRunError as error:
            why = error.__cause__
            if isinstance(why, Exception):
                # Without the frames of the run, which have the copy that ran.
                self._misfits.append((forward, DryRunError(error.fqn, why)))
            raise
        self._parts.append((forward, calls, self._heard(notes)))
        return calls

    def draws(self, sharding: TensorSharding | None = None) -> NotedDraws:
        """Return what :func:`draws_of_rank` does for the batch, in training mode.

        Raises:
            DryRunError: If the forward needs values, or shapes do not fit each other.
        """
        if sharding is not None and sharding.size == 1:
            sharding = None
        if self._is_training:
            forward = None if sharding is None else _forward_of(sharding)
            heard = [draws for seen, _, draws in self._parts if seen == forward]
            if sharding is None and self._draws is not None:
                heard = [self._draws]
            if heard:
                return heard[0]
        found = draws_of_rank(
            self.model, bind(self.model, opened(self.batch)), sharding, training=True
        )
        if sharding is None and self._is_training:
            self._draws = found
        return found

    @functools.cached_property
    def _is_training(self) -> bool:
        """Whether the model draws in these runs what it draws in training."""
        modules = list(self.model.modules())
        if not all(module.training for module in modules):
            return False
        if all(type(module).train is nn.Module.train for module in modules):
            return True
        trained = FakeRun(self.model).model.train()  # may be one that keeps a part from training
        return all(module.training for module in trained.modules())

    def _heard(self, notes: DrawNotes) -> NotedDraws:
        for first, others in equal_blocks(self.model):
            notes.repeat(first, others)
        return tuple(notes.draws)


def dry_runs_of_few(model: nn.Module, batch: Any) -> DryRuns:
    """Return the runs of a model on as few rows of a batch as its code runs on."""
    tried: list[DryRuns] = []
    for small in small_examples(batch):
        tried.append(DryRuns(model, small))
        try:
            tried[-1].blocks()
        except DryRunError as error:
            if not asks_for_values(error):
                continue
        return tried[-1]
    return tried[0]


def _forward_of(sharding: TensorSharding) -> TensorSharding:
    """Return what a forward depends on: not how gradients are summed or numbers are drawn.

    What enters a region whole is given on as it is, and its gradients are summed. But beside what
    enters in shards it says that this argument is whole.
    """
    spec = sharding.spec
    gathered = {fqn for (fqn, _), arrives in spec.entered.items() if arrives != Replicate()}
    entered = {key: arrives for key, arrives in spec.entered.items() if key[0] in gathered}
    return replace(sharding, spec=replace(spec, entered=entered, grads={}, draws={}))


def _or_raise(found: _Found | DryRunError) -> _Found:
    if isinstance(found, DryRunError):
        raise found
    return found


def _has_shut_tensors(call: ModuleCall) -> bool:
    return any(map(_is_shut, ((call.args, dict(call.kwargs)), call.output)))


def _is_shut(tree: Any) -> bool:
    """Whether tensors are in dataclasses, or in other objects alone: a cache is beside some."""
    leaves = pytree.tree_leaves(tree)
    is_open = any(isinstance(leaf, Tensor) for leaf in leaves)
    shut = [x for x in leaves if is_dataclass(x) or not (is_open or isinstance(x, Tensor))]
    return next(tensors_within(shut), None) is not None
