"""Run a module whole and on all ranks, forward and backward, and compare every number."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_parallel._model.copies import copied_object, discard, writable
from vescale_parallel._model.fqns import stack_of
from vescale_parallel._model.random_copies import InDouble, random_copy, sharing_copy
from vescale_parallel._tensor_parallel.apply import install
from vescale_parallel._tensor_parallel.communicators import ThreadExchange, ThreadRanks
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.shard_module import cut_parameters
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._torch_private import FakeTensor, backward_within_modes, pytree
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._trace.generators import (
    set_generators,
    states_of_generators,
    untouched_generators,
)

from .compared_results import compare_gradients, compare_results, compare_side_effects, part_of
from .freed_memory import give_memory_back
from .modes.side_effects import watched_side_effects
from .modes.without_chance import WithoutChance
from .region import Contradiction, Findings, Given, How, Region, Results
from .region_arguments import ArgumentsOfCalls, ComparedArguments, entrances
from .threads import run_in_threads

# Of random weights of a matrix, what numbers above 1 are made of them with.
_LARGE = 32


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
    enlarged: Collection[str] = (),
) -> Region:
    """Compare one run; what modules are called with at borders of regions, or ``everywhere``.

    [Note: gradients that are zero] Of a whole parameter whose gradient is zero nobody can say
    whether ranks have parts of it. Code may round numbers to zero, as householder products do with
    what should be 1 or -1 (``parametrizations.orthogonal``). So such ones are ``enlarged`` then.
    """

    def listener(region: Region, *, is_whole: bool) -> ArgumentsOfCalls:
        watched = entrances(region.module, region.fqn, sharding).arguments
        names = (fqn for fqn, _ in region.module.named_modules() if fqn)
        return ArgumentsOfCalls(names if everywhere else watched, keep_values=is_whole)

    run = _run(make, sharding, listener, seed, training=training, enlarged=enlarged)
    region = run.region
    entering = entrances(region.module, region.fqn, sharding)
    try:
        compare_results(region.fqn, run.expected, run.ranks, run.how, sharding.size)
        compare_side_effects(region.fqn, run.expected, run.ranks)
        undecided = compare_gradients(
            region.fqn, run.expected, run.ranks, sharding.placements, found
        )
        compared = ComparedArguments(entering, run.heard, run.heard_on_ranks)
        if everywhere:
            found.partial |= undecided & compared.parameters_of_partial()
            undecided = set[str]()
        compared.check(found.partial | undecided)
        silent = {fqn for fqn in undecided if _is_zero(run.expected, region.fqn, fqn)}
    finally:
        del run
        give_memory_back()
    again = functools.partial(_compare_once, make, sharding, found, seed, training=training)
    if silent and not enlarged:
        with contextlib.suppress(DryRunError):  # such numbers need not fit
            return again(enlarged=silent)
    if undecided and entering.arguments:
        return again(everywhere=True, enlarged=enlarged)
    return region


def _is_zero(results: Results, region: str, fqn: str) -> bool:
    grad = results.grads.get(fqn.removeprefix(region).lstrip("."))
    return grad is not None and not bool(grad.any())


class Listener(Protocol):
    """Notes what modules of a copy are called with."""

    def listen(self, module: nn.Module) -> None:
        """Listen to calls before anything is converted."""
        ...

    def listen_behind(self, module: nn.Module) -> None:
        """Listen to calls where everything has been converted."""
        ...


L = TypeVar("L", bound=Listener)
L_co = TypeVar("L_co", bound=Listener, covariant=True)


class MakesListeners(Protocol[L_co]):
    """Returns a listener for a region on one device, or for a rank's part of it."""

    def __call__(self, region: Region, *, is_whole: bool) -> L_co: ...


def heard(
    make: Callable[[], Region], sharding: TensorSharding, listener: MakesListeners[L]
) -> tuple[L, list[L]]:
    """Return what listeners hear of a region on one device, and of each rank's part.

    Args:
        make: Returns the region, which is run forward and backward.
        sharding: The plan.
        listener: Makes what listens.

    Raises:
        Contradiction: If a rank's part raises.
        DryRunError: If the whole region cannot be run.
    """
    run = _run(make, sharding, listener, 0)
    return run.heard, run.heard_on_ranks


@dataclass(frozen=True)
class _Runs(Generic[L]):
    """One device's run of a region, and those of ranks, with what was heard of them."""

    region: Region
    expected: Results
    ranks: list[Results]
    how: How
    heard: L
    heard_on_ranks: list[L]


