"""Buffers that forward changes, under a pipeline: every rank has what one device has.

A pipeline runs the model's forward once for each micro-batch and stage, and once more to count
targets. Every run starts from the buffers as they were before the step. What the runs leave must
be one value: a counter of steps, the vectors of a spectral norm, but not statistics of a
micro-batch. Stages that did not run a buffer's module get it from one that did.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import named_failures
from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._model.buffers import Buffers, BuffersBefore, Change


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of a buffer that it changed; no digest if its runs differ."""

    digest: bytes | None
    is_new: bool


_Changed = tuple[dict[str, _Told], set[str]]


class StageBuffers:
    """The buffers of a model; ``group`` has the ranks of its stages, None without a pipeline."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._buffers, self._group = Buffers(model, ""), group
        self._owners: dict[object, Mapping[str, int]] = {}

    @contextlib.contextmanager
    def call(self, forward: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Give forward as it is to run within one step. Every rank must call this.

        Raises:
            ValueError: If the runs of forward leave a buffer with different values, or backward
                changes one.
        """
        form = (self._buffers.form(), torch.is_grad_enabled())
        before = self._buffers.now(form)
        changes: dict[str, list[Change]] = {}

        def from_before(*args: Any, **kwargs: Any) -> Any:
            with before.back(changes):
                return forward(*args, **kwargs)

        yield from_before
        if self._buffers.is_known(form):
            before.keep_copies_of(self._buffers.known(form) | before.changed(by_value=False))
        else:
            self._learn(form, changes, before.changed(by_value=True))
        for fqn, found in changes.items():
            before.set(fqn, found[-1])
        self._send(before, self._owners[form])

    def _learn(
        self, form: object, changes: Mapping[str, list[Change]], elsewhere: set[str]
    ) -> None:
        told = {fqn: _told(found) for fqn, found in changes.items()}
        changed: list[_Changed] = gathered_objects(
            (told, elsewhere), () if self._group is None else (self._group,)
        )
        _refuse_changes_in_backward(sorted(set[str]().union(*(names for _, names in changed))))
        of_ranks = [found for found, _ in changed]
        owners: dict[str, int] = {}
        for fqn in sorted({fqn for each in of_ranks for fqn in each}):
            found = {rank: each[fqn] for rank, each in enumerate(of_ranks) if fqn in each}
            missing = len(found) < len(changed)
            is_new = any(each.is_new for each in found.values())
            if is_new and not self._buffers.is_persistent(fqn):
                continue  # a cache, which the ranks that use it make
            digests = {each.digest for each in found.values()}
            if len(digests) > 1 or None in digests or (is_new and missing):
                raise ValueError(
                    f"the buffer {fqn!r} is changed by forward in a way that depends on the "
                    "micro-batch or on the stage, which a pipeline, or "
                    "batch.gradient_accumulation, runs one after the other; one device changes "
                    "it once, from the whole batch. Use neither, or keep the buffer from changing"
                )
            if missing:
                owners[fqn] = min(found)
        self._owners[form] = owners
        self._buffers.learn(form, {fqn for each in of_ranks for fqn in each})

    def _send(self, before: BuffersBefore, owners: Mapping[str, int]) -> None:
        """Send buffers from stages that changed them to the others, those of a dtype at once."""
        together: dict[tuple[int, torch.dtype], list[str]] = {}
        for fqn, owner in owners.items():
            together.setdefault((owner, before.value(fqn).dtype), []).append(fqn)
        for (owner, _), names in together.items():
            flat = torch.cat([before.value(fqn).reshape(-1) for fqn in names])
            with named_failures():
                dist.broadcast(flat, group=self._group, group_src=owner)
            if dist.get_rank(self._group) != owner:
                parts = flat.split([before.value(fqn).numel() for fqn in names])
                for fqn, part in zip(names, parts, strict=True):
                    before.fill(fqn, part.view(before.value(fqn).shape))


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


def _told(changes: list[Change]) -> _Told:
    digests = {_digest(change.value) for change in changes}
    return _Told(
        digests.pop() if len(digests) == 1 else None, any(change.is_new for change in changes)
    )


def _digest(tensor: Tensor) -> bytes:
    held = tensor.detach().cpu().contiguous().reshape(-1)
    data = held.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data).digest()
