"""Plain parameters that are this rank's shards: for updates that go element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, WatchedMemory, distribute_tensor

from .block_state import BlockState
from .plain import Saved, StateOf, are_same, local_gradient, take_assigned

# A count of steps: whole on every rank even if a parameter is a scalar, too.
_COUNTER = "step"


class LocalShards:
    """This rank's shard of every parameter, made once; it shares the shard's memory.

    Args:
        is_torchs: Whether steps are torch's, which write parameters in place; others may assign to
            ``parameter.data``, and what they assigned is copied.
        blocks: What state has a value for each of several elements.
    """

    def __init__(self, *, is_torchs: bool, blocks: BlockState | None = None) -> None:
        self.version, self._is_torchs = 0, is_torchs
        self._blocks = BlockState() if blocks is None else blocks
        self._groups: list[list[nn.Parameter]] = []
        self._shards: list[list[nn.Parameter]] = []
        # Parameter, its local tensor, and what stands for it.
        self._held: list[tuple[Any, Tensor, nn.Parameter]] = []
        self._locals: list[Tensor] = []
        self._plain_of: dict[Any, nn.Parameter] = {}
        self._public_of: dict[Any, nn.Parameter] = {}

    def begin(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[list[nn.Parameter]]:
        """Return this rank's shards by group, with gradients. Nobody communicates."""
        if not are_same(groups, self._groups) or self._is_replaced():
            self._make(groups)
        for public, _, shard in self._held:
            if shard.requires_grad is not public.requires_grad:
                shard.requires_grad_(public.requires_grad)
            shard.grad = local_gradient(public)
        return self._shards

    def public_of(self, plain: Any) -> Any:
        """Return the distributed parameter of a shard; what is none as it is."""
        return self._public_of.get(plain, plain)

    def plain_of(self, public: Any) -> Any:
        """Return the shard of a distributed parameter; what is none as it is."""
        return self._plain_of.get(public, public)

    def parts_of(self, public: Any) -> None:
        """Return that there are none: elements do not ask which matrix they are of."""

    def part_of(self, plain: Any) -> None:
        """Return that it is none."""

    def end(self, *, is_complete: bool) -> None:
        """Hold no gradients on; that of a shard is the parameter's own, written in place."""
        if not self._is_torchs:
            for _, local, shard in self._held:
                take_assigned(shard, local)
        for public, _, shard in self._held:
            if shard.grad is not None:
                shard.grad = None
            elif public.grad is not None:
                public.grad = None  # as the step has left it

    def shown(self, state: Mapping[str, StateOf]) -> dict[str, dict[str, Any]]:
        """Return state, as distributed tensors where it has the parameter's shape."""
        return {
            fqn: {name: self._globalized(name, value, public) for name, value in values.items()}
            for fqn, (public, values) in state.items()
            if values
        }

    def taken(self, public: nn.Parameter, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return this rank's shard of a parameter's state."""
        return {name: self._local_state(name, value, public) for name, value in values.items()}

    def empty(self, public: nn.Parameter, saved: Mapping[str, Saved]) -> dict[str, Any]:
        """Return tensors for what a checkpoint has of a parameter's state."""
        return {
            name: self._empty(name, tensor, public)
            for name, tensor in saved.items()
            if "." not in name
        }

    def _empty(self, name: str, saved: Saved, public: nn.Parameter) -> Tensor:
        if name in self._blocks.names:
            whole = torch.zeros(saved.shape, dtype=saved.dtype)
            return self._blocks.distributed(whole, public)
        if torch.Size(saved.shape) == public.shape and name != _COUNTER:
            return torch.zeros_like(public.detach(), dtype=saved.dtype)
        return torch.zeros(saved.shape, dtype=saved.dtype)

    def _globalized(self, name: str, value: Any, public: nn.Parameter) -> Any:
        """Return a state tensor that is cut as the parameter is as a distributed tensor."""
        sharded = cast(DTensor, public)
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or name == _COUNTER:
            return value
        if name in self._blocks.names:
            return self._blocks.shown(value, public)
        if value.shape != sharded._local_tensor.shape:
            return value
        how = sharded.device_mesh, sharded.placements
        return DTensor.from_local(value, *how, shape=sharded.shape)

    def _local_state(self, name: str, value: Any, public: nn.Parameter) -> Any:
        """Return a loaded state value as the step wants it."""
        sharded = cast(DTensor, public)
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor):
            return value._local_tensor.clone()
        if name in self._blocks.names:
            return self._blocks.distributed(value, public)._local_tensor
        if value.shape == sharded.shape and name != _COUNTER:
            return distribute_tensor(value, sharded.device_mesh, sharded.placements)._local_tensor
        return value.clone()

    def _is_replaced(self) -> bool:
        found = map(attrgetter("_local_tensor"), self._plain_of)
        return not all(map(is_, found, self._locals))

    def _make(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        held: dict[nn.Parameter, nn.Parameter] = {}
        for group in groups:
            for public in group:
                local = cast(DTensor, public)._local_tensor
                own = self._plain_of.get(public)
                if own is None or own.data_ptr() != local.data_ptr() or own.shape != local.shape:
                    own = nn.Parameter(local, requires_grad=public.requires_grad)
                    if (memory := WatchedMemory.of(local)) is not None:
                        memory.own(own)  # what a step writes, it says
                held[public] = own
        self.version += 1
        self._groups = [list(group) for group in groups]
        self._shards = [[held[public] for public in group] for group in groups]
        self._locals = [cast(DTensor, public)._local_tensor for public in held]
        self._held = list(zip(held, self._locals, held.values(), strict=True))
        self._plain_of = dict(held)
        self._public_of = {shard: public for public, shard in held.items()}
