"""Plain parameters that are whole, each on one rank: for updates of a parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, WatchedMemory, all_gather

from .exchange import Exchange, Traveller
from .matrices import Matrices
from .owned_state import empty_state, shown_state, taken_state
from .owners import StageRanks, assign_owners, pieces_of
from .plain import Saved, StateOf, local_gradient, take_assigned


class WholeParameters:
    """The parameters that this rank owns, whole while a step runs; see [Note: owners of ...].

    Every rank of ``mesh`` must construct one.

    Args:
        mesh: That of the parameters.
        matrices: The parameters that consist of several.
        strides: Those that parameters have on one device; contiguous where they are not given.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        matrices: Mapping[Any, Matrices] | None = None,
        strides: Mapping[Any, Sequence[int]] | None = None,
    ) -> None:
        self.version, self._matrices = 0, dict(matrices or {})
        self._strides = dict(strides or {})
        # By distributed parameter; where they are in it by matrix.
        self._parts: dict[Any, tuple[nn.Parameter, ...]] = {}
        self._place_of: dict[Any, tuple[nn.Parameter, int]] = {}
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        names = mesh.mesh_dim_names or ()
        pp_axis = names.index("pp") if "pp" in names else None
        self._mesh, self._coordinate = mesh, tuple(coordinate)
        self._ranks = StageRanks(
            mesh_shape=tuple(mesh.shape),
            pp_axis=pp_axis,
            stage=0 if pp_axis is None else coordinate[pp_axis],
        )
        here = self._ranks.coordinates
        self._exchange = Exchange(mesh, self._ranks.axes, here.index(self._coordinate), len(here))
        if len(here) > 1:
            # Ranks along several axes become a group at its first use, and all take part in that.
            like = torch.zeros(1, device=mesh.device_type)
            all_gather(like, mesh, axes=self._ranks.axes)
        self._loads: dict[int, list[int]] = {}
        self._owner_of: dict[Any, tuple[int, ...]] = {}
        self._plain_of: dict[Any, nn.Parameter] = {}
        self._public_of: dict[Any, nn.Parameter] = {}
        self._travelling: list[Traveller] = []
        self._stepping: list[nn.Parameter] = []

    def begin(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[list[nn.Parameter]]:
        """Return the parameters that this rank owns, with gradients. Every rank calls this.

        Those without a gradient are left out: a step leaves them alone.
        """
        self.own(public for group in groups for public in group)
        stepping = [[public for public in group if public.grad is not None] for group in groups]
        self._stepping = [
            public
            for group in stepping
            for public in group
            if self._ranks.stage_of(_distributed(public).placements) == self._ranks.stage
        ]
        pairs = [self._travellers(public) for public in self._stepping]
        self._travelling = [value for value, _ in pairs]
        with torch.no_grad():
            self._exchange.gather(
                [each for pair in pairs for each in pair if not each.pieces.has_all(each.owner)]
            )
        return [
            [
                each
                for public in group
                if self._is_mine(public)
                for each in self._parts.get(public, (self._plain_of[public],))
            ]
            for group in stepping
        ]

    def end(self, *, is_complete: bool) -> None:
        """Bring new values to all ranks, and let go of whole parameters. Every rank calls this."""
        travelling, self._travelling = self._travelling, []
        for public, each in zip(self._stepping, travelling, strict=True):
            if each.whole is not None:
                self._take_assigned(public, each.whole)
        if is_complete and self._exchange.num_ranks > 1:
            with torch.no_grad():
                self._exchange.scatter(travelling)
        for public, each in zip(self._stepping, travelling, strict=True):
            if each.whole is not None:
                for plain in (self._plain_of[public], *self._parts.get(public, ())):
                    plain.grad = None
                if each.whole is not each.local:
                    each.whole.untyped_storage().resize_(0)
        self._stepping = []

    def own(self, publics: Any) -> None:
        """Give parameters that have no owner one, the same on every rank."""
        new = [public for public in dict.fromkeys(publics) if public not in self._owner_of]
        by_stage: dict[int, list[nn.Parameter]] = {}
        for public in new:
            stage = self._ranks.stage_of(_distributed(public).placements)
            by_stage.setdefault(stage, []).append(public)
        for stage, params in by_stage.items():
            places = self._ranks.coordinates_of(stage)
            loads = self._loads.get(stage, [0] * len(places))
            owners, self._loads[stage] = assign_owners([p.numel() for p in params], loads)
            for public, owner in zip(params, owners, strict=True):
                self._owner_of[public] = places[owner]

    def public_of(self, plain: Any) -> Any:
        """Return the distributed parameter of a whole one; what is none as it is."""
        return self._public_of.get(plain, plain)

    def plain_of(self, public: Any) -> Any:
        """Return the whole parameter of a distributed one, None if another rank owns it."""
        if public not in self._owner_of:
            return public
        return self._plain(public) if self._is_mine(public) else None

    def parts_of(self, public: Any) -> tuple[nn.Parameter, ...] | None:
        """Return the matrices of a parameter, none of them if another rank owns it."""
        if public not in self._matrices or public not in self._owner_of:
            return None
        if not self._is_mine(public):
            return ()
        self._plain(public)
        return self._parts[public]

    def part_of(self, plain: Any) -> tuple[nn.Parameter, int] | None:
        """Return the parameter that a matrix is of, and its number there."""
        return self._place_of.get(plain)

    def shown(self, state: Mapping[str, StateOf]) -> dict[str, dict[str, Any]]:
        """Return the state of all ranks as distributed tensors. Every rank must call this."""
        self.own(public for public, _ in state.values())
        places = {fqn: self._owner_of[public] for fqn, (public, _) in state.items()}
        devices = {
            fqn: _distributed(public)._local_tensor.device for fqn, (public, _) in state.items()
        }
        own = {fqn: dict(own) for fqn, (_, own) in state.items()}
        return shown_state(own, places, self._mesh, devices)

    def taken(self, public: nn.Parameter, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a parameter's state on its owner, None elsewhere. Every rank must call this."""
        self.own([public])
        whole = taken_state(values, self._owner_of[public], self._mesh)
        return whole if self._is_mine(public) else None

    def empty(self, public: nn.Parameter, saved: Mapping[str, Saved]) -> dict[str, Any]:
        """Return tensors for what a checkpoint has of a parameter's state."""
        self.own([public])
        device = _distributed(public)._local_tensor.device
        return empty_state(saved, self._owner_of[public], self._mesh, device)

    def _is_mine(self, public: nn.Parameter) -> bool:
        return self._owner_of[public] == self._coordinate

    def _travellers(self, public: nn.Parameter) -> tuple[Traveller, Traveller]:
        """Return a parameter and its gradient, with memory for wholes on the owner."""
        distributed = _distributed(public)
        pieces = pieces_of(tuple(public.shape), tuple(distributed.placements), self._ranks)
        owner = self._ranks.coordinates.index(self._owner_of[public])
        local = distributed._local_tensor.detach()
        local_grad = local_gradient(public)
        assert local_grad is not None
        whole: Tensor | None = None
        whole_grad: Tensor | None = None
        if self._is_mine(public):
            plain = self._plain(public)
            if pieces.has_all(owner):
                whole, whole_grad = local, local_grad
            else:
                whole, whole_grad = plain.detach(), self._whole_like(public, local_grad)
                whole.untyped_storage().resize_(_nbytes(whole))
            plain.grad = whole_grad
            for part, grad in self._pairs(public, whole_grad):
                part.grad = grad
        return (
            Traveller(local=local, whole=whole, pieces=pieces, owner=owner),
            Traveller(local=local_grad, whole=whole_grad, pieces=pieces, owner=owner),
        )

    def _plain(self, public: nn.Parameter) -> nn.Parameter:
        """Return what stands for a parameter that this rank owns; made once."""
        distributed = _distributed(public)
        pieces = pieces_of(tuple(public.shape), tuple(distributed.placements), self._ranks)
        local, own = distributed._local_tensor, self._plain_of.get(public)
        is_local = pieces.has_all(self._exchange.rank)
        if own is None or (is_local and own.data_ptr() != local.data_ptr()):
            own = nn.Parameter(local if is_local else self._whole_like(public, local))
            self.version += 1
            self._plain_of[public], self._public_of[own] = own, public
            if (matrices := self._matrices.get(public)) is not None:
                parts = tuple(nn.Parameter(part) for part in matrices.split(own.detach()))
                self._parts[public] = parts
                self._place_of.update({part: (public, i) for i, part in enumerate(parts)})
            if not is_local:
                own.untyped_storage().resize_(0)  # filled while a step runs
            elif (memory := WatchedMemory.of(local)) is not None:
                for each in (own, *self._parts.get(public, ())):
                    memory.own(each)  # what a step writes, it says
        return own

    def _whole_like(self, public: nn.Parameter, local: Tensor) -> Tensor:
        """Return memory for all of a parameter or its gradient, as on one device."""
        stride = self._strides.get(public, public.stride())
        return torch.empty_strided(public.shape, stride, dtype=local.dtype, device=local.device)

    def _pairs(self, public: nn.Parameter, whole: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the matrices of a parameter, each with its part of another tensor like it."""
        if public not in self._matrices:
            return []
        return list(zip(self._parts[public], self._matrices[public].split(whole), strict=True))

    def _take_assigned(self, public: nn.Parameter, whole: Tensor) -> None:
        for part, memory in self._pairs(public, whole) or [(self._plain_of[public], whole)]:
            take_assigned(part, memory)


def _distributed(public: nn.Parameter) -> DTensor:
    return cast(DTensor, public)


def _nbytes(tensor: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
