"""Numeric equivalence check of a sharding plan: blocks and the model on one device and all ranks.

The ranks are threads, each with its own part of the parameters and the very hooks that will
run. In float64 and on random weights, what a block returns, what the model returns and every
gradient must agree with those of one device. Nothing about operators is assumed.

[Note: regions that are run] Blocks first, one of each kind, since what differs is found there by
name. Then the model from its first input to its last output, with all that lies outside of blocks;
of a long stack equal blocks in the middle pass on what they get. What is cut and was in neither
run, or had no part in any gradient, is named in ``unchecked``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate

from vescale_parallel._model.blocks import numel_of
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.hook_readers import read_by_hooks
from vescale_parallel._tensor_parallel.shard_module import placement_between
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import DryRunError, ModuleCall

from .compared_runs import compare
from .dry_runs import DryRuns
from .large_tables import checked_tables
from .region import Contradiction as Contradiction, Findings, How, region_of_call
from .whole_model import passed_over, whole_region

# Larger blocks, and larger models, are not run: two copies of their weights in float64 take a GiB.
MAX_NUMEL = 2**26
NOT_REACHED = "no result of the example depends on it"
# How many sets of weights a model whose forward depends on values is run on.
_DRAWS = 4


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What running a plan showed.

    Attributes:
        partial_grads: Whole parameters of which ranks hold partial gradients.
        whole_grads: Whole parameters of which every rank has the whole gradient, and not zero.
        proven: Blocks that were run, one of each kind, the model itself being ``""``.
        too_large: Blocks that only fit in shape, being too large to run.
        unchecked: Cut parameters outside of all that was run, and why.
    """

    partial_grads: frozenset[str]
    whole_grads: frozenset[str]
    proven: tuple[str, ...]
    too_large: tuple[str, ...]
    unchecked: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(eq=False)
class _Blocks:
    """The blocks of a model, and which of them were run.

    Attributes:
        kinds: Of every block, what makes it equal to another under the plan.
        proven: Blocks that were run, for this plan or another.
        compared: Those, and blocks that are equal to one of them.
    """

    kinds: dict[str, object] = field(default_factory=dict[str, object])
    proven: list[str] = field(default_factory=list[str])
    compared: list[str] = field(default_factory=list[str])
    too_large: list[str] = field(default_factory=list[str])


# Blocks that were right, by what makes them equal under plans: the name of one, what was found.
Compared = dict[object, tuple[str, Findings]]


def check_plan(
    runs: DryRuns,
    sharding: TensorSharding,
    *,
    needs_values: bool = False,
    compared: Compared | None = None,
) -> CheckResult:
    """Run a plan without a second rank.

    Args:
        runs: The model and its batch.
        sharding: The plan.
        needs_values: Whether forward does: it is run as one region then, more than once.
        compared: Blocks that were right under other plans of these runs and this number of ranks,
            and are not run again if this plan says the same of them; those that are run are added.

    Raises:
        Contradiction: If the results or gradients of a block or the model differ, or shapes do
            not fit.
        DryRunError: If the model cannot be run, with values or without.
    """
    compared = {} if compared is None else compared
    result = _check(runs, sharding, compared, needs_values=needs_values)
    trained = runs.in_training
    if trained is None:
        return result
    try:
        return _of_both(result, _check(trained, sharding, compared, needs_values=needs_values))
    except DryRunError:
        return result  # in training it does not run on one device either
    except Contradiction as error:
        raise Contradiction(error.fqn, f"in training, {error.why}") from error


def _check(
    runs: DryRuns, sharding: TensorSharding, compared: Compared, *, needs_values: bool
) -> CheckResult:
    whole: Mapping[str, ModuleCall] = {} if needs_values else runs.blocks()
    found = Findings()
    blocks = _prove_blocks(runs, whole, sharding, found, compared)
    unchecked = _check_rest(runs, whole, blocks, sharding, found)
    hooked = read_by_hooks(runs.model)
    unchecked |= {fqn: hooked[fqn] for fqn in _cut(sharding) if fqn in hooked}
    return CheckResult(
        partial_grads=frozenset(found.partial),
        whole_grads=frozenset(found.whole),
        proven=tuple(blocks.proven),
        too_large=tuple(blocks.too_large),
        unchecked=unchecked,
    )


