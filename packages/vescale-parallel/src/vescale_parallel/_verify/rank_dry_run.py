"""A dry run of one tensor-parallel rank: its part of a model on fake tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement

from vescale_parallel._tensor_parallel.apply import install
from vescale_parallel._tensor_parallel.communicators import FakeRanks
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.shard_module import cut_parameters
from vescale_parallel._tensor_parallel.sharding_spec import Resolved
from vescale_parallel._trace.dry_run import Call, dry_run, equal_blocks, opened
from vescale_parallel._trace.fake_tensors import bind
from vescale_parallel._trace.rng_trace import DrawNotes, NotedDraw


def rehearse_part(
    model: nn.Module,
    batch: Any,
    watched: Collection[str],
    resolved: Resolved,
    placements: dict[str, Placement],
    size: int,
) -> dict[str, Call]:
    """Return the same for the first rank's part of the model, collectives included.

    Raises:
        RehearsalError: If shapes do not fit each other.
    """

    def cut(copied: nn.Module) -> None:
        cut_parameters(copied, placements, size, 0)
        install(copied, resolved, placements, Boundary(FakeRanks(size)))

    return dry_run(model, bind(model, opened(batch)), watched, cut)


def rehearse_draws(
    model: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    resolved: Resolved,
    placements: dict[str, Placement],
    size: int,
    *,
    training: bool = False,
) -> tuple[NotedDraw, ...]:
    """Return what random numbers a forward draws on the first of some ranks.

    Args:
        model: Whole.
        given: Positional and keyword arguments.
        resolved: The plan.
        placements: Of every cut parameter.
        size: How many ranks.
        training: Whether to run all of it in training mode.

    Raises:
        RehearsalError: If the forward needs values, or shapes do not fit each other.
    """
    notes = DrawNotes()

    def prepare(copied: nn.Module) -> None:
        if size > 1:
            cut_parameters(copied, placements, size, 0)
            install(copied, resolved, placements, Boundary(FakeRanks(size)))
        notes.watch(copied.train() if training else copied)

    dry_run(model, given, (), prepare)
    for first, others in equal_blocks(model):
        notes.repeat(first, others)
    return tuple(notes.draws)
