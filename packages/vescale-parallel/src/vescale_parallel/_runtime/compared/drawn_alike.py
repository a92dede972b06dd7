"""Whether ranks are called with random numbers that their loops drew alike for different rows.

[Note: drawn by the loop] All ranks have one generator state, that of one device. What forward
draws is drawn in parts; what a loop draws for its rows before the call (steps and noise of a
diffusion, masks of tokens) is the same on every rank. Where it is an argument of its own it can be
seen: it has rows, is the same on all ranks while other arguments differ, and changes from call to
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._mesh.mesh import data_axes
from vescale_parallel._model.leaf_names import leaf_names
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._torch_private import pytree

from .digest import digest_of
from .same_inputs import gathered_rows, groups_along

# The first passes tell what changes; the second one is compared.
_COMPARED_PASS, _MOST_ARGUMENTS = 1, 16
# Fewer small numbers are alike by chance.
_FEWEST_ELEMENTS = 8


class DrawnAlike:
    """Warns of such arguments, once, behind the second backward pass.

    Args:
        mesh: The plan's mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._groups = groups_along(mesh, *reversed(data_axes(mesh)))
        self._device = torch.device(mesh.device_type)
        self._num_passes = 0
        self._now, self._before = dict[str, Tensor](), dict[str, Tensor]()

    def see(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rows: Sequence[object] | None
    ) -> None:
        """Note the arguments of a call; ``rows`` says of every leaf where its rows are."""
        is_over = self._num_passes > _COMPARED_PASS
        if is_over or not self._groups or rows is None or not torch.is_grad_enabled():
            return
        given = tuple(args), dict(kwargs)
        found, names = pytree.tree_leaves(given), leaf_names(given)
        if len(found) != len(rows):
            return
        named = {
            name[3:] if name.startswith("[") else name: leaf  # of [0] or [1]
            for name, leaf, where in zip(names, found, rows, strict=True)
            if where is not None and _is_plain(leaf)
        }
        self._before, self._now = (
            self._now,
            {
                f"{name} {tuple(leaf.shape)}": digest_of({name: leaf}, self._device).numbers[0, 0]
                for name, leaf in [*named.items()][:_MOST_ARGUMENTS]
            },
        )

    def compare(self) -> None:
        """Compare them, if it is this pass's turn. Every rank must call this."""
        self._num_passes += 1
        if self._num_passes - 1 != _COMPARED_PASS or not self._groups:
            return
        names = [*self._now]
        told = torch.zeros(_MOST_ARGUMENTS, 2, dtype=torch.int64, device=self._device)
        for place, name in enumerate(names):
            told[place, 0] = self._now[name]
            told[place, 1] = name in self._before and self._before[name] != self._now[name]
        ranks = gathered_rows(told.flatten(), self._groups).view(-1, *told.shape).cpu()
        are_same = (ranks[:, :, 0] == ranks[0, :, 0]).all(0)
        have_changed = ranks[:, :, 1].bool().all(0)
        alike = [
            n for n, same, new in zip(names, are_same, have_changed, strict=False) if same & new
        ]
        self._now, self._before = {}, {}
        if alike and not are_same[: len(names)].all():
            warn_at_user_line(
                f"argument {alike[0]} is the same on all data-parallel ranks and another one in "
                "each call, while others differ between ranks. If the loop draws it: generators "
                "of ranks are alike, so that each draws the same for its own rows, and one device "
                "draws others for every row. Draw it in forward, or for the rows of all ranks, "
                "of which each takes its own, or from a generator that is seeded by the rank"
            )


def _is_plain(leaf: object) -> bool:
    if type(leaf) is not Tensor or leaf.layout != torch.strided:
        return False
    return leaf.device.type in ("cpu", "cuda") and leaf.numel() >= _FEWEST_ELEMENTS
