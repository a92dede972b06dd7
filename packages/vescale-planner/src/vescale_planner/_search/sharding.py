"""Which layers tensor parallelism of a size shards: asked of the engine, or given by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn

from vescale_parallel import ShardingProposal, propose_sharding
from vescale_planner._constraints import proposal_in_chunks

_MOST_REASONS = 3  # of layers that stay whole, in one message


def decides_sharding(constraint: str) -> bool:
    """Return whether what is sharded depends on a constraint, beside model and example."""
    return constraint.startswith(("tensor_parallel.", "numerics"))


def found_sharding(
    model: nn.Module, constraints: Mapping[str, Any], example_batch: Any, tp: int
) -> ShardingProposal | dict[str, str] | str:
    """Return what is sharded, without a proposal if nobody looked; or why nothing can be."""
    given = constraints.get("tensor_parallel.sharding_plan")
    if given is not None:
        if tp == 1 and constraints.get("tensor_parallel.size") != 1:
            return "tensor_parallel.sharding_plan needs tensor_parallel.size above 1"
        return dict(given)
    policy = constraints.get("tensor_parallel.sharding_policy", "auto")
    sequence = bool(constraints.get("tensor_parallel.sequence", False))
    if constraints.get("numerics") == "invariant":
        return proposal_in_chunks(model, policy, constraints, example_batch, sequence=sequence)
    if tp == 1:
        return {}
    try:
        proposal = propose_sharding(
            model, policy, tp, sequence=sequence, example_batch=example_batch
        )
    except ValueError as error:
        return str(error)
    if proposal.plan:
        return proposal
    why = (
        f"tensor_parallel.size {tp}: policy {policy!r} shards nothing of "
        f"{type(model).__name__}, so its ranks would repeat each other's work"
    )
    for names, reason in itertools.islice(proposal.left_whole.items(), _MOST_REASONS):
        why += f"; {names}: {reason}"
    if policy == "auto" and example_batch is None:
        why += "; give generate_plan an example_batch: few models show without one what can be "
        why += "sharded"
    return why
