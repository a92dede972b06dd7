"""Buffers that forward changes, under a pipeline: every rank has what one device has.

[Note: buffers of a pipeline]
A pipeline runs the model's forward once for each micro-batch and stage, and once more to count
targets. Every run starts from the buffers as they were before the step. What the runs of
micro-batches leave must be one value: a counter of steps, the vectors of a spectral norm, but not
statistics of a micro-batch. What rows are known to add is added up over micro-batches.

Code between the modules that stages own runs on every stage, as far as the stage goes, so each
has the changes that are made there. A change that an own module makes, a block for example, only
its stage has: later stages must not use that buffer behind it. In the first call of a form ranks
tell each other what their stages use and change, and where. The value after the step is that of
the stage that changes the buffer last, and ranks that have another one get it from there.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import named_failures
from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._model.buffers import Buffers, BuffersBefore, Change
from vescale_parallel._model.several_runs.written_inputs import WrittenInputs
from vescale_parallel._pipeline.stage_module import StageRun, Staging

from .attributes import StageAttributes
from .uses import SeenUses, Use


@dataclass(frozen=True)
class _Left:
    """What the runs of a stage leave in a buffer; no digest if they differ.

    Attributes:
        digest: Of its values, dtype and shape.
        is_new: Whether another tensor hangs there.
        has_form: Whether that has the dtype and shape of the one before.
    """

    digest: bytes | None
    is_new: bool
    has_form: bool


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others, by the numbers of its stages and the names of buffers.

    ``elsewhere`` has the buffers that something but forward changed.
    """

    left: Mapping[int, Mapping[str, _Left]]
    uses: Mapping[int, Mapping[str, Use]]
    elsewhere: set[str]


@dataclass(frozen=True)
class _Known:
    """What is known of the buffers that a form of call changes.

    Attributes:
        stages: Of this rank, the stage whose values count.
        senders: The rank that others get it from.
        new: Those that are sent and that forward hangs other tensors in the place of.
    """

    stages: dict[str, int] = field(default_factory=dict[str, int])
    senders: dict[str, int] = field(default_factory=dict[str, int])
    new: set[str] = field(default_factory=set[str])


@dataclass(eq=False)
class _Runs:
    """The runs of forward in a call: what they leave in buffers, and use, by their stages."""

    changes: dict[int, dict[str, list[Change]]] = field(
        default_factory=dict[int, dict[str, list[Change]]]
    )
    uses: dict[int, dict[str, Use]] = field(default_factory=dict[int, dict[str, Use]])

    @contextlib.contextmanager
    def watched(
        self, before: BuffersBefore, run: StageRun, found: dict[str, list[Change]]
    ) -> Iterator[None]:
        """Run forward within this, from buffers as they were, and see what it uses of them."""
        with contextlib.ExitStack() as ends:  # also where a stage leaves forward midway
            seen = SeenUses(lambda: run.blocks_called)
            ends.callback(self._note, run.stage, seen, found)
            ends.enter_context(before.back(found))
            seen.begin(before.hung())
            run.around_own = seen.own_module
            ends.callback(seen.look)
            with seen:
                yield

    def sum_up(self, begin: Mapping[str, Tensor]) -> None:
        """Have all runs of a stage leave what they added to buffers, given what these were."""
        for of_stage in self.changes.values():
            for fqn in of_stage.keys() & begin.keys():
                found = of_stage[fqn]
                added = torch.stack([change.value - begin[fqn] for change in found])
                total = begin[fqn] + added.sum(0, dtype=added.dtype)
                of_stage[fqn] = [replace(found[-1], value=total)]

    def _note(self, stage: int, seen: SeenUses, found: Mapping[str, list[Change]]) -> None:
        for fqn in found:
            seen.changed_unseen(fqn)
        held = self.uses.setdefault(stage, {})
        for fqn, use in seen.uses.items():
            held[fqn] = held[fqn].also(use) if fqn in held else use


