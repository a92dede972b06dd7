"""Find where regions begin and end, and which integers count local things, by proving it.

Given are parameters that are cut together, the layers in which the cut axis appears and those
in which it is summed away. There are few ways to put the borders of a region around them; they
are tried, likeliest first, and the first one that :mod:`vescale_parallel._verify.equivalence`
finds right is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from vescale_dtensor import is_sharded
from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.fqns import generalize, generalize_first, matching
from vescale_parallel._model.inputs import bind
from vescale_parallel._tensor_parallel.sharding_spec import resolve
from vescale_parallel._trace.dry_run import DryRunError, asks_for_values
from vescale_parallel._verify.calls.call_signature import CallForms, proof_record
from vescale_parallel._verify.dry_runs import DryRuns
from vescale_parallel._verify.equivalence import CheckResult

from .candidate import Group, Kept
from .region_options import attribute_options, border_options
from .sequence_options import (
    around_whole_layers,
    by_holder,
    names_below,
    sequence_borders,
    summed_arguments,
)
from .subject import Subject

# Combinations of borders that are tried for sequence parallelism.
_MAX_TRIES = 24

# Proves a plan: raises ValueError if it is wrong.
_Prove = Callable[[Mapping[str, str]], object]


@dataclass(frozen=True, kw_only=True)
class ShardingProposal:
    """A sharding plan that computes what one device does, and what was left whole.

    Attributes:
        plan: Pattern to text.
        left_whole: Parameters that were not cut, as patterns, and why.
        proven_call: The form of call that the plan was compared with one device for, if it was.
    """

    plan: dict[str, str]
    left_whole: dict[str, str]
    proven_call: str | None = None

    def proven_calls(self, size: int) -> tuple[str, ...]:
        """Return what a plan for ``size`` ranks says in ``tensor_parallel.proven_calls``."""
        if self.proven_call is None:
            return ()
        return (proof_record(self.proven_call, size, self.plan),)

    def sharded_parameters(self, model: nn.Module) -> frozenset[str]:
        """Return the FQNs of a model's parameters that the plan names and shards.

        Raises:
            ValueError: If a pattern of the plan matches nothing in the model.
        """
        parameters = resolve(self.plan, model).parameters
        return frozenset(fqn for fqn, placement in parameters.items() if is_sharded(placement))

    def gathered_modules(self, model: nn.Module) -> frozenset[str]:
        """Return the FQNs of the modules that the plan gathers around (``<whole>``).

        Raises:
            ValueError: If a pattern of the plan matches nothing in the model.
        """
        return frozenset(fqn for fqn, _ in resolve(self.plan, model).whole)


def place_collectives(
    runs: DryRuns, groups: Sequence[Group], size: int, *, sequence: bool
) -> ShardingProposal:
    """Return a sharding plan for as many groups as compute what one device does.

    All are compared together; if that is wrong, one after the other beside those that were right.
    Of groups that share parameters the first that is right counts. ``sequence`` shards activations
    between regions along dim 1.

    Raises:
        ValueError: If ``sequence`` is asked for and no arrangement of it is right, or forward
            needs values, by which shapes of activations cannot be seen.
    """
    model, needs_values = runs.model, False
    try:
        runs.blocks()
    except DryRunError as error:
        if sequence:
            raise ValueError(_refused_sequence(error)) from error
        needs_values = True  # the model as one region is left
    subject = Subject(runs, size, needs_values)
    kept, refused = _as_it_is(subject, groups), dict[str, str]()
    plan = _likeliest_in_sequence(subject, kept) if sequence else None
    if plan is None:
        try:
            result = subject.result_of(_together(kept))
        except DryRunError:
            raise  # no other borders would help
        except ValueError:
            kept, refused, result = _other_borders(subject, groups, kept, sequence=sequence)
        if sequence:
            plan = _in_sequence(subject, kept)
        else:
            plan = _together(kept) | ({} if result is None else _grad_marks(model, result))
    form = CallForms(model).form(*bind(model, runs.batch))
    return ShardingProposal(plan=plan, left_whole=refused, proven_call=form)


def _likeliest_in_sequence(subject: Subject, kept: Kept) -> dict[str, str] | None:
    """Return the first plan that :func:`_in_sequence` would try if it is right, else None.

    It mostly is, and says more than a proof of the same groups without a sequence, which is made
    to see which of them can be sharded where it is not.
    """
    try:
        likeliest = next(_plans_in_sequence(subject, kept), None)
        return None if likeliest is None else _proven_in_sequence(subject, likeliest)
    except ValueError:
        return None


def _refused_sequence(error: DryRunError) -> str:
    if not asks_for_values(error):
        return (
            "tensor_parallel.sequence has to see the shapes of activations in a forward, and that "
            f"of the example does not run: {error}. Give a batch that it runs on, or leave out "
            "tensor_parallel.sequence"
        )
    return (
        "tensor_parallel.sequence has to see the shapes of activations in a forward without "
        f"values, and module {error.fqn!r} asks for values ({error.__cause__}). Where a mask of "
        "booleans indexes (losses[mask].mean()), multiply by it instead; of a mixture of experts "
        "of transformers use experts_implementation='batched_mm' or 'grouped_mm' instead of "
        "'eager'; or leave out tensor_parallel.sequence"
    )


def _together(kept: Kept) -> dict[str, str]:
    return {pattern: text for _, plan in kept for pattern, text in plan.items()}


def _as_it_is(subject: Subject, groups: Sequence[Group]) -> Kept:
    """Return all groups with the likeliest places of collectives."""
    kept: Kept = []
    for group in groups:
        if not _overlaps(group, kept):
            attributes = attribute_options(subject.model, group, subject.size)[0]
            borders = next(border_options(subject.model, group))
            kept.append((group, {**group.placed, **attributes, **borders}))
    return kept


def _other_borders(
    subject: Subject, groups: Sequence[Group], likeliest: Kept, *, sequence: bool
) -> tuple[Kept, dict[str, str], CheckResult | None]:
    """Return the groups that can be sharded, why others cannot, and what running them showed.

    With the ``likeliest`` borders they are wrong.
    """
    # Where the shapes of all of them fit they say nothing of which is wrong.
    if subject.misfit(_together(likeliest)):
        kept, refused = _as_shapes_fit(subject, groups)
        if kept and subject.is_right(_together(kept)):
            return kept, refused, subject.result_of(_together(kept))
    kept, refused = _one_by_one(subject, groups)
    result = subject.result_of(_together(kept)) if kept and not sequence else None
    return kept, refused, result


def _as_shapes_fit(subject: Subject, groups: Sequence[Group]) -> tuple[Kept, dict[str, str]]:
    """Return groups with the first places of collectives whose shapes fit, and why others do not.

    Shapes are seen without numbers, which takes a small part of the time of a proof.
    """
    kept: Kept = []
    refused: dict[str, str] = {}
    for group in groups:
        if _overlaps(group, kept):
            continue
        together, why = _together(kept), ""
        for plan in _ways(subject, group):
            misfit = subject.misfit({**together, **plan})
            if not misfit:
                kept.append((group, plan))
                break
            why = why or misfit
        else:
            refused[_shown(group)] = why
    return kept, refused


def _ways(subject: Subject, group: Group) -> Iterator[dict[str, str]]:
    """Yield the ways to shard one group, likeliest first."""
    for attributes in attribute_options(subject.model, group, subject.size):
        for borders in border_options(subject.model, group):
            yield {**group.placed, **attributes, **borders}


def _one_by_one(subject: Subject, groups: Sequence[Group]) -> tuple[Kept, dict[str, str]]:
    """Return the groups that can be sharded beside those before them, and why others cannot.

    A group is compared in blocks, and what is around them with all groups at once, which takes
    longer than its blocks: with every group only if that is wrong.
    """
    if not subject.needs_values:
        kept, refused = _each_beside(subject, groups, subject.prove_blocks)
        if not kept or subject.is_right(_together(kept)):
            return kept, refused
    return _each_beside(subject, groups, subject.result_of)


def _each_beside(
    subject: Subject, groups: Sequence[Group], prove: _Prove
) -> tuple[Kept, dict[str, str]]:
    kept: Kept = []
    refused: dict[str, str] = {}
    together: dict[str, str] = {}
    for group in groups:
        if _overlaps(group, kept):
            continue  # cut in a better way already
        plan, why = _beside(subject, group, together, prove)
        if plan is None:
            refused[_shown(group)] = why
        else:
            kept.append((group, plan))
            together |= plan
    return kept, refused


def _overlaps(group: Group, kept: Kept) -> bool:
    return any(set(group.parameters) & set(other.parameters) for other, _ in kept)


def _shown(group: Group) -> str:
    return ", ".join(group.parameters)


def _beside(
    subject: Subject, group: Group, together: Mapping[str, str], prove: _Prove
) -> tuple[dict[str, str] | None, str]:
    """Return the first right way to shard one group beside others, or why there is none."""
    why = ""
    for plan in _ways(subject, group):
        try:
            prove({**together, **plan})
        except ValueError as error:
            why = why or str(error)
            continue
        return plan, ""
    return None, why


def _grad_marks(model: nn.Module, result: CheckResult) -> dict[str, str]:
    """Return the marks of parameters with partial gradients, patterns where they can be."""
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    marks: dict[str, str] = {}
    for fqn in sorted(result.partial_grads):
        patterns = (generalize(fqn), generalize_first(fqn), fqn)
        fitting = (p for p in patterns if result.partial_grads.issuperset(matching(p, names)))
        marks[f"{next(fitting)}.<grad>"] = "Partial()"
    return marks


def _in_sequence(subject: Subject, kept: Kept) -> dict[str, str]:
    """Return a sequence-parallel plan: blocks pass each other activations sharded along dim 1.

    Of each group of layers there are a few places where its collectives can go, and which are
    right depends on those of the others: a norm between two groups sees what both agree on. So
    combinations are tried, likeliest first, and the first one that computes what one device does
    is taken. Only then are gradients of what blocks get beside the sequence summed, and layers
    that stay whole surrounded by all-gathers, which cost more.
    """
    why = ""
    for plan in _plans_in_sequence(subject, kept):
        try:
            return _proven_in_sequence(subject, plan)
        except ValueError as error:
            why = why or str(error)
    raise ValueError(
        "tensor_parallel.sequence: no way was found to shard activations between the blocks of "
        f"{type(subject.model).__name__} along dim 1; leave it out ({why})"
    )


def _proven_in_sequence(subject: Subject, plan: Mapping[str, str]) -> dict[str, str]:
    return {**plan, **_grad_marks(subject.model, subject.result_of(plan))}


def _plans_in_sequence(subject: Subject, kept: Kept) -> Iterator[dict[str, str]]:
    """Yield the plans that :func:`_in_sequence` tries, likeliest first.

    Raises:
        ValueError: If there are no blocks to pass activations between.
    """
    model = subject.model
    stacks = [
        stack
        for stack in block_stacks(model)
        if any(matching(p, names_below(model, stack[0])) for g, _ in kept for p in g.parameters)
    ]
    if not stacks:
        raise ValueError(
            "tensor_parallel.sequence: expected a list of blocks (nn.ModuleList) whose layers "
            f"are sharded, and {type(model).__name__} has none; leave it out"
        )
    base: dict[str, str] = {}
    for stack in stacks:
        base[f"{stack[0]}.<in>"] = "Replicate() -> Shard(1)"
        base[f"{stack[-1]}.<out>"] = "Shard(1) -> Replicate()"
    below = [name for stack in stacks for fqn in stack for name in names_below(model, fqn)]
    inside: Kept = []
    for group, plan in kept:
        if any(matching(pattern, below) for pattern in group.placed if "<" not in pattern):
            inside.append((group, plan))
        else:
            base |= plan  # outside of blocks activations are whole
    options = [list(sequence_borders(model, together)) for together in by_holder(model, inside)]
    whole = around_whole_layers(model, stacks, kept)
    given = summed_arguments(model, stacks, subject.runs.blocks())
    ways = ({}, given, whole, given | whole)
    for around in (way for index, way in enumerate(ways) if way not in ways[:index]):
        for chosen in itertools.islice(itertools.product(*options), _MAX_TRIES):
            plan = base | around
            for part in chosen:
                plan |= part
            yield plan