def _of_both(evaluated: CheckResult, trained: CheckResult) -> CheckResult:
    """Return what evaluation and training showed together.

    Raises:
        Contradiction: If a gradient is a sum over ranks in one of them alone.
    """
    partial = evaluated.partial_grads | trained.partial_grads
    whole = evaluated.whole_grads | trained.whole_grads
    for fqn in sorted(partial & whole):
        raise Contradiction(fqn, "its gradient is a sum over ranks there and not in evaluation")
    # What no result depends on may be what only the other mode uses.
    unchecked = {
        fqn: why
        for one, other in ((evaluated, trained), (trained, evaluated))
        for fqn, why in one.unchecked.items()
        if why != NOT_REACHED or fqn in other.unchecked
    }
    return replace(evaluated, partial_grads=partial, whole_grads=whole, unchecked=unchecked)


def check_blocks(runs: DryRuns, sharding: TensorSharding, compared: Compared) -> tuple[str, ...]:
    """Run a plan in the blocks alone, as :func:`check_plan` does first, and raise what it raises.

    Returns:
        Blocks that are too large to be run.
    """
    return tuple(_prove_blocks(runs, runs.blocks(), sharding, Findings(), compared).too_large)


def _prove_blocks(
    runs: DryRuns,
    whole: Mapping[str, ModuleCall],
    sharding: TensorSharding,
    found: Findings,
    compared: Compared,
) -> _Blocks:
    model, blocks = runs.model, _Blocks()
    try:
        part = runs.part(sharding) if whole else {}
    except DryRunError as error:
        raise Contradiction(error.fqn, f"one rank's part does not run: {error}") from error
    firsts: dict[object, str] = {}
    for fqn in whole:
        if fqn not in part:
            continue
        module = model.get_submodule(fqn)
        how = _match(fqn, whole[fqn], part[fqn], sharding.size)
        said = _said(sharding, fqn)
        kind = blocks.kinds[fqn] = (
            *(generalize(fqn), type(module), _shapes(module), _shapes_of(whole[fqn]), repr(how)),
            *(said, _scalars(module), runs.training),
        )
        first = firsts.setdefault(kind, fqn)
        if not fqn or (not said and _is_whole(how)):
            continue
        if numel_of(module) > MAX_NUMEL:
            if first == fqn:
                blocks.too_large.append(fqn)
            continue
        blocks.compared.append(fqn)
        if kind not in compared:
            of_block = Findings()
            make = functools.partial(
                region_of_call, module, fqn, whole[fqn], how, training=runs.training
            )
            compare(make, sharding, of_block)
            compared[kind] = fqn, of_block
        found.add(*compared[kind], fqn)
        if first == fqn:
            blocks.proven.append(fqn)
    return blocks


def _check_rest(
    runs: DryRuns,
    whole: Mapping[str, ModuleCall],
    blocks: _Blocks,
    sharding: TensorSharding,
    found: Findings,
) -> dict[str, str]:
    """Run the model itself; return what is cut and was not compared, and why."""
    if blocks.too_large:
        return {}
    model = runs.model
    calls = {fqn: call for fqn, call in whole.items() if fqn}
    over = passed_over(model, calls, blocks.kinds)
    skipped = [fqn for fqns in over.values() for fqn in fqns]
    numel = numel_of(model) - sum(numel_of(model.get_submodule(fqn)) for fqn in skipped)
    if numel > MAX_NUMEL:
        why = f"{type(model).__name__} is too large to be run whole"
        return _not_compared(runs, blocks, sharding, why)
    try:
        # Values may decide what is run.
        for seed in range(1 if whole else _DRAWS):
            make = functools.partial(whole_region, model, runs.batch, over, training=runs.training)
            compare(make, sharding, found, seed=seed)
    except DryRunError as error:
        if not blocks.proven:
            raise
        return _not_compared(runs, blocks, sharding, f"the model was not run whole: {error}")
    blocks.proven.append("")
    return _not_reached(model, sharding, found)