class StageBuffers:
    """The buffers of a model.

    Args:
        model: The model.
        group: The ranks of its stages, None without a pipeline.
        staging: Shared with its staged modules.
        summed: Tells which buffers micro-batches add to in a call.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        staging: Staging | None = None,
        *,
        summed: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._buffers, self._group = Buffers(model, ""), group
        self._attributes = StageAttributes(model, group)
        self._inputs = WrittenInputs()
        self._staging = Staging() if staging is None else staging
        self._known: dict[object, _Known] = {}
        self._summed = summed

    @contextlib.contextmanager
    def call(
        self, forward: Callable[..., Any], form: object = None
    ) -> Iterator[Callable[..., Any]]:
        """Give forward as it is to run within one step. Every rank must call this.

        ``form`` is what else than modes may decide which buffers it changes.

        Raises:
            ValueError: If the runs of forward leave a buffer with different values, if backward
                changes one, or if a stage uses one that an earlier stage changes.
        """
        form = (self._buffers.form(), torch.is_grad_enabled(), form)
        before, runs = self._buffers.now(form), _Runs()
        is_known = self._buffers.is_known(form)
        attributes, inputs = self._attributes.of_call(), self._inputs.of_call(form)

        def from_before(*args: Any, **kwargs: Any) -> Any:
            run = self._staging.run
            counts = run is not None and not run.owns_outside
            has_graph = torch.is_grad_enabled() if run is None else run.owns_outside
            with (
                attributes.run(0 if run is None else run.stage, is_kept=not counts),
                inputs.run((args, kwargs), counts=not has_graph) as (args, kwargs),
            ):
                return from_buffers(run, *args, **kwargs)

        def from_buffers(run: StageRun | None, *args: Any, **kwargs: Any) -> Any:
            if run is not None and not run.owns_outside:  # it counts targets
                with before.back():
                    return forward(*args, **kwargs)
            found = runs.changes.setdefault(0 if run is None else run.stage, {})
            if run is None or is_known:
                with before.back(found):
                    return forward(*args, **kwargs)
            with runs.watched(before, run, found):
                return forward(*args, **kwargs)

        yield from_before
        inputs.end()
        runs.sum_up({fqn: before.copied(fqn) for fqn in self._summed()})
        self._attributes.end(attributes, form)
        if is_known:
            before.keep_copies_of(self._buffers.known(form) | before.changed(by_value=False))
        else:
            self._learn(form, runs, before.changed(by_value=True))
        known = self._known[form]
        for fqn, stage in known.stages.items():
            if fqn in runs.changes.get(stage, {}):
                before.set(fqn, runs.changes[stage][fqn][-1])
        self._send(before, known)

    def _learn(self, form: object, runs: _Runs, elsewhere: set[str]) -> None:
        left = {
            stage: {fqn: _left(found) for fqn, found in each.items()}
            for stage, each in runs.changes.items()
        }
        groups = () if self._group is None else (self._group,)
        told: list[_Told] = gathered_objects(_Told(left, runs.uses, elsewhere), groups)
        _refuse_changes_in_backward(sorted(set[str]().union(*(each.elsewhere for each in told))))
        known, rank = _Known(), 0 if self._group is None else dist.get_rank(self._group)
        names = {fqn for each in told for of_stage in each.left.values() for fqn in of_stage}
        for fqn in sorted(names):
            _refuse_later_uses(fqn, told)
            _learn_of(fqn, told, rank, self._buffers.is_persistent(fqn), known)
        self._known[form] = known
        self._buffers.learn(form, names)

    def _send(self, before: BuffersBefore, known: _Known) -> None:
        """Send buffers from stages that changed them to the others, those of a dtype at once."""
        together: dict[tuple[int, torch.dtype], list[str]] = {}
        for fqn, sender in known.senders.items():
            together.setdefault((sender, before.value(fqn).dtype), []).append(fqn)
        for (sender, _), names in together.items():
            flat = torch.cat([before.value(fqn).reshape(-1) for fqn in names])
            with named_failures():
                dist.broadcast(flat, group=self._group, group_src=sender)
            if dist.get_rank(self._group) == sender:
                continue
            parts = flat.split([before.value(fqn).numel() for fqn in names])
            for fqn, part in zip(names, parts, strict=True):
                value = part.view(before.value(fqn).shape)
                is_new = fqn in known.new
                before.set(fqn, Change(value.clone() if is_new else value, is_new))


def _learn_of(
    fqn: str, told: Sequence[_Told], rank: int, is_persistent: bool, known: _Known
) -> None:
    """Note whose value of a buffer counts, and who sends it.

    Raises:
        ValueError: If there is no one value.
    """
    # Of every rank, its stage that changes it last.
    latest = [_latest(each, fqn) for each in told]
    sender = max(range(len(told)), key=lambda each: latest[each] or (-1, -1))
    pairs = zip(told, latest, strict=True)
    last = [None if at is None else each.left[at[1]][fqn] for each, at in pairs]
    left, at = last[sender], latest[rank]
    assert left is not None
    if at is not None:
        known.stages[fqn] = at[1]
    misses = any(each is None or each.digest != left.digest for each in last)
    if left.digest is not None and (left.has_form or not misses):
        if misses:
            known.senders[fqn] = sender
            if left.is_new:
                known.new.add(fqn)
        return
    if is_persistent or not any(each is not None and each.is_new for each in last):
        raise ValueError(
            f"the buffer {fqn!r} is changed by forward in a way that depends on the "
            "micro-batch, which a pipeline, or batch.gradient_accumulation, runs one after the "
            "other, or to another shape than on other stages; one device changes it once, from "
            "the whole batch. Use neither, or keep the buffer from changing"
        )
    # Else it is a cache, which the ranks that use it make.


def _latest(told: _Told, fqn: str) -> tuple[int, int] | None:
    """Return where a rank changes a buffer last, and in which of its stages."""
    stages = [stage for stage, left in told.left.items() if fqn in left]
    nowhere = dict[str, Use]()
    uses = {stage: told.uses.get(stage, nowhere).get(fqn) for stage in stages}
    return max(
        ((0 if use is None else use.changed, stage) for stage, use in uses.items()), default=None
    )


def _refuse_later_uses(fqn: str, told: Sequence[_Told]) -> None:
    """Refuse what a stage uses of a buffer that a module of an earlier stage has changed."""
    uses = {
        stage: of_stage[fqn]
        for each in told
        for stage, of_stage in each.uses.items()
        if fqn in of_stage
    }
    for stage, use in uses.items():
        if use.changed_by_own is None:
            continue
        later = [n for n, each in uses.items() if n > stage and each.last >= use.changed_by_own]
        if later:
            raise ValueError(
                f"the buffer {fqn!r} is changed by a module of stage {stage} of the pipeline and "
                f"used on stage {min(later)}, which does not have the change. Change it in "
                "forward of the model itself, which all stages run, keep a buffer in each "
                "module, or use pipeline_parallel.size 1"
            )


def _refuse_changes_in_backward(names: Sequence[str]) -> None:
    # Forward runs on copies, so these were written to by something else.
    if names:
        raise ValueError(
            f"the buffer {names[0]!r} is changed in backward, where torch.utils.checkpoint runs "
            "forward again, or is written to under another name. A pipeline, or "
            "batch.gradient_accumulation, does that for every micro-batch; one device does it "
            "once. Have the plan recompute (recompute='full') in place of the model, or keep the "
            "buffer from changing"
        )


def _left(changes: Sequence[Change]) -> _Left:
    digests = {_digest(change.value) for change in changes}
    return _Left(
        digests.pop() if len(digests) == 1 else None,
        any(change.is_new for change in changes),
        all(change.has_form for change in changes),
    )


def _digest(tensor: Tensor) -> bytes:
    held = tensor.detach().cpu().contiguous().reshape(-1)
    data = held.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data).digest()
