"""A pipeline stage is the whole model, run by its own forward, with most of it standing in.

[Note: how a stage runs]
Every rank calls the model's forward on its micro-batch. What depends on the batch alone
(masks, positions, rotary tables) is computed on every stage. A block or an embedding that
the stage does not own returns a placeholder: the right shape and dtype, no memory, no compute.
Placeholders require a gradient, so anything computed from them does too; that is how a stage
knows which argument of its first own block must come from the stage before. After its last
own block a stage that is not the last one leaves forward by :class:`StageDone`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.copies import copied_without_hooks, on_meta
from vescale_parallel._torch_private import pytree

from .placeholders import Placeholder, placeholder
from .stage_assignment import StageMap


class StageDone(BaseException):
    """Leaves the model's forward with the activation for the next stage.

    A BaseException, so that ``except Exception`` in a model does not swallow it.
    """

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self.activation = activation


@dataclass(eq=False)
class StageRun:
    """The pass of one micro-batch through one stage.

    Attributes:
        stage: Index of the stage.
        first_block: Index of its first own block.
        end_block: Index after its last own block.
        is_last: Whether it is the last stage of the pipeline.
        receive: Returns the activation from the stage before, given a tensor of its shape.
        owns_outside: Whether modules outside the blocks may run on their stage.
        blocks_called: Number of blocks called so far.
        last_output: What the block before returned, if it was a placeholder.
    """

    stage: int
    first_block: int
    end_block: int
    is_last: bool
    receive: Callable[[Tensor], Tensor]
    owns_outside: bool = True
    blocks_called: int = 0
    last_output: Placeholder | None = None

    def check_complete(self, num_blocks: int) -> None:
        """Raise if forward has returned on this stage without calling all blocks."""
        if not self.is_last or self.blocks_called != num_blocks:
            raise ValueError(
                f"expected forward to call all {num_blocks} blocks before it returns, as pipeline "
                f"parallelism needs, got {self.blocks_called}; "
                "use pipeline_parallel.size 1 for a model that skips blocks"
            )

    @classmethod
    def counting(cls, num_blocks: int) -> StageRun:
        """Return a run in which modules with parameters give placeholders, to see the targets."""

        def receive(like: Tensor) -> Tensor:
            raise AssertionError("nothing is received while counting")

        return cls(1, num_blocks, num_blocks, True, receive, owns_outside=False)


@dataclass(eq=False)
class Staging:
    """What the staged modules of one model share: the run in progress, if any."""

    run: StageRun | None = None
    outlines: dict[Any, Any] = field(default_factory=dict[Any, Any])


@dataclass(eq=False)
class _Role:
    """What a staged module is: block number ``index``, or outside the blocks (None)."""

    staging: Staging
    fqn: str
    index: int | None
    stages: frozenset[int]
    skeleton: nn.Module


class StagedModule(nn.Module):
    """Mixed into the class of a module, so that a call may be answered by a placeholder."""

    _vescale_role: _Role

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role = self._vescale_role
        run = role.staging.run
        if run is None:
            return super().__call__(*args, **kwargs)
        if role.index is None:
            return self._call_outside(role, run, args, kwargs)
        expected, run.blocks_called = run.blocks_called, run.blocks_called + 1
        if role.index != expected:
            raise ValueError(
                f"pipeline parallelism needs the blocks to be called once each and in order, "
                f"but {role.fqn!r} was call number {expected}"
            )
        if not run.first_block <= role.index < run.end_block:
            output = _placeholder(role, args, kwargs)
            run.last_output = _first_floating(output)
            return output
        if role.index == run.first_block:
            if run.stage > 0:
                args, kwargs = _with_received(role, run, args, kwargs)
            # No placeholder is needed any more; using one would be a mistake.
            Placeholder.usable = False
        _refuse_placeholders(role, args, kwargs)
        output = super().__call__(*args, **kwargs)
        if role.index == run.end_block - 1 and not run.is_last:
            raise StageDone(_activation(role, output))
        return output

    def _call_outside(
        self, role: _Role, run: StageRun, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not run.owns_outside:
            return _placeholder(role, args, kwargs)
        if run.stage in role.stages:
            return super().__call__(*args, **kwargs)
        if run.blocks_called >= run.end_block or run.stage == 0:
            when, key, other = (
                ("after", "tail", "head") if run.stage else ("before", "head", "tail")
            )
            raise ValueError(
                f"{role.fqn!r} is called {when} the blocks of the model, but its parameters "
                f"are on stage {min(role.stages)}; list it in pipeline_parallel.{key}_modules "
                f"(and not in {other}_modules), or give generate_plan an example_batch"
            )
        return _placeholder(role, args, kwargs)


def stage_model(
    model: nn.Module, stages: StageMap, staging: Staging, param_dtype: torch.dtype | None
) -> None:
    """Let every module with parameters be answered by a placeholder on other stages, in place."""
    # Skeletons are copied from whole modules, so before any is changed.
    roles = [
        (fqn, index, (stages.stage_of_block(index),)) for index, fqn in enumerate(stages.blocks)
    ]
    roles += [(fqn, None, (stage,)) for fqn, stage in stages.outside.items()]
    for fqn, index, owners in roles:
        stage_module(
            model.get_submodule(fqn),
            staging,
            fqn=fqn,
            index=index,
            stages=owners,
            param_dtype=param_dtype,
        )


def stage_module(
    module: nn.Module,
    staging: Staging,
    *,
    fqn: str,
    index: int | None,
    stages: Sequence[int],
    param_dtype: torch.dtype | None,
) -> None:
    """Let calls of a module be answered by a placeholder, in place.

    It is a block, ``index`` being its number among the blocks, or a module with parameters
    outside of them (None). ``param_dtype`` is that of its parameters in compute, None for their
    own; ``staging`` is shared by all staged modules of the model.
    """
    role = _Role(staging, fqn, index, frozenset(stages), _skeleton(module, param_dtype))
    cls = type(module)
    module.__class__ = type(cls.__name__, (StagedModule, cls), {"__module__": cls.__module__})
    assert isinstance(module, StagedModule)
    # Not through nn.Module.__setattr__, which would register the skeleton as a submodule.
    object.__setattr__(module, "_vescale_role", role)


def _skeleton(module: nn.Module, param_dtype: torch.dtype | None) -> nn.Module:
    """Copy a module without its tensors' memory."""

    def empty_parameter(parameter: nn.Parameter) -> nn.Parameter:
        dtype = param_dtype if param_dtype and parameter.is_floating_point() else parameter.dtype
        empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
        return nn.Parameter(empty, requires_grad=False)

    return copied_without_hooks(module, empty_parameter, on_meta)


