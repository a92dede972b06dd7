"""Keep what forward writes to parameters themselves, as on one device.

[Note: writes in forward] Averaged teachers, codebooks, clamped weights and embeddings with
``max_norm`` change parameters while forward runs. The modules hold plain parameters then, and
their memory may be that of a gather, which is freed, or filled again from every rank's shard. So
behind a forward what was written goes to this rank's shard. Ranks write the same: where it depends
on the rows of the batch they compute it over the whole batch.

What is noticed in every forward is what torch counts, and another tensor given as ``.data``.
Writes to the tensor that ``.data`` returns are not counted: those are found by value in the first
call of each form, as are rows that depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from vescale_parallel._parameters.flat_shards import FlatPlace
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._torch_private import version_of

from .param_group import ParamGroup

_Plain = tuple[ShardedParameter, nn.Parameter, Tensor]


class ForwardWrites:
    """The writes of forward to the parameters of a model.

    Args:
        param_groups: Of the model.
        runs_again: Whether backward runs forward again, which would write twice.

    Attributes:
        is_known: Tells names of parameters that are known to be written by the call that runs;
            None if there are none.
    """

    def __init__(self, param_groups: Sequence[ParamGroup], *, runs_again: bool) -> None:
        self._runs_again = runs_again
        self._plain = {param_group: _plain(param_group.params) for param_group in param_groups}
        self._versions: dict[ParamGroup, list[int]] = {}
        self.is_known: Callable[[str], bool] | None = None

    def begin(self, *param_groups: ParamGroup) -> None:
        """Note what parameters are before forward. They must be gathered."""
        for each in param_groups:
            self._versions[each] = [version_of(plain) for _, plain, _ in self._plain[each]]

    def keep(self, *param_groups: ParamGroup) -> None:
        """Bring what forward wrote since :meth:`begin` to this rank's shards.

        Raises:
            ValueError: If a parameter was written that cannot be.
        """
        for each in param_groups:
            versions = self._versions.pop(each, ())
            for (param, plain, memory), version in zip(self._plain[each], versions, strict=False):
                if (
                    version_of(plain) != version
                    or plain.data_ptr() != memory.data_ptr()
                    or (self.is_known is not None and any(map(self.is_known, param.fqns)))
                ):
                    self._keep(param, plain, memory)

    def _keep(self, param: ShardedParameter, plain: nn.Parameter, memory: Tensor) -> None:
        written = plain.data
        if written.shape != memory.shape or written.dtype != memory.dtype:
            raise ValueError(
                f"forward gave {param.fqns[0]!r} a .data of shape {tuple(written.shape)} and "
                f"dtype {written.dtype}, expected {tuple(memory.shape)} and {memory.dtype}"
            )
        if (why := self._refusal(param)) is not None:
            raise ValueError(
                f"forward writes to the parameter {param.fqns[0]!r}, {why}. Write to it after "
                "optimizer.step(), or make it a buffer"
            )
        if written.data_ptr() != memory.data_ptr():
            memory.copy_(written)
            plain.data = memory
        if param.place is not None:
            self._keep_in_buffer(param, param.place, memory)
        elif not param.shares_storage:
            with torch.no_grad():
                param.local.copy_(memory)

    def _keep_in_buffer(self, param: ShardedParameter, place: FlatPlace, memory: Tensor) -> None:
        shards, index, numel = place.shards, place.index, memory.numel()
        if not shards.is_viewed:
            shards.take_back(index, memory)
        shards.send_gathered(index, numel)
        if shards.is_in_whole:
            increment_version(param.local)  # it has what was written
        elif param.local.numel():
            with torch.no_grad():
                param.local.copy_(shards.gathered_shard_of(index, numel, param.local.shape))
        if not shards.is_viewed:
            shards.release_whole()

    def _refusal(self, param: ShardedParameter) -> str | None:
        assert param.unsharded is not None
        if param.unsharded.shape != param.sharded.shape:
            return "of which ranks hold parts"
        if param.unsharded.dtype != param.sharded.dtype:
            return (
                f"which computes in {param.unsharded.dtype} and is kept in {param.sharded.dtype}"
            )
        if self._runs_again:
            return "and recompute runs forward twice"
        return None


def _plain(params: Sequence[ShardedParameter]) -> list[_Plain]:
    """Return parameters, what computes, and the memory that it has."""
    return [
        (param, param.unsharded, param.unsharded.data)
        for param in params
        if param.unsharded is not None and param.unsharded.numel()
    ]
