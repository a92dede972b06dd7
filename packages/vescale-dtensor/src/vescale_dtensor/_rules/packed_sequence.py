"""Sequences of several lengths, packed for a recurrent layer.

How many of them go on at each step is read by torch's C++ itself, from the memory of a tensor on
the CPU: it stays a plain tensor, which every rank has, as the lengths that it is made of.
"""

from __future__ import annotations

from typing import Any

import torch

from vescale_dtensor._sharding.local_plan import Plan
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._sharding.replicate_fallback import gathered
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload

aten = torch.ops.aten


def _packed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pack whole sequences. Every rank of the mesh must call this."""
    call = OpCall(func, args, kwargs)
    sequences, lengths, batch_first = map(call.named, ("input", "lengths", "batch_first"))
    if isinstance(lengths, DISTRIBUTED):
        lengths = torch.tensor(lengths.tolist())
    if not isinstance(sequences, DISTRIBUTED):
        return func(sequences, lengths, batch_first)
    packed = gathered(func, (sequences, lengths, batch_first), {})
    _, batch_sizes = func(torch.empty(*sequences.shape[:2], 1), lengths, batch_first)
    return packed[0], batch_sizes


HANDLERS: dict[OpOverload, Plan] = {aten._pack_padded_sequence.default: _packed}
