"""The sharding plan that chunks follow, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from vescale_parallel._auto_sharding.place_collectives import ShardingProposal
from vescale_parallel._auto_sharding.policies import propose_sharding
from vescale_parallel._tensor_parallel.invariant.install import check_chunks
from vescale_parallel._tensor_parallel.sharding_spec import resolve
from vescale_parallel._tensor_parallel.tensor_sharding import shard

from .chunked_modules import chunk_marks

# As candidates say it of heads.
_UNDIVIDED = "is not divisible by"


def propose_in_chunks(
    model: nn.Module,
    policy: str,
    chunks: int,
    *,
    sequence: bool = False,
    example_batch: Any = None,
) -> ShardingProposal:
    """Return the plan that a policy gives ``chunks`` ranks, for any number of ranks.

    A vocabulary that does not divide into chunks stays whole.

    Raises:
        ValueError: If something that is sharded cannot be computed in chunks, or nothing is.
    """
    found = propose_sharding(model, policy, chunks, sequence=sequence, example_batch=example_batch)
    found = _with_even_vocabulary(model, found, chunks)
    if not found.plan:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.left_whole.items())
        raise ValueError(
            f"numerics 'invariant': nothing of {type(model).__name__} divides into "
            f"{chunks} chunks ({why or f'policy {policy!r} shards nothing'}); choose another "
            "numerics_chunks"
        )
    _check_undivided(found)
    marks = chunk_marks(model, example_batch, shard(found.plan, model, chunks))
    found = replace(found, plan={**found.plan, **marks})
    check_chunks(model, shard(found.plan, model, chunks), sequence=sequence)
    # Proven for that many ranks, and not for fewer.
    return replace(found, proven_call=None)


def _check_undivided(found: ShardingProposal) -> None:
    """Raise if layers of blocks stay whole only because they do not divide into chunks."""
    for names, why in found.left_whole.items():
        if "*" in names and _UNDIVIDED in why:
            raise ValueError(
                f"numerics 'invariant': {names}: {why}, numerics_chunks; choose fewer, or leave "
                "numerics out of the plan"
            )


def _with_even_vocabulary(
    model: nn.Module, found: ShardingProposal, chunks: int
) -> ShardingProposal:
    spec = resolve(found.plan, model)
    sharded = {f.rpartition(".")[0]: model.get_parameter(f) for f in spec.parameters}
    uneven = {
        owner
        for owner, parameter in sharded.items()
        if (owner in spec.outputs or isinstance(model.get_submodule(owner), nn.Embedding))
        and parameter.shape[0] % chunks
    }
    if not uneven:
        return found
    plan = {
        pattern: text
        for pattern, text in found.plan.items()
        if not any(pattern.startswith(f"{fqn}.") for fqn in uneven)
    }
    why = dict.fromkeys(uneven, f"its rows do not divide into {chunks} chunks")
    return replace(found, plan=plan, left_whole={**found.left_whole, **why})
