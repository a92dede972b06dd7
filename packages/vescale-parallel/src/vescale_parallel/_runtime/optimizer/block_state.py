"""State of an optimizer that has a value for each block of elements: 8-bit Adam's scales.

[Note: blocks of elements] Blocks are counted from the first element of a parameter. Flat buffers
are cut between them (``block`` of :class:`.FlatShape`), so a shard has whole blocks, but for the
parameter's last one. What a block has one value of is a tensor of one dim then, cut where the
parameter is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Placement, Replicate

from vescale_dtensor import DTensor, RaggedShard, distribute_tensor


@dataclass(frozen=True)
class BlockState:
    """State with a value for each block.

    Attributes:
        numel: Elements of a block.
        names: Of the state.
    """

    numel: int = 1
    names: frozenset[str] = frozenset()

    def shown(self, local: Tensor, public: Any) -> DTensor:
        """Return the blocks of this rank's shard as those of the whole."""
        shape = (self.count(public.shape),)
        return DTensor.from_local(local, public.device_mesh, self._placements(public), shape=shape)

    def distributed(self, whole: Tensor, public: Any) -> DTensor:
        """Return all blocks of a parameter as this rank has them."""
        return distribute_tensor(whole, public.device_mesh, self._placements(public))

    def count(self, shape: Iterable[int]) -> int:
        """Return the blocks of a tensor, the last one may be shorter."""
        return -(-math.prod(shape) // self.numel)

    def _placements(self, public: Any) -> list[Placement]:
        return [self._placement(each, tuple(public.shape)) for each in public.placements]

    def _placement(self, placement: Placement, shape: tuple[int, ...]) -> Placement:
        if not isinstance(placement, RaggedShard):
            return Replicate()
        unit = placement.granularity * math.prod(shape[placement.dims[-1] + 1 :])
        # A unit that is no multiple of blocks is all of the parameter: of a pipeline's stage.
        return RaggedShard((0,), max(-(-unit // self.numel), 1), placement.local_units)


def refuse_cut_blocks(name: str, numel: int, named: Iterable[tuple[str, Any]]) -> None:
    """Raise unless ranks hold whole blocks of distributed parameters.

    Raises:
        ValueError: With the first that is cut elsewhere.
    """
    for fqn, public in named:
        for placement in public.placements:
            if isinstance(placement, Replicate):
                continue
            if not isinstance(placement, RaggedShard):
                raise ValueError(
                    f"{name} updates {numel} elements together, but tensor or expert parallelism "
                    f"cuts {fqn!r} by {placement!r}, after which blocks are no longer those of "
                    "one device; declare it with updates='parameters', or leave this axis out"
                )
            shape = tuple(public.shape)
            unit = placement.granularity * math.prod(shape[placement.dims[-1] + 1 :])
            if unit % numel and unit < math.prod(shape):
                raise ValueError(
                    f"{name} updates {numel} elements together, but ranks hold {fqn!r} in "
                    f"units of {unit}; call vescale.declare_optimizer before parallelize, which "
                    "then cuts parameters between blocks"
                )