def _not_compared(
    runs: DryRuns, blocks: _Blocks, sharding: TensorSharding, why: str
) -> dict[str, str]:
    """Return what is cut outside of the blocks that were run, but for tables run apart."""
    inside = tuple(f"{fqn}." for fqn in blocks.compared)
    outside = [fqn for fqn in _cut(sharding) if not fqn.startswith(inside)]
    apart = checked_tables(runs, sharding, _cut(sharding), inside)
    return {fqn: why_not for fqn in [*outside, *apart] if (why_not := apart.get(fqn, why))}


def _not_reached(model: nn.Module, sharding: TensorSharding, found: Findings) -> dict[str, str]:
    named = dict(model.named_parameters(remove_duplicate=False))
    ids = {id(named[fqn]) for fqn in found.reached}
    patterns = {generalize(fqn) for fqn, p in named.items() if id(p) in ids}
    return {fqn: NOT_REACHED for fqn in _cut(sharding) if generalize(fqn) not in patterns}


def _cut(sharding: TensorSharding) -> list[str]:
    """Return the parameters of which ranks hold, or use, parts."""
    shared = [f"{fqn}.weight" for fqn in sharding.spec.shared]
    cut = [fqn for fqn, each in sharding.placements.items() if each != Replicate()]
    return [*cut, *shared]


def _said(sharding: TensorSharding, fqn: str) -> tuple[object, ...]:
    """Return what a plan says of a block, by names within it."""
    found: list[tuple[str, ...]] = []
    for field_name, said in {**vars(sharding.spec), "placements": sharding.placements}.items():
        pairs = said.items() if isinstance(said, Mapping) else ((key, True) for key in said)
        for key, value in pairs:
            owner, rest = key if isinstance(key, tuple) else (key, "")
            if not fqn or f"{owner}.".startswith(f"{fqn}."):
                found.append((field_name, owner.removeprefix(fqn), str(rest), repr(value)))
    return tuple(sorted(found))


def _scalars(module: nn.Module) -> str:
    """Return the plain attributes that may steer a forward, but for where the module is."""
    return repr(
        [
            (name, value)
            for each in module.modules()
            for name, value in vars(each).items()
            if type(value) in (bool, int, float, str)
            and not name.endswith(("idx", "index", "_id"))
        ]
    )


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.shape) for p in module.parameters())


def _shapes_of(call: ModuleCall) -> str:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return repr([tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in leaves])


def _is_whole(how: How) -> bool:
    placements = (*how.inputs, *(how.output or ()))
    return all(each is None or each == Replicate() for each in placements)


def _match(fqn: str, whole: ModuleCall, part: ModuleCall, size: int) -> How:
    def placements(ours: Any, theirs: Any, what: str) -> tuple[Placement | None, ...]:
        found: list[Placement | None] = []
        pairs = (pytree.tree_leaves(ours), pytree.tree_leaves(theirs))
        if len(pairs[0]) != len(pairs[1]):
            raise Contradiction(fqn, f"{what} has {len(pairs[1])} leaves, not {len(pairs[0])}")
        for one, other in zip(*pairs, strict=True):
            placement = None
            if isinstance(one, Tensor):
                placement = placement_between(one, other, size)
                if placement is None:
                    raise Contradiction(
                        fqn,
                        f"{what} of shape {tuple(one.shape)} has shape {tuple(other.shape)} "
                        f"on a rank of {size}",
                    )
            found.append(placement)
        return tuple(found)

    return How(
        placements((whole.args, dict(whole.kwargs)), (part.args, dict(part.kwargs)), "an input"),
        placements(whole.output, part.output, "an output"),
    )
