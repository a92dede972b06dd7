"""Conjugated and negated views hold their values.

torch marks ``x.conj()`` and the imaginary part of one by a bit and leaves the elements alone. The
tensor that autograd sees and the local one would both have to carry it, and what moves elements
would move them without it. So the values are computed at once, and the view follows its base as
a gathered one does, see [Note: gathered views].
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial

from vescale_dtensor._layout.layout import without_partial
from vescale_dtensor._sharding.gathered_views import GatheredView
from vescale_dtensor._sharding.local_plan import Plan, distributed
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._tensor.dtensor import DTensor, layout_of, redistributed, wrap
from vescale_dtensor._torch_private import OpOverload

aten = torch.ops.aten


def with_values(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return a view whose local tensor has no lazy bits. Moves nothing."""
    call = OpCall(func, args, kwargs)
    base = distributed(call.tensors[0], call)
    made = layout_of(base)
    # A sum of negated parts is the negated sum; a maximum or a product of them is not.
    pending = {p.reduce_op for p in made.placements if isinstance(p, Partial)}
    placements = made.placements if pending <= {"sum", "avg"} else without_partial(made.placements)
    view = wrap(
        func(redistributed(base, placements)._local_tensor).clone(), made.placed(placements)
    )
    view._alias_of = GatheredView(base, func, 0, placements)
    return view


HANDLERS: dict[OpOverload, Plan] = dict.fromkeys(
    (aten._conj.default, aten._neg_view.default), with_values
)
