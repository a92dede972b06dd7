"""Whether ranks were given the rows they should: those of one copy of the model the same ones.

[Note: when inputs are compared] In the first calls, and rarely afterwards. What is compared is a
few numbers. A GPU makes them and they are looked at in the next call, when they have long arrived:
no call waits for its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import named_failures
from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._mesh.mesh import axis_group, data_axes
from vescale_parallel._model.user_line import warn_at_user_line

from .digest import Digest, Leaf, difference, digest_of

_FIRST_CALLS, _EVERY = 4, 64
_HOW = (
    "DistributedSampler(dataset, num_replicas=plan.data_parallel.size, "
    "rank=vescale_parallel.data_parallel_rank(model)), or give parallelize the data set: it "
    "returns a loader that does"
)


class SameInputs:
    """Compares what ranks are called with.

    Args:
        model: Whose arguments they are.
        mesh: The plan's mesh. Ranks along its ``tp`` and ``pp`` axes share rows, those along the
            data-parallel axes do not, but for those of a context.
        context: Ranks that share sequences, and so rows; None if this one shares none.
        is_delayed: Whether a call looks at what the call before it sent.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        context: dist.ProcessGroup | None = None,
        *,
        is_delayed: bool,
    ) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        self._names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._device, self._is_delayed = torch.device(mesh.device_type), is_delayed
        self._same = groups_along(mesh, "tp", "pp") + ([] if context is None else [context])
        self._copies = 1 if context is None else context.size()
        self._other = groups_along(mesh, *reversed(data_axes(mesh)))
        self._num_calls = 0
        self._sent: tuple[int, Digest, _Arriving] | None = None
        # Of data-parallel ranks: what to send after backward, and what arrived.
        self._own_rows: Tensor | None = None
        self._all_rows: _Arriving | None = None
        self._has_compared_rows = not self._other

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare a call's arguments between ranks if it is this call's turn.

        Raises:
            ValueError: On all ranks that share rows, if they were given different ones.
        """
        self._warn_of_same_rows()
        call, self._num_calls = self._num_calls, self._num_calls + 1
        sent, self._sent = self._sent, None
        if sent is not None:
            self._look(*sent)
        is_turn = bool(self._same) and (call < _FIRST_CALLS or call % _EVERY == 0)
        wants_rows = not self._has_compared_rows and torch.is_grad_enabled()
        if not (is_turn or wants_rows):
            return
        digest = digest_of(self._named(args, kwargs), self._device)
        if wants_rows and len(digest.numbers):
            self._own_rows = digest.row[1:]
        if is_turn:
            self._sent = call, digest, _Arriving(gathered_rows(digest.row, self._same))
        # The first time at once: ranks that differ in shapes would not get through the call.
        if self._sent is not None and (call == 0 or not self._is_delayed):
            sent, self._sent = self._sent, None
            self._look(*sent)

    def after_backward(self) -> None:
        """Exchange, once, what data-parallel ranks were called with. Every rank must call this.

        Not before: a forward pass alone may be one that a single rank runs.
        """
        if self._own_rows is None or self._has_compared_rows:
            return
        self._has_compared_rows = True
        self._all_rows = _Arriving(gathered_rows(self._own_rows, self._other))
        self._own_rows = None

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = [*self._names, *(f"argument {i}" for i in range(len(self._names), len(args)))]
        named = dict(zip(names, args, strict=False)) | dict(kwargs)
        # In which order a call names its arguments makes no difference to the call.
        return {name: named[name] for name in sorted(named)}

    def _look(self, call: int, digest: Digest, arriving: _Arriving) -> None:
        if len(set(arriving.wait())) == 1:
            return
        own = (dist.get_rank(), digest.with_numbers())
        found: list[tuple[int, list[Leaf]]] = gathered_objects(own, self._same)
        if told := difference(dict(sorted(found))):
            raise ValueError(
                f"ranks that work on the same rows were given different ones: {told}, in call "
                f"number {call} of the model. Tensor-, pipeline- and context-parallel "
                f"ranks share their rows; sample by data-parallel rank: {_HOW}"
            )

    def _warn_of_same_rows(self) -> None:
        if self._all_rows is None:
            return
        rows, self._all_rows = self._all_rows.wait(), None
        num_parts = len(rows) // self._copies
        if len(set(rows)) < num_parts:
            warn_at_user_line(
                f"{num_parts} data-parallel ranks were called with {len(set(rows))} different "
                "batches: rows count more than once, and an epoch goes through the data as many "
                f"times. Sample by data-parallel rank: {_HOW}"
            )


class _Arriving:
    """Numbers that are on their way from a device: one row a rank."""

    def __init__(self, rows: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if rows.device.type == "cuda":
            # Not by .tolist(), which would wait for all that was launched until then.
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            self._event, rows = torch.cuda.Event(), host
            self._event.record()
        self._rows = rows

    def wait(self) -> list[tuple[int, ...]]:
        if self._event is not None:
            self._event.synchronize()
        return [tuple(row) for row in self._rows.tolist()]


def groups_along(mesh: DeviceMesh, *axes: str) -> list[dist.ProcessGroup]:
    """Return the groups of several axes, of those that have some."""
    found = [axis_group(mesh, axis) for axis in axes]
    return [group for group in found if group is not None]


def gathered_rows(row: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """Return the rows of all ranks along several axes: (ranks, len(row))."""
    rows = row.unsqueeze(0)
    for group in groups:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        with named_failures():
            dist.all_gather(parts, rows, group=group)
        rows = torch.cat(parts)
    return rows
