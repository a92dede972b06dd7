"""Run a module whole and on all ranks, forward and backward, and compare every number."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_parallel._model.copies import copied_object, discard, writable
from vescale_parallel._model.fqns import stack_of
from vescale_parallel._model.random_copies import InDouble, random_copy, sharing_copy
from vescale_parallel._tensor_parallel.apply import install
from vescale_parallel._tensor_parallel.communicators import ThreadExchange, ThreadRanks
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.shard_module import cut_parameters, rank_part
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._torch_private import backward_within_modes, pytree
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._trace.generators import (
    set_generators,
    states_of_generators,
    untouched_generators,
)

from .closeness import close, largest_of
from .freed_memory import give_memory_back
from .region import Contradiction, Findings, How, Region
from .region_arguments import CallArguments, ComparedArguments, entrances
from .threads import run_in_threads
from .without_chance import WithoutChance


def compare(
    make: Callable[[], Region], sharding: TensorSharding, found: Findings, *, seed: int = 0
) -> None:
    """Run a region whole and on all ranks, and note what gradients are.

    Raises:
        Contradiction: If anything differs.
        DryRunError: If the whole region cannot be run.
    """
    region = _compare_once(make, sharding, found, seed)
    averaging = [] if region.training else _averaging_norms(region.module)
    if averaging:
        try:
            _compare_once(make, sharding, found, seed, training=True)
        except DryRunError:
            return  # in training it does not run on one device either
        except Contradiction as error:
            raise Contradiction(
                error.fqn,
                f"in training, where {averaging[0]!r} normalizes by statistics of what it gets, "
                f"{error.why}",
            ) from error


def _averaging_norms(module: nn.Module) -> list[str]:
    """Return norms that are other functions in training: their statistics are the batch's."""
    return [
        fqn
        for fqn, each in module.named_modules()
        if "_NormBase" in {base.__name__ for base in type(each).__mro__}
        and getattr(each, "track_running_stats", False)
    ]


