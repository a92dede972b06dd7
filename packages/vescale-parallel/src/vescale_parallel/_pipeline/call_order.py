"""In which order blocks, and other modules between them, are called: seen in a run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vescale_dtensor import package_logger
from vescale_parallel._model.blocks import numel_of, pipeline_blocks
from vescale_parallel._model.copies import copied_without_hooks
from vescale_parallel._model.inputs import bind, opened
from vescale_parallel._model.kept_outside import nothing_kept_outside
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._trace.fake_tensors import ObservationError
from vescale_parallel._trace.generators import untouched_generators
from vescale_parallel._trace.observe import observe

from .cuts.block_calls import called_blocks, first_names, names_of_calls, said_calls
from .cuts.observed_split import with_split_points
from .cuts.placeholders import placeholder
from .cuts.values import Name, Values
from .stage_assignment import (
    StageMap,
    held_around,
    is_part,
    modules_outside_blocks,
    places_outside,
)
from .stage_module import StageRun, Staging, stage_model

_log = package_logger(__name__)
# Of blocks, that forward calls outside of these.
_MOST_PARTS = 64


@dataclass(frozen=True)
class _Seen:
    """What one forward was seen to call.

    Attributes:
        calls: The block of every call, in order.
        behind: How many blocks have been called before each call of modules outside of them, and
            before each use of their parameters by code around them; before calls of parts of
            blocks outside of these, too.
    """

    calls: tuple[str, ...]
    behind: Mapping[str, tuple[int, ...]]


class _Places(Values):
    """Notes which blocks are called, and how many before every call of another module.

    And before every use of a parameter, or of what was computed from parameters alone.
    """

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.behind: dict[str, list[int]] = {}
        self.uses: dict[str, set[int]] = {}
        self._blocks = frozenset(blocks)

    def used(self, name: Name) -> None:
        """Note where parameters are needed; activations are sent to where they are."""
        parameters = _parameters_in(name)
        for fqn in parameters or ():
            self.uses.setdefault(fqn, set()).add(len(self.calls))

    def of_call(self, fqn: str) -> Name:
        if fqn in self._blocks:
            self.calls.append(fqn)
        else:
            self.behind.setdefault(fqn, []).append(len(self.calls))
        return super().of_call(fqn)


def _parameters_in(name: Name) -> tuple[str, ...] | None:
    """Return the parameters that alone a value is computed from; None if there is another."""
    kind, *rest = name
    if kind != "function":
        return (rest[0],) if kind == "parameter" else None
    # ("function", what is called, the names of what it was given, the number of the call, place)
    found = [_parameters_in(each) for each in rest if isinstance(each, tuple)]
    if any(each is None for each in found):
        return None
    return tuple(fqn for each in found for fqn in each or ())


def with_stages(
    plan: ParallelPlan, model: nn.Module, batch: Any, *, global_size: int | None = None
) -> ParallelPlan:
    """Return a plan that says what stages are: in which order blocks are called, where it is cut.

    What it says already stays; the order is left out if blocks are called once each in that of
    definition, or if it is not seen. Nobody communicates. Arguments are those of
    :func:`with_split_points`.
    """
    if plan.pipeline_parallel.size == 1:
        return plan
    return staged(plan, model, batch, global_size=global_size)[0]


def staged(
    plan: ParallelPlan, model: nn.Module, batch: Any, *, global_size: int | None = None
) -> tuple[ParallelPlan, Mapping[str, tuple[int, ...]]]:
    """Return the plan of :func:`with_stages` of a pipeline, and what :func:`places_seen` does."""
    pipeline = plan.pipeline_parallel
    in_order = None if pipeline.block_calls else _in_order(model, batch)
    if in_order is not None:
        seen = in_order.behind
    else:
        if not pipeline.block_calls and (calls := calls_of_blocks(model, batch)):
            called = replace(plan, pipeline_parallel=replace(pipeline, block_calls=calls))
            if _blocks_named(plan) <= {*names_of_calls(called, model)}:
                plan = called
        seen = places_seen(plan, model, batch)
    outside = places_outside(plan, model, seen)
    return with_split_points(plan, model, batch, outside, global_size=global_size), seen


def _blocks_named(plan: ParallelPlan) -> set[str]:
    """Return the blocks that a plan names: of a batch without images fewer may be called."""
    pipeline = plan.pipeline_parallel
    behind = (block for blocks in pipeline.called_behind.values() for block in blocks if block)
    return {*pipeline.split_points, *behind}


def calls_of_blocks(model: nn.Module, batch: Any) -> tuple[str, ...]:
    """Return the block of every call, as plans have it: nothing if each is called once in order.

    A module that forward calls again and again is a block, whatever it consists of; see
    [Note: blocks that are called more than once]. Lists of which no block is called, a vision
    tower's where there is text alone, are no blocks.

    Args:
        model: Real, on the meta device, or deferred; not changed.
        batch: An example; None if there is none.

    Example:
        >>> calls_of_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2))
        ()
    """
    if batch is None:
        return ()
    blocks, calls, idle = _called_lists(model, batch)
    if idle:
        return said_calls(model, calls) if blocks and {*calls} == {*blocks} else ()
    if blocks and (calls == blocks or {*calls} != {*blocks}):
        return ()
    again = _called_again(model, batch)
    if again and all(any(fqn.startswith(f"{each}.") for each in again) for fqn in blocks):
        blocks, calls = again, _seen(again, model, batch).calls
    return said_calls(model, calls) if blocks and {*calls} == {*blocks} else ()


def _called_lists(
    model: nn.Module, batch: Any
) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """Return the blocks of lists of which some are called, the calls, and all other blocks.

    Nothing calls a vision tower where there is text alone.
    """
    idle = frozenset[str]()
    while True:
        try:
            blocks = pipeline_blocks(model, idle)
        except ValueError:  # no list, maybe one block
            return (), (), idle
        calls = _seen(blocks, model, batch).calls
        used = {fqn.rpartition(".")[0] for fqn in calls}
        unused = {fqn for fqn in blocks if fqn.rpartition(".")[0] not in used}
        if unused <= idle:
            return blocks, calls, idle
        idle |= unused


def _called_again(model: nn.Module, batch: Any) -> tuple[str, ...]:
    """Return the outermost modules with parameters that are called more than once.

    Of those only that do a good part of the work: an embedding may be called twice, too.
    """
    try:
        ran = observe(model, batch).modules
    except ObservationError:
        return ()
    counts, flops = Counter(call.fqn for call in ran), Counter[str]()
    for call in ran:
        flops[call.fqn] += call.flops
    found: list[str] = []
    for fqn in first_names(model).values():
        is_inside = any(fqn.startswith(f"{outer}.") for outer in found)
        if counts[fqn] > 1 and not is_inside and numel_of(model.get_submodule(fqn)):
            found.append(fqn)
    most = max((flops[fqn] for fqn in found), default=0)
    return tuple(fqn for fqn in found if 5 * flops[fqn] >= most > 0)


def places_seen(plan: ParallelPlan, model: nn.Module, batch: Any) -> Mapping[str, tuple[int, ...]]:
    """Return how many blocks have been called before each call of modules outside the blocks.

    The model's own code is run on the batch with placeholders for what has parameters. Nothing is
    returned of models whose code cannot be run so: their modules are where they are defined.
    """
    return {} if plan.pipeline_parallel.size == 1 else _places_in(plan, model, batch)


def observed_calls(
    model: nn.Module, batch: Any, block_calls: Sequence[str] = ()
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return what a pipeline has to know of the order of calls, as plans have it.

    The model's own code is run on the batch without its parameters; nothing is known of models
    that do not run so.

    Args:
        model: Real, on the meta device, or deferred; not changed.
        batch: An example; None if there is none.
        block_calls: The first result, where a plan says it.

    Returns:
        ``block_calls``, the block of every call, which is empty if each is called once, in order;
        and ``called_behind``, the blocks behind which modules outside of them are called, of those
        that are called between blocks or in several places (``""`` is before all blocks), and
        likewise of parameters outside of blocks that code around modules uses.

    Example:
        >>> observed_calls(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2))
        ((), {})
    """
    calls = tuple(block_calls)
    seen = _in_order(model, batch) if not calls else None
    if not calls and seen is None:
        calls = calls_of_blocks(model, batch)
    pipeline = replace(ParallelPlan().pipeline_parallel, block_calls=calls)
    plan = replace(ParallelPlan(), pipeline_parallel=pipeline)
    try:
        called = called_blocks(plan, model)
    except ValueError:  # nothing that a pipeline could be cut between
        return calls, {}
    blocks, held = ("", *names_of_calls(plan, model)), held_around(model, called)
    behind = _places_in(plan, model, batch) if seen is None else seen.behind
    found = {fqn: sorted({*counts}) for fqn, counts in behind.items()}
    first, last = 0, len(blocks) - 1

    def is_said(fqn: str, counts: Sequence[int]) -> bool:
        if is_part(fqn, called):
            return True
        if fqn not in held:
            return counts not in ([first], [last])
        # A parameter that no called module holds is on the first and the last stage anyway.
        return bool({*counts} - {first, last}) or held[fqn]

    return calls, {
        fqn: tuple(blocks[count] for count in counts)
        for fqn, counts in found.items()
        if is_said(fqn, counts)
    }


