"""How a model is sharded under a plan: as it says, or as a policy finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from vescale_parallel._model.inputs import bind
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._tensor_parallel.invariant.install import check_chunks, without_sums
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding, shard
from vescale_parallel._verify.calls.call_guard import CallGuard
from vescale_parallel._verify.calls.call_signature import CallForms, proven_forms
from vescale_parallel._verify.manual_plan import checked_plan

from .invariant import propose_in_chunks
from .policies import propose_sharding


def shard_as_planned(
    plan: ParallelPlan, model: nn.Module, batch: Any, left_whole: dict[str, str]
) -> tuple[TensorSharding, CallGuard | None, dict[str, str], TensorSharding | None]:
    """Return how the model is sharded, what proves it for other calls, and what stays whole.

    ``left_whole`` is what the plan says stays whole. Last, how as many ranks as there are chunks
    would have it, if the plan says so.
    """
    section = plan.tensor_parallel
    if plan.numerics == "invariant":
        return _shard_in_chunks(plan, model, batch, left_whole)
    if section.size == 1:
        return shard({}, model, 1), None, {}, None
    said, proven = dict(section.sharding_plan), proven_forms(section)
    if not said and section.sharding_policy != "manual":
        proposal = propose_sharding(
            model,
            section.sharding_policy,
            section.size,
            sequence=section.sequence,
            example_batch=batch,
        )
        form = proposal.proven_call
        said, proven = proposal.plan, [] if form is None else [form]
        left_whole = proposal.left_whole
    sharding = shard(said, model, section.size)
    for fqn in sharding.spec.chunked:
        raise ValueError(
            f"tensor_parallel.sharding_plan: {fqn}.<chunks> is of a plan with numerics "
            "'invariant'; leave it out, or add numerics and numerics_chunks"
        )
    if section.sharding_policy == "manual":
        sharding, is_proven = checked_plan(
            model, sharding, batch, declared=section.communication == "declared"
        )
        proven = [CallForms(model).form(*bind(model, batch))] if is_proven else []
    sharding = replace(sharding, in_forward=plan.context_parallel.size > 1)
    return sharding, CallGuard(model, said, sharding, proven), left_whole, None


def _shard_in_chunks(
    plan: ParallelPlan, model: nn.Module, batch: Any, left_whole: dict[str, str]
) -> tuple[TensorSharding, CallGuard | None, dict[str, str], TensorSharding]:
    """Return what :func:`shard_as_planned` does, of a plan with bits of any number of ranks."""
    section, said = plan.tensor_parallel, dict(plan.tensor_parallel.sharding_plan)
    if not said:
        proposal = propose_in_chunks(
            model,
            section.sharding_policy,
            plan.numerics_chunks,
            sequence=section.sequence,
            example_batch=batch,
        )
        said, left_whole = proposal.plan, proposal.left_whole
    chunked = shard(said, model, plan.numerics_chunks)
    check_chunks(model, chunked, sequence=section.sequence)
    if section.size == 1:
        return shard({}, model, 1), None, left_whole, chunked
    sharding = shard(said, model, section.size)
    guard = CallGuard(model, said, sharding, proven_forms(section))
    return without_sums(sharding), guard, left_whole, chunked