def _placeholder(role: _Role, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what the module would, with every tensor replaced by memory-free zeros."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    device = next((t.device for t in tensors), torch.device("cpu"))
    key = (role.skeleton, role.skeleton.training, str(spec), tuple(map(_kind, leaves)))
    outline = role.staging.outlines.get(key)
    if outline is None:
        outline = _outline(role, args, kwargs)
        role.staging.outlines[key] = outline

    def zeros(leaf: Tensor) -> Tensor:
        return placeholder(leaf.shape, leaf.dtype, device)

    return pytree.tree_map_only(Tensor, zeros, outline)


def _kind(leaf: object) -> object:
    """Return what of an argument the shape of the result may depend on."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    # By value as far as equal ones can be told, True from 1 as well.
    return (type(leaf), leaf) if isinstance(leaf, bool | int | float | str) else type(leaf)


def _outline(role: _Role, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    meta_args, meta_kwargs = pytree.tree_map_only(Tensor, on_meta, (args, dict(kwargs)))
    try:
        with torch.no_grad():
            return role.skeleton(*meta_args, **meta_kwargs)
    except Exception as error:
        raise ValueError(
            f"pipeline parallelism could not find out the shape that {role.fqn!r} returns "
            f"without running it: {type(error).__name__}: {error}"
        ) from error


def _with_received(
    role: _Role, run: StageRun, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the placeholder among a block's arguments by the activation of the stage before."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    expected = run.last_output
    places = [index for index, leaf in enumerate(leaves) if leaf is expected]
    if expected is None or not places:
        raise ValueError(
            f"pipeline parallelism passes the output of one block to the next, but {role.fqn!r} "
            "is not called with what the block before it returned; move what happens between "
            "the blocks into a block, or split elsewhere (pipeline_parallel.split_points)"
        )
    received = run.receive(expected)
    for index in places:
        leaves[index] = received
    return pytree.tree_unflatten(leaves, spec)


def _refuse_placeholders(role: _Role, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    if any(isinstance(leaf, Placeholder) for leaf in leaves):
        raise ValueError(
            f"pipeline parallelism passes one activation from block to block, but {role.fqn!r} "
            "is called with another tensor that depends on parameters of another stage"
        )


def _first_floating(output: Any) -> Placeholder | None:
    leaves = pytree.tree_leaves(output)
    return next(
        (x for x in leaves if isinstance(x, Placeholder) and x.dtype.is_floating_point), None
    )


def _activation(role: _Role, output: Any) -> Tensor:
    """Return what goes to the next stage: the tensor that the next stage expects there.

    Other tensors that a block returns are placeholders on later stages, which raise if used.
    """
    leaves = pytree.tree_leaves(output)
    floating = (x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
    activation = next(floating, None)
    if activation is None:
        raise ValueError(
            f"pipeline parallelism sends a block's output to the next stage, but {role.fqn!r} "
            "returns no floating-point tensor"
        )
    return activation