def _in_order(model: nn.Module, batch: Any) -> _Seen | None:
    """Return what was seen of a model whose blocks are called once each in order, else None."""
    try:
        blocks = pipeline_blocks(model)
    except ValueError:
        return None
    seen = _seen(blocks, model, batch) if batch is not None else None
    return seen if seen is not None and seen.calls == blocks else None


def _places_in(plan: ParallelPlan, model: nn.Module, batch: Any) -> Mapping[str, tuple[int, ...]]:
    if batch is None:
        return {}
    blocks = called_blocks(plan, model)
    seen = _seen(blocks, model, batch)
    return seen.behind if seen.calls == blocks else {}


def _seen(blocks: Sequence[str], model: nn.Module, batch: Any) -> _Seen:
    """Run the model's own code on an example, with placeholders for what has parameters."""
    blocks, parts = tuple(dict.fromkeys(blocks)), list[str]()
    while blocks and len(parts) <= _MOST_PARTS:
        try:
            return _run_around(blocks, parts, model, batch)
        except _PartCalled as called:
            parts.append(called.fqn)
        # Whatever a model's own code does when it runs where it was not made for. Where a module
        # is on another stage than is right, its call there is refused by name.
        except Exception as error:
            _log.info("modules outside the blocks are where they are defined: %r", error)
            break
    return _Seen((), {})


