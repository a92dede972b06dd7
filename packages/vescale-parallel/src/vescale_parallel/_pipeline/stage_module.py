"""A pipeline stage is the whole model, run by its own forward, with most of it standing in.

[Note: how a stage runs]
Every rank calls the model's forward on its micro-batch. What depends on the batch alone
(masks, positions, rotary tables) is computed on every stage. A block or an embedding that
belongs to an earlier stage returns a placeholder: the right shape and dtype, no memory, no
compute; what is computed from one is one too. When the first own block is called, the
placeholders that cross the cut there become what the stage before sent: whoever refers to one
has the tensor from then on. A stage that is not the last one leaves forward by
:class:`StageDone` when the first block of the next stage is called, so that what is computed
between blocks is computed behind the first of them. See [Note: what crosses a cut].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.code import mix_in
from vescale_parallel._model.hook_readers import modules_in_closures
from vescale_parallel._model.inputs import refuse_shut_output
from vescale_parallel._model.kept_outside import filled_error
from vescale_parallel._model.structures import leaves_of, open_objects
from vescale_parallel._torch_private import is_in_backward, is_transformed, pytree
from vescale_parallel._verify.rank_dry_run import take_first_part

from .cuts.hooks import collected
from .cuts.outline import Argument, Outline, kind_of, outline_of
from .cuts.placeholders import Placeholder, as_sent, placeholder, rename, taint
from .cuts.stage_run import (
    HOW_TO_SKIP,
    Receive as Receive,
    StageDone as StageDone,
    StageRun as StageRun,
)
from .stage_assignment import StageMap
from .staging import Staging as Staging, empty_copy

_HOW_TO_SAY_CALLS = (
    "List blocks in pipeline_parallel.block_calls as forward calls them, or have "
    "that be seen: give generate_plan an example_batch, or parallelize a dataset, whose batches "
    "can be run on the processor"
)


@dataclass(eq=False)
class _Role:
    """What a staged module is: a block, with the numbers of its calls among those of all blocks.

    None for a module outside the blocks. ``has_run`` says that it is on a stage of this rank.
    """

    staging: Staging
    fqn: str
    calls: tuple[int, ...] | None
    stages: frozenset[int]
    skeleton: nn.Module
    has_run: bool = False


class StagedModule(nn.Module):
    """Mixed into the class of a module, so that a call may be answered by a placeholder."""

    _vescale_role: _Role

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role = self._vescale_role
        run = role.staging.run
        if run is None:
            if role.calls is not None and is_in_backward():
                args, kwargs = _run_again(role, args, kwargs)
            return super().__call__(*args, **kwargs)
        open_objects((args, kwargs))
        if role.calls is None:
            return self._call_outside(role, run, args, kwargs)
        if is_transformed():
            raise ValueError(
                f"{role.fqn!r} was called within torch.vmap or a transform of torch.func, which "
                "nothing that stages of a pipeline send can be part of: transform functions "
                "within blocks, or use pipeline_parallel.size 1"
            )
        index = run.blocks_called
        if index not in role.calls:
            again, skipped = ", a second call" * (min(role.calls) < index), ""
            if index < min(role.calls) and role.staging.blocks:
                again, skipped = f", before {role.staging.blocks[index]!r}", f". {HOW_TO_SKIP}"
            order = "once each and in order" if len(role.calls) == 1 else "as its plan says"
            raise ValueError(
                f"pipeline parallelism needs the blocks to be called {order}, "
                f"but {role.fqn!r} was call number {index}{again}. {_HOW_TO_SAY_CALLS}{skipped}"
            )
        if index == run.end_block and not run.is_last:
            raise StageDone(run.sent(role.fqn, leaves_of((args, kwargs))))
        if not run.first_block <= index < run.end_block:
            run.values.block_called(index, leaves_of((args, kwargs)))
            run.blocks_called = run.values.blocks_called = index + 1
            return collected(self, args, _placeholder(role, run, args, kwargs))
        if index == run.first_block:
            if run.stage > 0:
                leaves, spec = pytree.tree_flatten((args, kwargs))
                role.staging.enters(role.fqn, leaves)
                args, kwargs = pytree.tree_unflatten(run.take(role.fqn, leaves), spec)
            # No placeholder is needed any more; using one would be a mistake.
            Placeholder.usable = False
        run.blocks_called, role.has_run = index + 1, True
        _refuse_placeholders(role, args, kwargs)
        before = {*map(id, leaves_of((args, kwargs)))}
        call = functools.partial(super().__call__, *args, **kwargs)
        own = functools.partial(role.staging.run_own, role.fqn, call)
        output = run.run_named(role.fqn, own, (args, kwargs))
        _refuse_filled(role.fqn, before, leaves_of((args, kwargs)))
        return output

    def _call_outside(
        self, role: _Role, run: StageRun, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if role.staging.is_within(role.fqn):
            return super().__call__(*args, **kwargs)
        if role.staging.lent is not None:
            role.staging.lent.append(role.fqn)
        if not run.is_own:
            return collected(self, args, _placeholder(role, run, args, kwargs))
        if run.stage in role.stages:
            call = functools.partial(super().__call__, *args, **kwargs)
            own = functools.partial(role.staging.run_own, role.fqn, call)
            return run.run_named(role.fqn, own, (args, kwargs))
        raise ValueError(
            f"{role.fqn!r} is called {_where(run)}, on stage {run.stage} of the pipeline, but its "
            f"parameters are on stage {min(role.stages)}; {_advice(role.fqn, run)}, or have its "
            "places be seen: give generate_plan an example_batch, or parallelize a dataset, whose "
            "batches can be run on the processor"
        )


def _refuse_filled(fqn: str, before: Collection[int], leaves: Sequence[Any]) -> None:
    """Refuse a block that puts what it computes into a list or a dict that it is given."""
    new = (x for x in leaves if id(x) not in before)
    if any(isinstance(x, Tensor) and x.requires_grad for x in new):
        raise ValueError(filled_error(fqn))


def stage_model(
    model: nn.Module, stages: StageMap, staging: Staging, param_dtype: torch.dtype | None
) -> None:
    """Let every module with parameters be answered by a placeholder on other stages, in place."""
    _refuse_closures(model, stages)
    # Skeletons are copied from whole modules, so before any is changed.
    for fqn in stages.distinct_blocks:
        module, calls = model.get_submodule(fqn), stages.calls_of_block(fqn)
        owners = [stages.stage_of_block(index) for index in calls]
        stage_module(module, staging, fqn=fqn, calls=calls, stages=owners, param_dtype=param_dtype)
    staging.blocks = stages.blocks
    staging.around = _around(model, {*stages.blocks, *stages.outside})
    users: dict[nn.Module, tuple[str, set[int]]] = {}
    for fqn in (*stages.outside, *stages.parts):
        _, found = users.setdefault(model.get_submodule(fqn), (fqn, set()))
        found |= {*(stages.parts.get(fqn) or stages.stages_of_module(fqn))}
    # A module may have several names.
    for module, (fqn, owners) in users.items():
        stage_module(
            module, staging, fqn=fqn, calls=None, stages=[*owners], param_dtype=param_dtype
        )


def _around(model: nn.Module, staged: Collection[str]) -> dict[nn.Module, str]:
    """Return the modules that are neither staged nor in one that is, with their names."""
    inside = {each for fqn in staged for each in model.get_submodule(fqn).modules()}
    return {module: fqn for fqn, module in model.named_modules() if module not in inside}


def _refuse_closures(model: nn.Module, stages: StageMap) -> None:
    """Refuse blocks whose functions call modules that are registered somewhere else."""
    known = {id(module): fqn for fqn, module in model.named_modules()}
    for block in stages.blocks:
        for name, held in modules_in_closures(model.get_submodule(block)):
            fqn = known.get(id(held))
            # What is around the block may be asked for a configuration.
            if fqn and not block.startswith(f"{fqn}."):
                raise ValueError(
                    f"{name!r} of {block!r} is a function that calls {fqn!r}, which "
                    f"is no submodule of {block!r}, so its parameters may be on another stage of "
                    f"the pipeline. Make it a submodule, {block}.adapter = ..., and have the "
                    "function call that"
                )


def stage_module(
    module: nn.Module,
    staging: Staging,
    *,
    fqn: str,
    calls: tuple[int, ...] | None,
    stages: Sequence[int],
    param_dtype: torch.dtype | None,
) -> None:
    """Let calls of a module be answered by a placeholder, in place.

    It is a block, ``calls`` being the numbers of its calls among those of all blocks, or a module
    with parameters outside of them (None). ``param_dtype`` is that of its parameters in compute,
    None for their own; ``staging`` is shared by all staged modules of the model.
    """
    skeleton = staging.skeleton_of(module, fqn, param_dtype)
    role = _Role(staging, fqn, calls, frozenset(stages), skeleton)
    mix_in(module, StagedModule)
    assert isinstance(module, StagedModule)
    # Not through nn.Module.__setattr__, which would register the skeleton as a submodule.
    object.__setattr__(module, "_vescale_role", role)


def _placeholder(
    role: _Role, run: StageRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what the module would, with every tensor replaced by memory-free zeros."""
    # First, since a block may call modules outside of it that it is given: behind its call.
    values, name = run.values, run.values.of_call(role.fqn)
    outline, tensors = _outline(role, args, kwargs)
    device = next((t.device for t in tensors), torch.device("cpu"))
    for each in tensors:
        if isinstance(each, Placeholder) and each.known_as is not None:
            values.used(each.known_as)
    for place in outline.written:
        if type(tensors[place]) is Tensor:
            values.written.append(taint(tensors[place]))
        held = tensors[place]
        if isinstance(held, Placeholder):
            rename(held, values, (*name, "argument", place))
    results, output_spec = pytree.tree_flatten(outline.output)
    for place, leaf in enumerate(results):
        if isinstance(leaf, Argument):
            results[place] = tensors[leaf.place]
        elif isinstance(leaf, Tensor):
            results[place] = placeholder(leaf.shape, leaf.dtype, device, values, (*name, place))
    return pytree.tree_unflatten(results, output_spec)