def _run(
    make: Callable[[], Region],
    sharding: TensorSharding,
    listener: MakesListeners[L],
    seed: int,
    *,
    training: bool = False,
    enlarged: Collection[str] = (),
) -> _Runs[L]:
    with untouched_generators(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = make()
        base = random_copy(region.module, region.empty).train(training or region.training)
        for name, parameter in base.named_parameters():
            if f"{region.fqn}.{name}".strip(".") in enlarged:
                parameter.data.mul_(_LARGE)
        before = states_of_generators()
        of_whole = listener(region, is_whole=True)
        expected, cotangents = _run_whole(region, base, of_whole)
        how = _completed(region.how, expected)
        # What torch draws is looked at apart: it may be cut, too.
        draw_alike = before.differs_outside_of_torch(states_of_generators())
        if draw_alike:
            set_generators(before)
        of_ranks = [listener(region, is_whole=False) for _ in range(sharding.size)]
        try:
            runs = _run_ranks(
                *(region, base, sharding, expected, cotangents, how, of_ranks),
                draw_alike=draw_alike,
            )
        except Exception as error:
            raise Contradiction(
                region.fqn, f"a rank's part raises {type(error).__name__}: {error}"
            ) from error
        finally:
            discard(base)
    return _Runs(region, expected, runs, how, of_whole, of_ranks)


def _run_whole(
    region: Region, base: nn.Module, listener: Listener
) -> tuple[Results, list[Tensor]]:
    inputs, before = list(region.inputs), states_of_generators()
    try:
        first = _run_copy(region, base, Given(inputs, region.spec, []), None)
    # Arbitrary user code: whatever it raises means that it cannot be compared.
    except Exception as error:
        raise DryRunError(region.fqn, error) from error
    if any(isinstance(x, FakeTensor) for x in first.outputs):
        error = ValueError("it is given modules to call that are outside of it")
        raise DryRunError(region.fqn, error)
    if not all(bool(x.isfinite().all()) for x in first.outputs):
        error = ValueError("its outputs on random float64 numbers are not finite")
        raise DryRunError(region.fqn, error)
    cotangents = [torch.randn_like(out) for out in first.outputs]
    if before.differs_outside_of_torch(states_of_generators()):
        set_generators(before)
    # Of another copy, should a module keep something between calls.
    given = Given(inputs, region.spec, cotangents)
    return _run_copy(region, base, given, listener), cotangents


def _run_copy(region: Region, base: nn.Module, given: Given, listener: Listener | None) -> Results:
    whole = sharing_copy(base)
    region.prepare(whole)
    if listener is not None:
        listener.listen(whole)
        listener.listen_behind(whole)
    results = run_once(whole, given)
    discard(whole)
    return results


def _run_ranks(
    region: Region,
    base: nn.Module,
    sharding: TensorSharding,
    expected: Results,
    cotangents: Sequence[Tensor],
    how: How,
    listeners: Sequence[Listener],
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
        listeners[rank].listen(local)
        boundary = Boundary(ThreadRanks(threads, rank))
        boundary.lengths.update(dict.fromkeys((stack_of(fqn),), lengths) if lengths else {})
        install(local, sharding, boundary, prefix=fqn)
        listeners[rank].listen_behind(local)
        mine = [part_of(x, p, size, rank) for x, p in zip(region.inputs, how.inputs, strict=True)]
        parts = [part_of(x, p, size, rank) for x, p in zip(cotangents, kept, strict=True)]
        results = run_once(local, Given(mine, region.spec, parts))
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
    watched = watched_side_effects(module)
    with torch.enable_grad(), InDouble(), chance, watched as side_effects:
        output = module(*args, **kwargs)
    leaves = pytree.tree_leaves(output)
    floats = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
    outputs = [x for x, is_float in zip(leaves, floats, strict=True) if is_float]
    if given.cotangents:
        # Blocks that the program checkpoints draw again.
        with InDouble(), chance:
            backward_within_modes(outputs, given.cotangents)
    return Results(
        [x.detach() for x in outputs],
        [x.detach() if isinstance(x, Tensor) else None for x in leaves],
        floats,
        [x.grad if isinstance(x, Tensor) else None for x in inputs],
        {name: _dense(p.grad) for name, p in module.named_parameters()},
        side_effects,
    )


def _dense(grad: Tensor | None) -> Tensor | None:
    """Return a gradient of ``nn.Embedding(sparse=True)``, say, as the dense one that it means."""
    return grad.to_dense() if grad is not None and grad.is_sparse else grad
