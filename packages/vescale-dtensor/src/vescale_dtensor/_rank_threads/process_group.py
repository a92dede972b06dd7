"""A process group whose ranks are threads; torch.distributed calls its methods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor._torch_private import ProcessGroupBase

from .arithmetic import reduced
from .exchanges import Exchanges, Run, ThreadWork, write


class Options(SimpleNamespace):
    """What torch notes on the options of a backend; only the timeout is ever read."""


class ThreadGroup(ProcessGroupBase):
    """The ranks of one group, for one of them.

    Args:
        exchanges: Where the ranks of the emulation meet.
        key: What no other group of the emulation has.
        rank: Of this rank in the group.
        size: Number of ranks.
        timeout: What the program asked for; nothing takes long enough here.
    """

    # Its collectives have to come from the thread of the rank; see the checkpoints of vescale.
    is_for_one_thread = True

    def __init__(
        self, exchanges: Exchanges, key: Any, rank: int, size: int, timeout: timedelta | None
    ) -> None:
        super().__init__(rank, size)
        self._exchanges, self._key, self._rank, self._size = exchanges, key, rank, size
        self.options = Options(_timeout=timeout)
        self._count = 0
        self._name = self._desc = ""
        self.bound_device_id = None

    # What torch asks of a group and of its backend, which are one here.

    def rank(self) -> int:
        """Return this rank's place."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def name(self) -> str:
        """Return the name of the backend."""
        return "threads"

    getBackendName = name

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What torch says the group is for."""
        return self._desc

    @property
    def supports_coalescing(self) -> bool:
        """Whether several collectives can be started as one."""
        return False

    @property
    def supports_splitting(self) -> bool:
        """Whether subgroups can be made from it."""
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return [torch.device(kind) for kind in kinds]

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _get_backend(self, device: torch.device) -> ThreadGroup:
        return self

    def get_group_store(self) -> Any:
        """Return the store of the emulation."""
        return self._exchanges.store

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def shutdown(self) -> None:
        """End the group: there are no connections."""

    abort = shutdown

    # Collectives.

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> ThreadWork:
        """Reduce tensors where they are."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def run(brought: Sequence[Any]) -> None:
            for rows in zip(*brought, strict=True):
                result = reduced(rows, op)
                for row in rows:
                    write(row, result)

        return self._meet("all_reduce", tensors, list(tensors), run, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> ThreadWork:
        """Reduce tensors onto one rank."""

        def run(brought: Sequence[Any]) -> None:
            for rows in zip(*brought, strict=True):
                write(rows[opts.rootRank], reduced(rows, opts.reduceOp, onto_one=True))

        return self._meet(f"reduce to {opts.rootRank}", tensors, list(tensors), run, tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> ThreadWork:
        """Give all ranks the tensors of one."""

        def run(brought: Sequence[Any]) -> None:
            sent = brought[opts.rootRank]
            for rank, own in enumerate(brought):
                for x, out in zip(sent, own, strict=True):
                    if rank != opts.rootRank:
                        write(out, x)

        return self._meet(f"broadcast from {opts.rootRank}", tensors, list(tensors), run, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> ThreadWork:
        """Give all ranks the tensors of all."""

        def run(brought: Sequence[Any]) -> None:
            for outs, _ in brought:
                for place, own in enumerate(outs):
                    for (_, xs), out in zip(brought, own, strict=True):
                        write(out, xs[place])

        return self._meet("all_gather", inputs, (outputs, inputs), run, outputs[0])

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThreadWork:
        """Give all ranks the tensors of all, as one tensor."""
        return self.all_gather_single_coalesced([output], [input])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ThreadWork:
        """Give all ranks several tensors of all, each as one tensor."""

        def run(brought: Sequence[Any]) -> None:
            for place in range(len(inputs)):
                parts = [own_inputs[place] for _, own_inputs in brought]
                for own_outputs, _ in brought:
                    rows = own_outputs[place].detach().view(len(parts), *parts[0].shape)
                    for row, part in zip(rows, parts, strict=True):
                        write(row, part)

        return self._meet("all_gather", inputs, (outputs, inputs), run, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> ThreadWork:
        """Give one rank the tensors of all."""

        def run(brought: Sequence[Any]) -> None:
            for place, own in enumerate(brought[opts.rootRank][0]):
                for (_, xs), out in zip(brought, own, strict=True):
                    write(out, xs[place])

        name = f"gather to {opts.rootRank}"
        return self._meet(name, inputs, (outputs, inputs), run, inputs)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> ThreadWork:
        """Give each rank one of the tensors of one rank."""

        def run(brought: Sequence[Any]) -> None:
            for place, sent in enumerate(brought[opts.rootRank][1]):
                for (outs, _), x in zip(brought, sent, strict=True):
                    write(outs[place], x)

        name = f"scatter from {opts.rootRank}"
        return self._meet(name, outputs, (outputs, inputs), run, outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> ThreadWork:
        """Reduce, and give each rank one of the results."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def run(brought: Sequence[Any]) -> None:
            for place in range(len(outputs)):
                rows = [torch.cat([x.reshape(-1) for x in xs[place]]) for _, xs in brought]
                sizes = [x.numel() for x in brought[0][1][place]]
                for (outs, _), part in zip(brought, reduced(rows, op).split(sizes), strict=True):
                    write(outs[place], part)

        return self._meet("reduce_scatter", outputs, (outputs, inputs), run, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThreadWork:
        """Reduce, and give each rank its rows of the result."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ThreadWork:
        """Reduce several tensors, and give each rank its rows of the results."""
        chunks = [x.reshape(self._size, -1).unbind() for x in inputs]
        return self.reduce_scatter(outputs, chunks, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> ThreadWork:
        """Send each rank rows."""
        outs = output.detach().split(self._splits(output, output_splits))
        parts = input.detach().split(self._splits(input, input_splits))
        return self._all_to_all(outs, parts, output, input.dtype)

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ThreadWork:
        """Send each rank a tensor."""
        return self._all_to_all(outputs, inputs, outputs, inputs[0].dtype)

    def barrier(self, opts: Any = None) -> ThreadWork:
        """Wait until all ranks are here."""
        return self._meet("barrier", (), None, lambda _: None, ())

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until all ranks are here."""
        self.barrier().wait()

    # From rank to rank.

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> ThreadWork:
        """Send a tensor to a rank."""
        name = f"send of {_shown(tensors)} to {target}, tag {tag}, of {self._told}"
        lane = (self._rank, target, tag)
        meeting = self._exchanges.send(self._key, name, lane, tensors[0].detach())
        return ThreadWork(meeting, self._exchanges.baton, tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> ThreadWork:
        """Receive a tensor from a rank."""
        told = "any rank" if source < 0 else str(source)
        name = f"receive of {_shown(tensors)} from {told}, tag {tag}, of {self._told}"
        lane = (source, self._rank, tag)
        meeting = self._exchanges.receive(self._key, name, lane, tensors[0], self._size)
        return ThreadWork(meeting, self._exchanges.baton, tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> ThreadWork:
        """Receive a tensor from whoever sends first."""
        return self.recv(tensors, -1, tag)

    def _all_to_all(
        self, outs: Sequence[Tensor], parts: Sequence[Tensor], result: Any, dtype: torch.dtype
    ) -> ThreadWork:
        def run(brought: Sequence[Any]) -> None:
            for target, (own, _) in enumerate(brought):
                for out, (_, sent) in zip(own, brought, strict=True):
                    if out.numel() != sent[target].numel():
                        raise RuntimeError(
                            f"all_to_all: rank {target} expects {tuple(out.shape)} where "
                            f"{tuple(sent[target].shape)} is sent"
                        )
                    write(out, sent[target])

        kept = [result] if isinstance(result, Tensor) else result
        return self._meet(f"all_to_all of {dtype}", (), (outs, parts), run, kept)

    def _splits(self, x: Tensor, splits: Sequence[int] | None) -> list[int]:
        return list(splits) if splits else [x.shape[0] // self._size] * self._size

    def _meet(
        self,
        kind: str,
        like: Sequence[Tensor],
        brought: Any,
        run: Run,
        result: Sequence[Tensor],
    ) -> ThreadWork:
        name = f"{kind} {_shown(like)} over {self._told}" if like else f"{kind} over {self._told}"
        number, self._count = self._count, self._count + 1
        meeting = self._exchanges.come(
            (self._key, number), name, self._size, self._rank, brought, run
        )
        return ThreadWork(meeting, self._exchanges.baton, result)

    @property
    def _told(self) -> str:
        ranks = getattr(self.options, "global_ranks_in_group", None)
        return f"ranks {', '.join(map(str, ranks))}" if ranks else "all ranks"


def _shown(tensors: Sequence[Tensor]) -> str:
    # gloo pairs by elements: shapes may differ where their numbers do not.
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}[{x.numel()}]" for x in tensors)