class _PartCalled(BaseException):
    """A module within a block is called outside of it.

    No error of forward: nothing on the way takes it for one.
    """

    def __init__(self, fqn: str, *_: Any) -> None:
        super().__init__(fqn)
        self.fqn = fqn


def _is_called(fqn: str, module: nn.Module, args: Any) -> None:
    raise _PartCalled(fqn)


def _run_around(
    blocks: Sequence[str], parts: Sequence[str], model: nn.Module, batch: Any
) -> _Seen:
    """Return what one run shows; ``parts`` of blocks are known to be called outside of these.

    Raises:
        _PartCalled: If another one is.
    """
    outside = (*blocks, *modules_outside_blocks(model, blocks), *parts)
    places = _Places(blocks)
    held = {id(model.get_parameter(fqn)): fqn for fqn in held_around(model, blocks)}

    def held_or_zeros(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in held:
            return no_parameter(parameter)
        name = ("parameter", held[id(parameter)])
        device = torch.device("cpu")
        made = placeholder(parameter.shape, parameter.dtype, device, places, name)
        return cast("nn.Parameter", made)

    try:
        copied = copied_without_hooks(model, held_or_zeros, no_buffer)
        staging = Staging(alike={})
        names = {fqn: copied.get_submodule(fqn) for fqn in outside}
        stage_model(copied, StageMap((), [0], dict.fromkeys(outside, 0)), staging, None)
        _tell_of_parts(copied, blocks, {*names.values()})
        args, kwargs = bind(copied, opened(batch))
        staging.run = StageRun.counting(0, places)
        with torch.no_grad(), untouched_generators(), nothing_kept_outside(model):
            copied(*args, **kwargs)
    finally:
        places.release()
    # A module may have several names.
    seen = {names[fqn]: tuple(found) for fqn, found in places.behind.items() if fqn in names}
    behind = {fqn: seen[module] for fqn, module in names.items() if module in seen}
    behind |= {fqn: tuple(sorted(counts)) for fqn, counts in places.uses.items()}
    return _Seen(tuple(places.calls), behind)


def _tell_of_parts(
    copied: nn.Module, blocks: Sequence[str], staged: Collection[nn.Module]
) -> None:
    """Have parts of blocks, which placeholders stand for, raise where they are called."""
    for block in blocks:
        for name, part in copied.get_submodule(block).named_modules(prefix=block):
            if part not in staged and any(True for _ in part.parameters()):
                part.register_forward_pre_hook(functools.partial(_is_called, name))


def no_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of zeros, of which there is one in memory."""
    return nn.Parameter(_zeros(parameter), requires_grad=False)


def no_buffer(buffer: Tensor) -> Tensor:
    """Return a copy of a buffer, which forward may write to, or zeros if it has no values yet."""
    if type(buffer) is Tensor and not buffer.is_meta:
        return buffer.detach().clone()
    return _zeros(buffer).contiguous()


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype).expand(like.shape)
