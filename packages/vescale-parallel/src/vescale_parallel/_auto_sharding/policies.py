"""Policies: who writes the tensor-parallel sharding plan of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.experts_implementation import experts_without_values
from vescale_parallel._model.fqns import generalize, matching
from vescale_parallel._model.inputs import example_of
from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._rng.predict import draw_marks
from vescale_parallel._tensor_parallel.shard_module import check_counts
from vescale_parallel._tensor_parallel.sharding_spec import (
    parse_placement,
    placement_text,
    texts_of,
)
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._trace.axes import Trace, infer_axes
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._trace.fake_tensors import ObservationError
from vescale_parallel._verify.dry_runs import DryRuns, dry_runs_of_few
from vescale_parallel._verify.equivalence import MAX_NUMEL
from vescale_parallel._verify.plan_of_scaled_down import plan_of_scaled_down
from vescale_parallel._verify.scaled_down_model import (
    LARGE_BLOCK,
    is_large,
    scaled_down,
    shortened,
)
from vescale_parallel._verify.threads import in_fresh_thread

from .candidate import Group
from .find_candidates import find_candidates
from .groups import attention_groups, groups_of, groups_of_cuts, shared_groups
from .megatron import paired_linears
from .place_collectives import ShardingProposal, place_collectives

_HUGGINGFACE_STYLES = {
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
}


def tensor_parallel_plan(
    model: nn.Module,
    policy: str,
    size: int,
    *,
    sequence: bool = False,
    example_batch: Any = None,
) -> dict[str, str]:
    """Return the plan of :func:`propose_sharding`, FQN pattern to placement text."""
    return propose_sharding(
        model, policy, size, sequence=sequence, example_batch=example_batch
    ).plan


def propose_sharding(
    model: nn.Module,
    policy: str,
    size: int,
    *,
    sequence: bool = False,
    example_batch: Any = None,
) -> ShardingProposal:
    """Return the sharding plan that a policy gives a model.

    What a policy does not recognise stays replicated, which is always right. With an example
    batch, which is made up for transformers' models, every part of the plan is proven: blocks
    are run on random weights, whole and on all ranks, and what is not right stays whole.

    Args:
        model: Any module; real, on the meta device or deferred.
        policy: ``"auto"`` shards the axes that one forward of the example shows: heads,
            features, vocabulary. ``"huggingface"`` takes the plan transformers ships for the
            model. ``"megatron"`` pairs linears that run alike whole and cut, see
            :mod:`vescale_parallel._auto_sharding.megatron`. Without an example ``"auto"`` is
            ``"huggingface"`` where there is such a plan and ``"megatron"`` for the rest.
            ``"fsdp-only"`` shards nothing.
        size: Ranks along the tensor-parallel axis.
        sequence: Also cut activations between blocks along the sequence, their dim 1.
        example_batch: What the model is called with, as for :func:`observe`.

    Returns:
        The plan, see :class:`TensorParallel`, what could not be cut, with the reason, and what
        the plan was proven for.

    Raises:
        ValueError: If the policy is unknown or does not fit the model, or activations cannot be
            cut along the sequence.
    """
    if policy not in ("auto", "megatron", "huggingface", "fsdp-only"):
        raise ValueError(
            f"expected sharding_policy 'auto', 'megatron', 'huggingface' or 'fsdp-only', "
            f"got {policy!r}; for 'manual' give tensor_parallel.sharding_plan"
        )
    if size == 1 or policy == "fsdp-only":
        return ShardingProposal(plan={}, left_whole={})
    # Without the modes of the caller: devices, autocast, gradients.
    return in_fresh_thread(
        lambda: _propose(model, policy, size, sequence=sequence, example_batch=example_batch),
        of=model,
    )


def _propose(
    model: nn.Module, policy: str, size: int, *, sequence: bool, example_batch: Any
) -> ShardingProposal:
    batch = example_of(model) if example_batch is None else example_batch
    if batch is None and sequence:
        raise ValueError(
            "tensor_parallel.sequence needs an example_batch, to see which activations have a "
            "sequence; give one to generate_plan, or a data set to parallelize"
        )
    # A scaled-down model makes its own example, so one that was given is used if it can be.
    given = example_batch is not None
    if is_large(model, MAX_NUMEL, LARGE_BLOCK) if given else is_large(model):
        found = _of_smaller(model, policy, size, sequence=sequence)
        if found is not None:
            return found
    return _propose_as_it_is(model, batch, policy, size, sequence=sequence)


def _propose_as_it_is(
    model: nn.Module, batch: Any, policy: str, size: int, *, sequence: bool
) -> ShardingProposal:
    runs = dry_runs_of_few(model, batch)
    proposal = _proposed(runs, policy, size, sequence=sequence)
    draws = draw_marks(model, runs.batch, proposal.plan, size, runs)
    return replace(proposal, plan={**proposal.plan, **draws})


def _of_smaller(
    model: nn.Module, policy: str, size: int, *, sequence: bool
) -> ShardingProposal | None:
    """Return what a scaled-down model gets, None if there is none or its plan does not fit."""
    smaller = scaled_down(model, size)
    if smaller is None:
        return None
    # It may be large itself: what divides by many ranks has a size.
    found = _propose_as_it_is(smaller, example_of(smaller), policy, size, sequence=sequence)
    try:
        plan = _with_own_lengths(found.plan, model, size)
        plan = plan_of_scaled_down(plan, smaller, model)
        check_counts(model, shard(plan, model, size))
    except (ValueError, ObservationError):
        return None  # lengths that divide in the scaled-down model only
    return replace(found, plan=plan)


def _with_own_lengths(plan: Mapping[str, str], model: nn.Module, size: int) -> dict[str, str]:
    """Return a scaled-down model's plan with parts as long as they are in the model itself.

    Sizes are scaled down by factors of their own, so that parts may differ in length which do not
    in the scaled-down model. What they are is seen in a forward of the model with few layers.

    Raises:
        ValueError: If parts that differ in length are not found there.
    """
    placements = {p: parse_placement(text) for p, text in plan.items() if "<" not in p}
    packed = {p: each for p, each in placements.items() if isinstance(each, InterleavedShard)}
    if not packed:
        return dict(plan)
    own: dict[str, Placement] = {}
    if (short := shortened(model)) is not None:
        batch = example_of(short)
        found = find_candidates(short, batch, size, trace=_axes(short, batch)).chosen
        own = {fqn: each for cut in found for fqn, each in cut.parameters.items()}
    lengths: dict[str, str] = {}
    for pattern, each in packed.items():
        seen = {own[fqn] for fqn in matching(pattern, own)}
        alike = [o for o in seen if isinstance(o, InterleavedShard) and _are_alike(o, each)]
        if len(seen) == len(alike) == 1:
            lengths[pattern] = placement_text(alike[0])
        elif isinstance(each.parts, tuple):
            raise ValueError(f"{pattern} has parts that were not found in the model itself")
    return {**plan, **lengths}


def _are_alike(one: InterleavedShard, other: InterleavedShard) -> bool:
    counts = [
        each.parts if isinstance(each.parts, int) else len(each.parts) for each in (one, other)
    ]
    return one.dim == other.dim and counts[0] == counts[1]


def _proposed(runs: DryRuns, policy: str, size: int, *, sequence: bool) -> ShardingProposal:
    model, batch = runs.model, runs.batch
    why: dict[str, str] = {}
    if policy == "auto" and batch is not None:
        try:
            return _by_axes(runs, size, sequence=sequence)
        except (ObservationError, DryRunError) as error:
            # A forward that needs values; the layers may be recognised all the same.
            why[type(model).__name__] = f"only layers of known kinds are sharded: {error}"
    plan, undivided = _recognised(model, policy, size)
    whole = {**why, **undivided}
    if batch is None:
        return ShardingProposal(plan=texts_of(plan), left_whole=whole)
    attention, others = ([], {}) if policy == "huggingface" else attention_groups(model, size)
    groups = [*attention, *groups_of(model, plan)]
    try:
        arranged = place_collectives(runs, groups, size, sequence=sequence)
    except DryRunError as error:
        if sequence:
            raise
        whole[f"{type(model).__name__} as a whole"] = f"not compared with one device: {error}"
        return ShardingProposal(plan=texts_of(plan), left_whole=whole)
    return replace(arranged, left_whole={**whole, **others, **arranged.left_whole})


def _by_axes(runs: DryRuns, size: int, *, sequence: bool) -> ShardingProposal:
    model, batch = runs.model, runs.batch
    # A region of a sequence is gathered where its gradient would be summed, frozen or not.
    trace = _axes(model, batch, all_trained=sequence)
    proposed = find_candidates(model, batch, size, trace=trace)
    attention, whole = attention_groups(model, size)
    shared = _with_shared_heads(model, batch, size, trace)
    groups = [*attention, *shared, *groups_of_cuts(model, proposed.chosen)]
    arranged = place_collectives(runs, groups, size, sequence=sequence)
    # An axis of a parameter that is cut along another one is no loss.
    cut = arranged.plan
    rejected = {n: why for n, why in proposed.rejected if n.split(" ")[0] not in cut}
    return replace(arranged, left_whole={**rejected, **whole, **arranged.left_whole})


def _axes(model: nn.Module, batch: Any, *, all_trained: bool = False) -> Trace:
    try:
        return infer_axes(model, batch, all_trained=all_trained)
    except ObservationError:
        with experts_without_values(model) as others:
            if not others:
                raise
            return infer_axes(model, batch, all_trained=all_trained)


def _with_shared_heads(model: nn.Module, batch: Any, size: int, trace: Trace) -> list[Group]:
    """Return groups of attention layers with fewer key-value heads than ranks."""
    for fewer in range(size // 2, 1, -1):
        if size % fewer == 0:
            possible = find_candidates(model, batch, fewer, trace=trace).chosen
            found = [cut for cut in possible if cut.length == fewer]
            shared = shared_groups(model, found, size)
            if shared:
                return shared
    return []


def _recognised(
    model: nn.Module, policy: str, size: int
) -> tuple[dict[str, Placement], dict[str, str]]:
    """Return the plan for the layers that transformers names, or that pair up.

    Returns:
        The plan; and the attention layers that it would have, did their heads divide, and modules
        that were wrong when they were run, with the reason.
    """
    plan: dict[str, Placement] = {}
    if policy != "megatron":
        plan |= _huggingface(model, size)
        if policy == "huggingface" and not plan:
            raise ValueError(
                f"{type(model).__name__} has no tensor-parallel plan of its own that can be "
                "used; choose tensor_parallel.sharding_policy 'auto'"
            )
    wrong: dict[str, str] = {}
    if policy != "huggingface":
        paired, wrong = paired_linears(model, size, covered=plan)
        plan |= paired
    why = _undivided_heads(model, size)
    whole = {pattern: why for pattern in plan if why and _is_attention(pattern)}
    return {p: placement for p, placement in plan.items() if p not in whole}, {**whole, **wrong}


def _is_attention(pattern: str) -> bool:
    return "attn" in pattern.lower() or "attention" in pattern.lower()


def _undivided_heads(model: nn.Module, size: int) -> str:
    """Return why attention cannot be sharded by heads, empty if it can."""
    for fqn, module in model.named_modules():
        config = getattr(module, "config", None)
        for name in ("num_attention_heads", "num_key_value_heads", "n_head"):
            for owner in (config, module):
                count = getattr(owner, name, None)
                if isinstance(count, int) and count % size:
                    where = fqn or type(model).__name__
                    return f"{name} ({count}) of {where} is not divisible by {size}"
    return ""


def _huggingface(model: nn.Module, size: int) -> dict[str, Placement]:
    """Translate the plans that transformers' models carry."""
    plan: dict[str, Placement] = {}
    for prefix, module in model.named_modules():
        styles = cast("Mapping[str, str] | None", getattr(module, "tp_plan", None))
        if not isinstance(styles, Mapping) or not styles or not hasattr(module, "config"):
            continue
        start = f"{prefix}." if prefix else ""
        names = {generalize(name) for name, _ in module.named_modules()}
        for parent in dict.fromkeys(pattern.rpartition(".")[0] for pattern in styles):
            group = {
                pattern: style
                for pattern, style in styles.items()
                if pattern.rpartition(".")[0] == parent and pattern in names
            }
            if set(group.values()) <= _HUGGINGFACE_STYLES:
                plan |= _group_plan(model, start, group, size)
        break
    return plan


