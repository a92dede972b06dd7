"""Observe a model: one forward on fake tensors, and what it computed, kept and passed on."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from vescale_parallel._model.blocks import numel_of, pipeline_blocks
from vescale_parallel._model.inputs import bind, opened, usual_num_rows
from vescale_parallel._torch_private import pytree

from .fake_run import FakeRun
from .fake_tensors import ObservationError, is_float
from .fused_attention import FusedAttention
from .observation import BlockObservation, Observation, OutsideObservation
from .observer import Observer, Saved, activation_bytes, owning_modules
from .repeated.blocks import RepeatedBlocks

# Of equal blocks two are run, and a first one to which something happens once.
_FEW_BLOCKS = 3


def observe(
    model: nn.Module,
    batch: Any = None,
    blocks: tuple[str, ...] | None = None,
    *,
    fused_attention: bool = False,
) -> Observation:
    """Run one forward of a copy of the model that has shapes and no memory.

    Floating-point tensors are fake. Integers stay real, so that code that looks at masks
    and positions works. The model is not changed, and nothing is drawn from the random
    number generators.

    Args:
        model: May be real, on the meta device, or deferred: only shapes and dtypes are read.
        batch: What one micro-batch looks like: a mapping (``model(**batch)``, or
            ``model(batch)`` if forward takes no such names), a tuple (``model(*batch)``), or
            a tensor. Without one nothing is run.
        blocks: The block of every call of one, in order; None for those of
            :func:`pipeline_blocks`, each called once.
        fused_attention: Whether ``F.scaled_dot_product_attention`` keeps no scores whatever it is
            given, as on accelerators. CPUs keep them with dropout, and of narrower values.

    Raises:
        ObservationError: If the forward needs values that a fake tensor does not have.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> found = observe(model, torch.zeros(3, 4))
        >>> found.flops, found.rows
        (48, 3)
    """
    blocks = _block_fqns(model) if blocks is None else blocks
    batch = opened(batch)
    if batch is None:
        return Observation(
            ran=False,
            numel=numel_of(model),
            blocks=tuple(
                BlockObservation(fqn=f, numel=numel_of(model.get_submodule(f))) for f in blocks
            ),
            outside=tuple(
                OutsideObservation(fqn=f, numel=n) for f, n in owning_modules(model, blocks)
            ),
        )
    return _observed(model, batch, blocks, fused_attention, repeats=len(blocks) > _FEW_BLOCKS)


def _observed(
    model: nn.Module, batch: Any, blocks: tuple[str, ...], fused_attention: bool, *, repeats: bool
) -> Observation:
    """Observe a forward, of which blocks repeat equal ones if that comes to the same."""
    run = FakeRun(model)
    observer = Observer(run.model, blocks)
    repeated = RepeatedBlocks(run, observer)
    given = bind(run.model, run.batch(batch))
    hooks = saved_tensors_hooks(observer.saved, Saved.tensor)
    attention = FusedAttention() if fused_attention else contextlib.nullcontext()
    asking = repeated.installed() if repeats else contextlib.nullcontext()
    try:
        with torch.enable_grad(), hooks, attention, asking:
            output = run.forward(given, observer, repeated)
    except ObservationError:
        if not repeated.has_repeated():
            raise
    else:
        if repeated.is_exact(output):
            return _summary(observer, output, batch)
    return _observed(model, batch, blocks, fused_attention, repeats=False)


def _summary(run: Observer, output: Any, batch: Any) -> Observation:
    """Add up what was heard of a run. ``output`` keeps alive what backward would need."""
    saved, modules = run.saved_bytes(), run.module_observations()
    blocks = tuple(
        BlockObservation(
            fqn=fqn,
            numel=numel_of(run.model.get_submodule(fqn)),
            flops=run.flops.get(index, 0),
            saved_bytes=saved.get(index, 0),
            output_bytes=run.output_bytes.get(index, 0),
        )
        for index, fqn in enumerate(run.blocks)
    )
    before, after = -1, len(run.blocks)
    owners = dict(owning_modules(run.model, run.blocks))
    outside = [
        OutsideObservation(fqn=fqn, numel=owners.pop(fqn), position=run.position(where))
        for fqn, where in run.uses().items()
    ]
    outside += [OutsideObservation(fqn=fqn, numel=numel) for fqn, numel in owners.items()]
    rows, tokens = _rows_and_tokens(batch)
    return Observation(
        ran=True,
        numel=numel_of(run.model),
        flops=sum(run.flops.values()),
        saved_bytes=sum(saved.values()),
        output_bytes=activation_bytes(output),
        blocks=blocks,
        outside=tuple(outside),
        modules=modules,
        uncounted=tuple(run.uncounted.operators),
        before_flops=run.flops.get(before, 0),
        after_flops=run.flops.get(after, 0),
        before_saved_bytes=saved.get(before, 0),
        after_saved_bytes=saved.get(after, 0),
        rows=rows,
        tokens=tokens,
    )


def _block_fqns(model: nn.Module) -> tuple[str, ...]:
    try:
        return pipeline_blocks(model)
    except ValueError:  # no list of blocks, or more than one
        return ()


def _rows_and_tokens(batch: Any) -> tuple[int, int]:
    rows = usual_num_rows(batch)
    if rows is None:
        return 1, 1
    for tensor in (t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)):
        if tensor.dim() == (3 if is_float(tensor.dtype) else 2) and tensor.shape[0] == rows:
            return rows, math.prod(tensor.shape[:2])
    return rows, rows
