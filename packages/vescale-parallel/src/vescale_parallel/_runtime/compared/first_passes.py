"""What data-parallel ranks compute alike on one device, compared behind the first backward passes.

One number more in an exchange of 16 bytes, of whatever is noted. Only if it differs do ranks tell
each other more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._mesh.agreement import gathered_objects
from vescale_parallel._mesh.mesh import data_axes

from .digest import Digest, Leaf, difference, digest_of
from .same_inputs import gathered_rows, groups_along

_FIRST_PASSES = 4
_MOST_ELEMENTS = 2**20  # of one tensor


class FirstPasses:
    """Compares tensors between data-parallel ranks behind the first backward passes.

    Args:
        mesh: The plan's mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._groups = groups_along(mesh, *reversed(data_axes(mesh)))
        self._device = torch.device(mesh.device_type)
        self._passes_left = _FIRST_PASSES if self._groups else 0
        self._met: list[Digest] = []
        self._why: dict[str, str] = {}
        self._conditions: dict[str, str] = {}

    @property
    def is_open(self) -> bool:
        """Whether passes are still to come that are compared behind."""
        return self._passes_left > 0

    @property
    def has_begun(self) -> bool:
        """Whether there was a pass."""
        return self._passes_left < _FIRST_PASSES

    def note(self, name: str, tensor: Tensor, why: str, *, if_same: Tensor | None = None) -> None:
        """Have a tensor compared behind the next backward pass.

        Args:
            name: Of the tensor, the same on all ranks and for no other one of this pass.
            tensor: What should be the same.
            why: What is wrong if it is not, and what to do.
            if_same: Only where this tensor is the same on all ranks.
        """
        if not self.is_open:
            return
        named = {name: tensor}
        if if_same is not None:
            self._conditions[name] = f"{name} (its values)"
            named[self._conditions[name]] = if_same
        self._why[name] = why
        with torch.no_grad():
            first = {key: each.flatten()[:_MOST_ELEMENTS] for key, each in named.items()}
            self._met.append(digest_of(first, self._device))

    def compare(self) -> None:
        """Compare what was noted since the last call. Every rank must call this.

        Raises:
            ValueError: On all ranks, if a tensor differs between them.
        """
        if not self.is_open:
            return
        self._passes_left -= 1
        met, self._met = self._met, []
        why, self._why = self._why, {}
        conditions, self._conditions = self._conditions, {}
        rows = [torch.zeros(2, dtype=torch.int64, device=self._device), *(m.row for m in met)]
        totals = gathered_rows(torch.stack(rows).sum(0), self._groups)
        if len({tuple(each) for each in totals.tolist()}) == 1:
            return
        own = (dist.get_rank(), [leaf for each in met for leaf in each.with_numbers()])
        found: list[tuple[int, list[Leaf]]] = gathered_objects(own, self._groups)
        if told := _differing(dict(sorted(found)), conditions):
            name, difference_ = told
            raise ValueError(f"{difference_}: {why[name]}")


def _differing(
    ranks: Mapping[int, Sequence[Leaf]], conditions: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return the first tensor that should be the same and is not, and how it differs."""
    # What some ranks alone do, as the first one that prints, is theirs.
    common = set[str].intersection(*({leaf.name for leaf in leaves} for leaves in ranks.values()))
    of_all = {
        rank: {leaf.name: leaf for leaf in leaves if leaf.name in common}
        for rank, leaves in ranks.items()
    }

    def told(name: str) -> str:
        return difference({rank: [leaves[name]] for rank, leaves in of_all.items()})

    held = {*conditions.values()}
    for name in next(iter(of_all.values())):
        if name in held or (name in conditions and told(conditions[name])):
            continue
        if differs := told(name):
            return name, differs
    return None