def _group_plan(
    model: nn.Module, start: str, group: Mapping[str, str], size: int
) -> dict[str, Placement]:
    """Translate the styles of sibling modules; nothing if one does not divide evenly."""
    plan: dict[str, Placement] = {}
    fqns = [fqn for fqn, _ in model.named_modules()]
    for pattern, style in group.items():
        base = start + pattern
        module = model.get_submodule(matching(base, fqns)[0])
        if style == "replicated_with_grad_allreduce":
            names = [name for name, _ in module.named_parameters(recurse=False)]
            plan |= {f"{base}.{name}.<grad>": Partial() for name in names}
            continue
        kind = linear_kind(module)
        if style == "embedding_rowwise" and isinstance(module, nn.Embedding):
            dim = 0
        elif kind is not None:
            dim = kind.out_dim if style.startswith("colwise") else kind.in_dim
        else:
            return {}
        if module.get_parameter("weight").shape[dim] % size:
            return {}
        plan[f"{base}.weight"] = Shard(dim)
        if style == "colwise_gather_output":
            # Logits stay cut by vocabulary; what else is gathered is read by code between layers.
            plan[f"{base}.<out>"] = Shard(-1) if "." not in pattern else Replicate()
        elif style == "rowwise_split_input":
            plan[f"{base}.<in>"] = Replicate()
    return plan