def _compare_once(
    make: Callable[[], Region],
    sharding: TensorSharding,
    found: Findings,
    seed: int,
    *,
    training: bool = False,
    everywhere: bool = False,
) -> Region:
    """Compare one run; what modules are called with at borders of regions, or ``everywhere``."""
    with untouched_generators(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = make()
        training = training or region.training
        base = random_copy(region.module, region.empty).train(training)
        before = states_of_generators()
        entering = entrances(region.module, region.fqn, sharding)
        names = [fqn for fqn, _ in region.module.named_modules() if fqn]
        watched = names if everywhere else list(entering.arguments)
        expected, cotangents = _run_whole(region, base, watched)
        how = _completed(region.how, expected)
        # What torch draws is looked at apart: it may be cut, too.
        draw_alike = before.differs_outside_of_torch(states_of_generators())
        if draw_alike:
            set_generators(before)
        try:
            runs = _run_ranks(
                *(region, base, sharding, expected, cotangents, how, watched),
                draw_alike=draw_alike,
            )
        except Exception as error:
            raise Contradiction(
                region.fqn, f"a rank's part raises {type(error).__name__}: {error}"
            ) from error
        finally:
            discard(base)
    try:
        _compare_results(region.fqn, expected, runs, how, sharding.size)
        undecided = _compare_gradients(region.fqn, expected, runs, sharding.placements, found)
        arguments = [run.arguments for run in runs]
        compared = ComparedArguments(entering, expected.arguments, arguments)
        if everywhere:
            found.partial |= undecided & compared.parameters_of_partial()
            undecided = set[str]()
        compared.check(found.partial | undecided)
    finally:
        del expected, runs, cotangents
        give_memory_back()
    if undecided and entering.arguments:
        return _compare_once(make, sharding, found, seed, training=training, everywhere=True)
    return region


def _run_whole(
    region: Region, base: nn.Module, watched: Sequence[str]
) -> tuple[Results, list[Tensor]]:
    inputs, before = list(region.inputs), states_of_generators()
    try:
        first = _run_copy(region, base, Given(inputs, region.spec, []), ())
    # Arbitrary user code: whatever it raises means that it cannot be compared.
    except Exception as error:
        raise DryRunError(region.fqn, error) from error
    if not all(bool(x.isfinite().all()) for x in first.outputs):
        error = ValueError("its outputs on random float64 numbers are not finite")
        raise DryRunError(region.fqn, error)
    cotangents = [torch.randn_like(out) for out in first.outputs]
    if before.differs_outside_of_torch(states_of_generators()):
        set_generators(before)
    # Of another copy, should a module keep something between calls.
    given = Given(inputs, region.spec, cotangents)
    return _run_copy(region, base, given, watched), cotangents


def _run_copy(region: Region, base: nn.Module, given: Given, watched: Sequence[str]) -> Results:
    whole = sharing_copy(base)
    region.prepare(whole)
    arguments = CallArguments()
    arguments.watch(whole, watched, keep_values=True)
    results = replace(run_once(whole, given), arguments=arguments)
    discard(whole)
    return results


def _run_ranks(
    region: Region,
    base: nn.Module,
    sharding: TensorSharding,
    expected: Results,
    cotangents: Sequence[Tensor],
    how: How,
    watched: Sequence[str],
    *,
    draw_alike: bool,
) -> list[Results]:
    size, fqn = sharding.size, region.fqn
    lengths = _sequence_lengths(region.inputs, how)
    kept = _of_floats(how, expected)

    def on_rank(rank: int, threads: ThreadExchange) -> Results:
        local = sharing_copy(base)
        cut_parameters(local, sharding.placements, size, rank, fqn)
        region.prepare(local)
        arguments = CallArguments()
        arguments.watch(local, watched)  # before anything enters
        boundary = Boundary(ThreadRanks(threads, rank))
        boundary.lengths.update(dict.fromkeys((stack_of(fqn),), lengths) if lengths else {})
        install(local, sharding, boundary, prefix=fqn)
        mine = [_part(x, p, size, rank) for x, p in zip(region.inputs, how.inputs, strict=True)]
        parts = [_part(x, p, size, rank) for x, p in zip(cotangents, kept, strict=True)]
        results = replace(run_once(local, Given(mine, region.spec, parts)), arguments=arguments)
        discard(local)
        return results

    return run_in_threads(size, on_rank, draw_alike=draw_alike)


def _completed(how: How, expected: Results) -> How:
    whole = tuple(Replicate() if x is not None else None for x in expected.tensors)
    return How(how.inputs, whole if how.output is None else how.output)


def _of_floats(how: How, expected: Results) -> list[Placement | None]:
    assert how.output is not None
    return [p for p, is_float in zip(how.output, expected.floats, strict=True) if is_float]


def _sequence_lengths(leaves: Sequence[Any], how: How) -> int:
    """Return the length of the sequence that activations at the border are cut along, or 0."""
    for leaf, placement in zip(leaves, how.inputs, strict=True):
        if isinstance(placement, Shard) and leaf.is_floating_point() and placement.dim == 1:
            return leaf.shape[placement.dim]
    return 0


@dataclass(frozen=True)
class Given:
    inputs: list[Any]
    spec: Any
    cotangents: list[Tensor]


@dataclass(frozen=True)
class Results:
    """One forward and backward: outputs and gradients.

    Attributes:
        outputs: Floats with a gradient.
        tensors: Every leaf of the output that is a tensor, detached; None for others.
        floats: For every leaf of the output, whether it is one of ``outputs``.
        grads: Of every parameter, None without one.
        arguments: What regions were called with.
    """

    outputs: list[Tensor]
    tensors: list[Tensor | None]
    floats: list[bool]
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]
    arguments: CallArguments = field(default_factory=CallArguments)


def run_once(module: nn.Module, given: Given, *, with_chance: bool = False) -> Results:
    """Run a module forward, and backward if there are cotangents.

    What it draws is left out, unless it is run ``with_chance``.
    """
    inputs = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in given.inputs
    ]
    args, kwargs = pytree.tree_unflatten(
        [writable(x) if isinstance(x, Tensor) else copied_object(x) for x in inputs], given.spec
    )
    # Caches and the like hold nothing that was computed without values.
    chance = contextlib.nullcontext() if with_chance else WithoutChance()
    with torch.enable_grad(), InDouble(), chance:
        output = module(*args, **kwargs)
    leaves = pytree.tree_leaves(output)
    floats = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
    outputs = [x for x, is_float in zip(leaves, floats, strict=True) if is_float]
    if given.cotangents:
        with InDouble():
            backward_within_modes(outputs, given.cotangents)
    return Results(
        [x.detach() for x in outputs],
        [x.detach() if isinstance(x, Tensor) else None for x in leaves],
        floats,
        [x.grad if isinstance(x, Tensor) else None for x in inputs],
        {name: p.grad for name, p in module.named_parameters()},
    )


