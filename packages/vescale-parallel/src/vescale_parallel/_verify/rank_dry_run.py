"""A dry run of one tensor-parallel rank: its part of a model on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from vescale_parallel._model.inputs import bind, opened
from vescale_parallel._tensor_parallel.apply import install
from vescale_parallel._tensor_parallel.communicators import FakeRanks
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.shard_module import cut_parameters
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._trace.dry_run import ModuleCall, dry_run, equal_blocks
from vescale_parallel._trace.fake_run import Listener
from vescale_parallel._trace.rng_trace import DrawNotes, NotedDraw


def dry_run_rank(
    model: nn.Module,
    batch: Any,
    watched: Collection[str],
    sharding: TensorSharding,
    *listeners: Listener,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> dict[str, ModuleCall]:
    """Return the first call of every watched module on the first rank, collectives included.

    ``prepare`` changes the copy that is run before it is sharded.

    Raises:
        DryRunError: If shapes do not fit each other.
    """

    def shard(copied: nn.Module) -> None:
        prepare(copied)
        take_first_part(copied, sharding)

    return dry_run(model, bind(model, opened(batch)), watched, shard, lambda _: listeners)


def draws_of_rank(
    model: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    sharding: TensorSharding | None = None,
    *,
    training: bool = False,
) -> tuple[NotedDraw, ...]:
    """Return what random numbers a forward draws on the first of some ranks.

    Without a ``sharding`` there is one rank. ``training`` runs all of it in training mode.

    Raises:
        DryRunError: If the forward needs values, or shapes do not fit each other.
    """
    notes = DrawNotes()

    def prepare(copied: nn.Module) -> None:
        if sharding is not None and sharding.size > 1:
            take_first_part(copied, sharding)
        notes.watch(copied.train() if training else copied)

    dry_run(model, given, (), prepare)
    for first, others in equal_blocks(model):
        notes.repeat(first, others)
    return tuple(notes.draws)


def take_first_part(copied: nn.Module, sharding: TensorSharding, fqn: str = "") -> None:
    """Make a module, ``fqn`` in its model, that of the first of some ranks, in place."""
    cut_parameters(copied, sharding.placements, sharding.size, 0, fqn)
    install(copied, sharding, Boundary(FakeRanks(sharding.size)), prefix=fqn)
