"""What the last stage's forward returned, on all stages.

[Note: what is sent of outputs]
The first call of a form sends the structure of what was returned as Python objects, with numbers
for scalars. Where it is scalars and None alone, as in a step that is differentiated, later calls
send one tensor of the scalars, or nothing if there is none: no object, and no rank waits for its
device. In a step that is differentiated, every rank sends along which parameters have a gradient
on it: a parameter has one on all ranks or on none, and no other message is needed for that. A
call that returns another structure is refused on the last stage, since the others would
have to wait in every step to hear of it. With ``pipeline_parallel.outputs`` "last" tensors are not
sent, so it is the same. Structures with other objects or with tensors, whose
values and shapes may change, are sent whole in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, all_gather, named_failures
from vescale_parallel._loss.not_returned import NotReturned
from vescale_parallel._loss.output import Scalar
from vescale_parallel._torch_private import pytree

from .joined import Sent


@dataclass(frozen=True)
class _Structure:
    """Scalars and None, with values of another call."""

    leaves: Sequence[Any]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, told: Any) -> _Structure | None:
        """Return that of what stages are told; None if it has to be sent whole."""
        leaves, spec = pytree.tree_flatten(told)
        fixed = all(leaf is None or isinstance(leaf, Scalar | NotReturned) for leaf in leaves)
        return cls(leaves, spec) if fixed else None

    @property
    def num_scalars(self) -> int:
        return sum(isinstance(leaf, Scalar) for leaf in self.leaves)

    def like(self, other: _Structure | None) -> bool:
        """Whether two differ in values at most."""
        if other is None or self.spec != other.spec:
            return False
        return [*map(_form, self.leaves)] == [*map(_form, other.leaves)]

    def values(self) -> list[Tensor]:
        return [
            torch.as_tensor(leaf.value, dtype=torch.float64)
            for leaf in self.leaves
            if isinstance(leaf, Scalar)
        ]

    def with_values(self, values: Sequence[Tensor]) -> Any:
        left = iter(values)
        leaves = [
            replace(leaf, value=next(left)) if isinstance(leaf, Scalar) else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def __str__(self) -> str:
        return str(pytree.tree_unflatten([*map(_form, self.leaves)], self.spec))


def _form(leaf: Scalar | NotReturned | None) -> str:
    if leaf is None:
        return "None"
    if isinstance(leaf, NotReturned):
        return "a tensor"
    grad = ", with a gradient" if leaf.requires_grad else ""
    return f"{leaf.dtype} scalar{', the loss' if leaf.is_loss else ''}{grad}"


@dataclass(eq=False)
class AgreedOutputs:
    """Gives all stages of a pipeline what the last one returned.

    Attributes:
        mesh: The plan's mesh.
        group: The ranks of the pipeline.
        source: The rank of the last stage.
        only_last: Whether the ranks of the last stage alone get tensors.
        own_flags: Returns what this rank gives in steps that are differentiated, if anything.
        flags: What each rank gave in the last one, one row a rank.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    source: int
    only_last: bool = False
    own_flags: Callable[[], Tensor | None] = lambda: None
    flags: Tensor | None = None
    _agreed: dict[object, _Structure | None] = field(
        default_factory=dict[object, "_Structure | None"]
    )

    def share(
        self,
        form: object,
        told: Any,
        tensors: Sequence[Tensor] = (),
        flags: Tensor | None = None,
    ) -> Any:
        """Return what the last stage was given. Every rank of the pipeline must call this.

        Args:
            form: Of the call, the same on all ranks: what decides the structure of its result.
            told: The structure, on the last stage.
            tensors: Those it has :class:`Sent` for, on the last stage.
            flags: Bytes of this rank that all get, as many on each; None on all for none.

        Raises:
            ValueError: On the last stage, if an earlier call of this form had another structure.
        """
        if self.only_last:
            return self._share_scalars(form, told, tensors, flags)
        return self._share(form, told, tensors, flags)

    def share_flags(self) -> Tensor:
        """Return what each rank gives, one row a rank. Every rank must call this."""
        flags = self.own_flags()
        assert flags is not None
        self.flags = all_gather(flags.to(self.mesh.device_type), self.group)
        return self.flags

    def _share_scalars(
        self, form: object, told: Any, tensors: Sequence[Tensor], flags: Tensor | None
    ) -> Any:
        held, kept = iter(tensors), list[Tensor]()

        def left_out(sent: Sent) -> NotReturned:
            kept.append(_with_flag(next(held).detach(), sent))
            return NotReturned(sent.name, "last")

        found = self._share(form, pytree.tree_map_only(Sent, left_out, told), (), flags)
        if not kept:
            return found
        own = iter(kept)
        return pytree.tree_map_only(NotReturned, lambda _: next(own), found)

    def _share(
        self, form: object, told: Any, tensors: Sequence[Tensor], flags: Tensor | None
    ) -> Any:
        agreed = self._agreed.get(form)
        if agreed is not None:
            return self._scalars(agreed, told, flags)
        found = self._objects(told, tensors)
        if flags is not None:
            self.flags = all_gather(flags.to(self.mesh.device_type), self.group)
        self._agreed[form] = _Structure.of(found)
        return found

    def _scalars(self, agreed: _Structure, told: Any, flags: Tensor | None) -> Any:
        device = torch.device(self.mesh.device_type)
        values = torch.zeros(agreed.num_scalars, dtype=torch.float64, device=device)
        if dist.get_rank(self.group) == self.source:
            own = _Structure.of(told)
            if not agreed.like(own):
                raise ValueError(
                    "expected forward under a pipeline to return the same structure of scalars "
                    f"in every call with inputs of one form, {agreed}, got "
                    f"{told if own is None else own}; return the same keys in every call, with "
                    "nan where there is no value"
                )
            assert own is not None
            if agreed.num_scalars:
                values = torch.stack([x.to(device) for x in own.values()])
        if flags is not None:
            values = self._with_flags(values, flags.to(device))
        elif agreed.num_scalars:
            with named_failures():
                dist.broadcast(values, group=self.group, group_src=self.source)
        return agreed.with_values(values.unbind())

    def _with_flags(self, values: Tensor, flags: Tensor) -> Tensor:
        """Return the last stage's scalars; keep the flags of all ranks."""
        own = values.view(torch.uint8)
        everyones = all_gather(torch.cat([own, flags]), self.group)
        self.flags = everyones[:, len(own) :]
        # A copy: a row need not begin where a float may.
        return everyones[self.source, : len(own)].clone().view(values.dtype)

    def _objects(self, told: Any, tensors: Sequence[Tensor]) -> Any:
        marked: list[Any] = [pytree.tree_map_only(Scalar, _with_number, told)]
        with named_failures():
            dist.broadcast_object_list(marked, group=self.group, group_src=self.source)
        leaves, spec = pytree.tree_flatten(marked[0])
        held = iter(tensors)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Sent):
                own = next(held, None)
                local = own.to_local() if isinstance(own, DTensor) else own
                leaves[index] = self._tensor(leaf, local)
        return pytree.tree_unflatten(leaves, spec)

    def _tensor(self, told: Sent, local: Tensor | None) -> Tensor:
        if local is None:
            local = torch.empty(told.shape, dtype=told.dtype, device=self.mesh.device_type)
        local = local.detach().resolve_conj().resolve_neg().contiguous()
        if local.numel():
            # As bytes: gloo does not know every dtype.
            flat = local.view(-1).view(torch.uint8)
            with named_failures():
                dist.broadcast(flat, group=self.group, group_src=self.source)
        if told.placements is None:
            return _with_flag(local, told)
        mesh = self.mesh["tp"]
        whole = DTensor.from_local(local, mesh, told.placements, shape=told.global_shape)
        return _with_flag(whole, told)


def _with_flag(tensor: Tensor, told: Sent) -> Tensor:
    """Say of a tensor whether it depends on parameters."""
    return tensor.requires_grad_() if told.requires_grad else tensor


def _with_number(scalar: Scalar) -> Scalar:
    return replace(scalar, value=float(scalar.value))