def _compare_results(
    fqn: str, expected: Results, runs: Sequence[Results], how: How, size: int
) -> None:
    assert how.output is not None
    for rank, run in enumerate(runs):
        if run.floats != expected.floats:
            raise Contradiction(fqn, "a rank's part returns something else")
        for out, whole, placement in zip(run.tensors, expected.tensors, how.output, strict=True):
            if (out is None) != (whole is None):
                raise Contradiction(fqn, "a rank's part returns something else")
            if out is None or whole is None:
                continue
            if not close(out, _part(whole, placement, size, rank), largest_of(whole)):
                raise Contradiction(fqn, "what it returns differs")
        for grad, whole, placement in zip(
            run.input_grads, expected.input_grads, how.inputs, strict=True
        ):
            if not _same_gradient(grad, whole, placement, size, rank):
                raise Contradiction(fqn, "the gradient of an input differs")


def _compare_gradients(
    fqn: str,
    expected: Results,
    runs: Sequence[Results],
    placements: Mapping[str, Placement],
    found: Findings,
) -> set[str]:
    """Note what the gradients of parameters are; return whole ones whose gradients are zero."""
    undecided = set[str]()
    size, largest_in = len(runs), _largest_in_modules(expected.grads)
    for name, whole in expected.grads.items():
        full = f"{fqn}.{name}".strip(".")
        grads = [run.grads[name] for run in runs]
        if whole is None:
            if any(grad is not None and bool(grad.any()) for grad in grads):
                raise Contradiction(fqn, f"the gradient of {full!r} differs")
            continue
        placement = placements.get(full, Replicate())
        is_whole = placement == Replicate()
        parts = [_part(whole, placement, size, rank) for rank in range(size)]
        given = [
            torch.zeros_like(p) if g is None else g for p, g in zip(parts, grads, strict=True)
        ]
        if bool(whole.any()):
            found.reached.add(full)
        largest = largest_in[_owner(name)]
        as_it_is = all(close(grad, part, largest) for grad, part in zip(given, parts, strict=True))
        as_sum = is_whole and close(torch.stack(given).sum(0), whole, largest)
        if not as_it_is and not as_sum:
            raise Contradiction(fqn, f"the gradient of {full!r} differs")
        # One that is zero but for rounding says neither: of norms of queries where all tokens of
        # an example are the same one, and attention looks at all of them alike.
        if is_whole and as_it_is and as_sum:
            undecided.add(full)
        elif is_whole:
            one, other = found.whole, found.partial
            _note(*((one, other) if as_it_is else (other, one)), full, fqn)
    return undecided - found.whole - found.partial


def _largest_in_modules(grads: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the largest magnitude of the gradients of every module's own parameters.

    Gradients of a module are sums of the same numbers, and rounding is as large as these. That of
    a bias of keys is zero and all rounding: softmax does not change if a number is added to all
    scores.
    """
    found: dict[str, float] = {}
    for name, grad in grads.items():
        largest = 0.0 if grad is None else largest_of(grad)
        found[_owner(name)] = max(found.get(_owner(name), 0.0), largest)
    return found


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _note(found: set[str], other: set[str], name: str, fqn: str) -> None:
    if name in other:
        raise Contradiction(
            fqn, f"the gradient of {name!r} is a sum over ranks in a block alone and not in all"
        )
    found.add(name)


def _same_gradient(
    grad: Tensor | None, whole: Tensor | None, placement: Placement | None, size: int, rank: int
) -> bool:
    """Return whether a rank has its part of an input's gradient; none is zero."""
    if whole is None:
        return grad is None or not grad.any()
    part = _part(whole, placement, size, rank)
    return close(torch.zeros_like(part) if grad is None else grad, part, largest_of(whole))


def _part(x: Any, placement: Placement | None, size: int, rank: int) -> Any:
    if not isinstance(x, Tensor) or placement is None or placement == Replicate():
        return x
    part = rank_part(x.detach(), placement, size, rank)
    return part.requires_grad_(x.requires_grad)