def _outline(
    role: _Role, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Outline, list[Tensor]]:
    """Return what a call does to the forms of tensors, and the tensors that it is given."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    key = (role.skeleton, role.skeleton.training, str(spec), tuple(map(kind_of, leaves)))
    staging, run = role.staging, role.staging.run
    if key not in staging.outlines:
        around, staging.lent = staging.lent, []
        try:
            with contextlib.nullcontext() if run is None else run.values.uncounted():
                outline = replace(_seen(role, args, kwargs), lent=tuple(staging.lent))
        finally:
            staging.lent = around
        refuse_shut_output(role.fqn, outline.output, "pipeline_parallel")
        staging.outlines[key] = outline
    outline = staging.outlines[key]
    if staging.lent is not None:
        staging.lent += outline.lent
    if run is not None:
        for fqn in outline.lent:
            run.values.of_call(fqn)
    return outline, tensors


def _seen(role: _Role, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outline:
    """Run a module's copy for its shapes: whole, else as the part of a tensor-parallel rank.

    A parameter that blocks share (frequencies of each head) is a rank's part of it in what they
    are called with, which the whole block does not run on.
    """
    try:
        return outline_of(role.skeleton, role.fqn, args, kwargs, role.staging.lent)
    except ValueError:
        sharding = role.staging.sharding
        if sharding is None or sharding.size == 1:
            raise
        part = empty_copy(role.skeleton, None)
        take_first_part(part, sharding, role.fqn)
        try:
            return outline_of(part, role.fqn, args, kwargs, role.staging.lent)
        except ValueError:
            pass  # what is wrong with the whole one is said in the names of the model
        raise


def compute_nothing(model: nn.Module) -> None:
    """Let staged modules return zeros of the right shapes where they would run, in place."""
    for module in model.modules():
        if isinstance(module, StagedModule):
            # Not through nn.Module.__setattr__, which looks at what is set.
            object.__setattr__(module, "forward", functools.partial(_zeros, module._vescale_role))


def _zeros(role: _Role, *args: Any, **kwargs: Any) -> Any:
    outline, tensors = _outline(role, args, kwargs)
    device = next((t.device for t in tensors), torch.device("cpu"))

    def made(leaf: Any) -> Any:
        if isinstance(leaf, Argument):
            return tensors[leaf.place]
        if not isinstance(leaf, Tensor):
            return leaf
        zeros = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        may_have_grad = leaf.is_floating_point() or leaf.is_complex()
        return zeros.requires_grad_(may_have_grad and torch.is_grad_enabled())

    return pytree.tree_map(made, outline.output)


def _refuse_placeholders(role: _Role, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    leaves = leaves_of((args, dict(kwargs)))
    if any(isinstance(leaf, Placeholder) for leaf in leaves):
        raise ValueError(
            f"{role.fqn!r} is called with a tensor that depends on parameters of another stage "
            "of the pipeline and was not sent: it was not there when the model was looked at "
            "before the first call of this form, or depends only on parameters that no module "
            "with a forward of its own holds"
        )


def _run_again(role: _Role, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return what a checkpoint of the program calls a block with in backward, as it was sent."""
    if not role.has_run:
        raise ValueError(
            f"{role.fqn!r}, which is on another stage of the pipeline, is called in backward "
            "by torch.utils.checkpoint around several blocks; checkpoint each block by itself, or "
            "have the plan say recompute='full'"
        )
    return as_sent((args, kwargs))


def _advice(fqn: str, run: StageRun) -> str:
    """Say which key of a plan puts a module where it is called now."""
    if not run.blocks_called or (run.is_last and run.blocks_called >= run.end_block):
        here, other = ("head", "tail") if not run.blocks_called else ("tail", "head")
        return (
            f"list it in pipeline_parallel.{here}_modules (and not in {other}_modules) if this is "
            "its only call"
        )
    return (
        "list the blocks behind which it is called, all of them, in "
        f"pipeline_parallel.called_behind ({{{fqn!r}: [...]}})"
    )


def _where(run: StageRun) -> str:
    if not run.blocks_called:
        return "before the blocks of the model"
    if run.is_last and run.blocks_called >= run.end_block:
        return "after the blocks of the model"
    return f"behind block {run.blocks_called - 1} of the model, counted from 0"
