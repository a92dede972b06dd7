"""Collectives that are started, and waited for when their result is needed.

[Note: order of collectives] The ranks of a group have to start its collectives in one order, these
and the others; in which order they wait is each one's own business. Until then nobody may write to
what is sent, read or write ``out``, or give either's memory back. A GPU does the transfer on the
stream of its process group, after what the current stream was asked to do at the start; waiting
has the stream that is current then wait for it, and does not stop the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import functional
from .checks import check_divisible, check_out
from .collectives import Axes, Where
from .events import CommunicationKind
from .failures import named_failures
from .groups import Peers, peers_of
from .in_place import all_gather_single, all_to_all_single, reduce_scatter_single
from .ordered_reduce import Reduction, all_reduce_parts, reduce_scatter_parts
from .positions import Collective
from .primitives import all_gather_into, all_to_all_into, joined, parts_of, tell_peers
from .profiling import collective_range, is_profiled, name_of, profiler_range
from .waiting import finish, refuse_abandoned

_LIBRARY = Reduction(order="library")


class CollectiveWork:
    """A collective that was started. :meth:`wait` ends it.

    It keeps the tensors of the collective alive until then. What goes wrong on another rank is
    raised by :meth:`wait`, as by a collective that is not asynchronous: with the rank's name.
    """

    def __init__(
        self,
        kind: str,
        out: Tensor,
        peers: Peers,
        work: dist.Work | None = None,
        sent: Tensor | None = None,
    ) -> None:
        self._kind, self._out, self._peers = kind, out, peers
        self._work, self._sent = work, sent

    def wait(self) -> Tensor:
        """Wait until the result is there, and return ``out``; a second time at once."""
        if self._work is not None:
            with self._range(), named_failures(of=Collective(self._kind, self._peers, name_of)):
                refuse_abandoned(self._peers.group)
                finish(self._work, self._out, self._peers.group)
            self._work = self._sent = None
        return self._out

    def _range(self) -> Any:
        name = name_of(self._peers) if is_profiled() else ""
        return profiler_range("wait for", self._kind, "over", name)


def start_all_gather(
    tensor: Tensor, where: Where, *, axes: Axes = None, out: Tensor
) -> CollectiveWork:
    """Start to write the tensors of all ranks to ``out``, in rank order.

    Every rank of ``where`` must call this. See [Note: order of collectives].

    Args:
        tensor: Contiguous, of the same shape and dtype on every rank; without gradients.
        where: A process group, or a mesh.
        axes: As for :func:`all_reduce`.
        out: Contiguous, (ranks, *shape).

    Returns:
        What waits for it, and returns ``out``: the bits that ``all_gather(.., out=out)`` gives.

    Raises:
        ValueError: Before any communication, if ``out`` does not fit.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from vescale_dtensor import emulate
        >>> with emulate(2):
        ...     mesh, out = init_device_mesh("cpu", (2,)), torch.empty(2, 3)
        ...     work = start_all_gather(torch.ones(3), mesh, out=out)
        ...     work.wait().sum()
        tensor(6.)
    """
    peers = peers_of(where, axes)
    shape = torch.Size((peers.num_ranks, *tensor.shape))
    check_out(out, tensor, shape, is_uneven=False)
    if not _is_sent(tensor, peers):
        all_gather_into(out, tensor, peers)
        return CollectiveWork("all_gather", out, peers)
    away = (peers.num_ranks - 1) * tensor.numel()
    sent = tensor.unsqueeze(0)
    return _started("all_gather", away, all_gather_single, out, sent, peers)


def start_all_to_all(
    tensor: Tensor, where: Where, *, axes: Axes = None, out: Tensor
) -> CollectiveWork:
    """Start to send every rank its split of dim 0; what arrives is written to ``out``.

    Every rank of ``where`` must call this. See [Note: order of collectives]. What
    :func:`ordered_sum` makes of ``out`` afterwards is a reduction in rank order.

    Args:
        tensor: Contiguous, of a dim 0 that divides over the ranks; without gradients.
        where: A process group, or a mesh.
        axes: As for :func:`all_reduce`.
        out: Contiguous, of the shape of ``tensor``.

    Returns:
        What waits for it, and returns ``out``: the bits that ``all_to_all(.., out=out)`` gives.

    Raises:
        ValueError: Before any communication, if an argument does not fit.
    """
    peers = peers_of(where, axes)
    check_out(out, tensor, tensor.shape, is_uneven=False)
    check_divisible(tensor, peers)
    if not _is_sent(tensor, peers):
        all_to_all_into(out, tensor, peers)
        return CollectiveWork("all_to_all", out, peers)
    away = tensor.numel() // peers.num_ranks * (peers.num_ranks - 1)
    return _started("all_to_all", away, all_to_all_single, out, tensor, peers)


def start_reduce_scatter(
    rows: Tensor, where: Where, *, axes: Axes = None, out: Tensor
) -> CollectiveWork:
    """Start to sum row r of every rank onto rank r, in the order that the backend likes.

    Every rank of ``where`` must call this. See [Note: order of collectives].

    Args:
        rows: Contiguous, (ranks, *shape); without gradients.
        where: A process group, or a mesh.
        axes: As for :func:`all_reduce`.
        out: Contiguous, (*shape).

    Returns:
        What waits for it, and returns ``out``: the sum that is meant for this rank.

    Raises:
        ValueError: Before any communication, if an argument does not fit.
    """
    peers = peers_of(where, axes)
    check_out(out, rows, rows.shape[1:], is_uneven=False)
    if not rows.ndim or rows.shape[0] != peers.num_ranks:
        raise ValueError(
            f"expected one row per rank ({peers.num_ranks}), got shape {tuple(rows.shape)}"
        )
    if not _is_sent(rows, peers):
        parts = reduce_scatter_parts(parts_of(rows, peers), None, peers, _LIBRARY)
        out.copy_(joined(parts, peers))
        return CollectiveWork("reduce_scatter", out, peers)
    away = (peers.num_ranks - 1) * out.numel()

    def run(out: Tensor, rows: Tensor, **options: Any) -> Any:
        return reduce_scatter_single(out.unsqueeze(0), rows, **options)

    return _started("reduce_scatter", away, run, out, rows, peers)


def start_all_reduce(tensor: Tensor, where: Where, *, axes: Axes = None) -> CollectiveWork:
    """Start to sum a tensor over ranks where it is, in the order that the backend likes.

    Every rank of ``where`` must call this. See [Note: order of collectives].

    Args:
        tensor: Contiguous, of the same shape and dtype on every rank; without gradients.
        where: A process group, or a mesh.
        axes: As for :func:`all_reduce`.

    Returns:
        What waits for it, and returns ``tensor``, which has the sum then.

    Raises:
        ValueError: Before any communication, if the tensor is not contiguous or has gradients.
    """
    peers = peers_of(where, axes)
    check_out(tensor, tensor, tensor.shape, is_uneven=False)
    if not _is_sent(tensor, peers):
        parts = all_reduce_parts(parts_of(tensor, peers), peers, _LIBRARY)
        tensor.copy_(joined(parts, peers))
        return CollectiveWork("all_reduce", tensor, peers)
    away = 2 * (peers.num_ranks - 1) * tensor.numel() // peers.num_ranks

    def run(out: Tensor, _: Tensor, **options: Any) -> Any:
        return dist.all_reduce(out, **options)

    return _started("all_reduce", away, run, tensor, tensor, peers)


def _is_sent(tensor: Tensor, peers: Peers) -> bool:
    """Whether processes exchange it as it is, and nothing is done to what arrives."""
    in_place = peers.num_ranks > 1 and peers.emulated is None and peers.order is None
    return in_place and not functional.is_traced(tensor)


def _started(
    kind: CommunicationKind,
    numel: int,
    run: Callable[..., Any],
    out: Tensor,
    sent: Tensor,
    peers: Peers,
) -> CollectiveWork:
    tell_peers(kind, numel, sent.dtype, peers)
    with (
        collective_range(kind, peers),
        named_failures(completes=False, of=Collective(kind, peers, name_of)),
    ):
        refuse_abandoned(peers.group)
        work = run(out, sent, group=peers.group, async_op=True)
    return CollectiveWork(kind, out, peers, work, sent)
