"""The sharding plan that chunks follow, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from vescale_parallel._auto_sharding.place_collectives import ShardingProposal
from vescale_parallel._auto_sharding.policies import propose_sharding
from vescale_parallel._model.fqns import matching
from vescale_parallel._tensor_parallel.invariant.install import check_chunks
from vescale_parallel._tensor_parallel.sharding_spec import resolve
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._trace.axes import is_within

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
    if not sequence:  # around what stays whole a sequence would have to be gathered
        found = _without_parts_read_whole(model, found)
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


def _without_parts_read_whole(model: nn.Module, found: ShardingProposal) -> ShardingProposal:
    """Leave modules whole that hold layers of which some parts are read whole."""
    holders = {fqn.rpartition(".")[0] for fqn, _ in resolve(found.plan, model).read_whole}
    names = [fqn for fqn, _ in model.named_modules()]
    names += [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]

    def is_held(pattern: str) -> bool:
        matched = matching(pattern.partition(".<")[0], names)
        return any(is_within(fqn, holder) for fqn in matched for holder in holders)

    plan = {pattern: text for pattern, text in found.plan.items() if not is_held(pattern)}
    held = [p for p in found.plan if "<" not in p and p not in plan]
    why = dict.fromkeys(held, "parts of its layers are read whole, which is not done in chunks")
    return replace(found, plan=plan, left_whole={**found.left_whole, **why})


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
