"""A parameter, sharded and unsharded: the DTensor everybody sees, the plain one that computes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale_dtensor import DTensor, RaggedShard

from .flat_shards import FlatPlace
from .memory_layout import Stride


@dataclass(eq=False)
class ShardedParameter:
    """One distinct parameter of the model, on this rank.

    Attributes:
        fqns: Its names; more than one if it is tied.
        sites: Where it hangs: (module, attribute), one per name.
        sharded: The public parameter: a DTensor of global shape whose local part is this rank's.
        unsharded: The plain parameter that forward and backward use on this rank; None on
            stages that do not use it.
        shares_storage: Whether the unsharded parameter is the sharded one's own storage; the
            same on all ranks that exchange the parameter.
        placeholder: What forward finds in its place on stages that do not use it.
        place: In a flat buffer that the ``dp_shard`` axis cuts, None if it does not.
        partial_over_tp: Whether tensor-parallel ranks hold partial values of its gradient.
        stages: Pipeline stages that use it; the first one owns it, and
            sends it to the others for a step.
        is_expert: Whether it is of experts, of which ranks of the ``ep`` axis have their own.
        stride: Of the whole on one device, see [Note: memory layouts]; None if contiguous.
    """

    fqns: tuple[str, ...]
    sites: tuple[tuple[nn.Module, str], ...]
    sharded: nn.Parameter
    unsharded: nn.Parameter | None
    shares_storage: bool
    place: FlatPlace | None
    partial_over_tp: bool
    stages: tuple[int, ...]
    is_expert: bool = False
    stride: Stride | None = None
    placeholder: Tensor | None = None

    @property
    def distributed(self) -> DTensor:
        """The sharded parameter as the DTensor it is."""
        assert isinstance(self.sharded, DTensor)
        return self.sharded

    @property
    def local(self) -> Tensor:
        """This rank's shard of the parameter, without autograd."""
        return self.sharded._local_tensor  # pyright: ignore[reportAttributeAccessIssue]: a DTensor

    @property
    def unsharded_data(self) -> Tensor:
        """What computes, as memory: writing to it changes no tensor that backward saved."""
        assert self.unsharded is not None
        # Not detach(), which shares the count of changes.
        return self.unsharded.data

    def __post_init__(self) -> None:
        self._held = self._address()

    def _address(self) -> tuple[object, ...]:
        local = self.local
        return local.data_ptr(), local.dtype, local.shape

    def check_in_place(self) -> None:
        """Raise if somebody hung another parameter in this one's place."""
        is_held = self._address() == self._held
        for (module, name), fqn in zip(self.sites, self.fqns, strict=True):
            if module._parameters.get(name) is not self.sharded or not is_held:
                raise ValueError(
                    f"{fqn!r} was replaced after parallelize, by functional_call or accelerate's "
                    "prepare for example, or by forward, which cannot take effect; change values "
                    "in place (load_state_dict without assign=True, or copy_ under no_grad), and "
                    "convert dtypes before parallelize"
                )

    def refuse_calls_outside(self) -> None:
        """Have modules whose parameter is sharded run within a call of the model only.

        Their hooks expect this rank's part; with anything else results would be wrong.
        """
        if self.unsharded is None or self.unsharded.shape == self.sharded.shape:
            return
        for (module, name), fqn in zip(self.sites, self.fqns, strict=True):
            check = functools.partial(_check_part, name, fqn, self.unsharded.shape)
            module.register_forward_pre_hook(check, prepend=True)

    def hang(self) -> None:
        """Hang the public parameter on the modules, whatever is there."""
        for module, name in self.sites:
            module._parameters[name] = self.sharded

    def show_sharded(self) -> None:
        """Hang the public parameter on the modules, but where code has hung another; see below."""
        for module, name in self.sites:
            held = module._parameters.get(name)
            if held is self.unsharded or held is self.placeholder:
                module._parameters[name] = self.sharded

    def show_unsharded(self) -> None:
        """Hang the plain parameter on the modules, but where code has hung another.

        ``torch.func.functional_call`` takes it away again. What forward itself assigned stays, for
        :meth:`check_in_place` to find.
        """
        is_trained = self.sharded.requires_grad
        # Within a transform of torch.func it may not even be set to what it is.
        if self.unsharded is not None and self.unsharded.requires_grad != is_trained:
            self.unsharded.requires_grad_(is_trained)
        plain = self.unsharded if self.unsharded is not None else self.placeholder
        if plain is not None:
            for module, name in self.sites:
                held = module._parameters.get(name)
                if held is self.sharded or held is plain:
                    module._parameters[name] = plain  # pyright: ignore[reportArgumentType]: used as a Parameter
                elif isinstance(held, DTensor):
                    raise ValueError(_made_of_shards(self.fqns[0]))


def _made_of_shards(fqn: str) -> str:
    return (
        f"{fqn!r} was replaced for a call of its block, by torch.func.functional_call for "
        "example, with what was made of distributed parameters: zero_stage 2 and 3 keep those "
        "of a block sharded outside of its forward. Use data_parallel.zero_stage 1, or give it "
        "what is made of other plain tensors"
    )


def _check_part(name: str, fqn: str, shape: torch.Size, module: nn.Module, args: object) -> None:
    held = module._parameters.get(name)
    if isinstance(held, DTensor) or (held is not None and held.shape != shape):
        raise ValueError(
            f"the module of {fqn!r} was called from outside of the parallelized model, or with "
            "another parameter; ranks hold shards of it, which only a call of the model brings "
            f"together: expected this rank's shard of shape {tuple(shape)}, got "
            f"{type(held).__name__} of shape {tuple(held.shape)}. Call the model that "
            "parallelize returned, or parallelize the module that you call"
        )


def placements_of(
    mesh: DeviceMesh,
    shape: torch.Size,
    *,
    tp: Placement,
    place: FlatPlace | None,
    owner: int,
    ep: Placement | None = None,
) -> tuple[Placement, ...]:
    """Return a parameter's placement on every mesh axis.

    ``place`` says how the ``dp_shard`` axis cuts it, None for a copy on each of its ranks;
    ``owner`` is the stage that owns it, ``ep`` how ranks that share experts hold it, None for a
    copy on each.
    """
    by_axis: dict[str, Placement] = {"tp": tp}
    if ep is not None:
        by_axis["ep"] = ep
    if place is not None:
        by_axis["dp_shard"] = place.placement
    names = mesh.mesh_dim_names or ()
    if "pp" in names:
        by_axis["pp"] = all_on(owner, mesh.size(names.index("pp")), shape)
    return tuple(by_axis.get(name, Replicate()) for name in names)


def all_on(rank: int, size: int, shape: torch.Size) -> RaggedShard:
    """Return the placement of a tensor that one rank of an axis has, and the others nothing of."""
    units = tuple(int(each == rank) for each in range(size))
    return RaggedShard((0,), max(shape[0], 1) if shape else 1, units)
