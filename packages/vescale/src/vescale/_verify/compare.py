"""Compare what ranks computed with what one device computed, within rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vescale_parallel import ParallelPlan

from .placements import Match, Place, best_match
from .record import ModuleOutput, Record
from .report import Divergence
from .training import num_data_ranks, num_parts

# What rounding may do, in units of what a change of one epsilon in every parameter does, and at
# least, in epsilons of the largest element.
_FACTOR, _LEAST = 16.0, 32.0
# Of the largest gradient of a step: below it a gradient is what is left of terms that cancel.
_NOTHING = 1e-3


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One device's run, and the same from parameters that are off by one epsilon.

    Attributes:
        record: Of the run.
        perturbed: Of the others.
        epsilon: Of the coarsest dtype that the model computes in.
        num_shards: Into how many parts, one after the other, the run divided its batches.
    """

    record: Record
    perturbed: Sequence[Record]
    epsilon: float
    num_shards: int = 1

    def bound(self, one: Tensor, others: Sequence[Tensor], least: float = 0.0) -> float:
        """Return the largest difference that rounding explains."""
        moved = max((distance(one, other) for other in others), default=0.0)
        return max(_FACTOR * moved, _LEAST * self.epsilon * max(largest(one), least))

    def unit(self, one: Tensor, least: float = 0.0) -> float:
        """Return an epsilon of a tensor's largest element."""
        return self.epsilon * (max(largest(one), least) or 1.0)


@dataclass(kw_only=True)
class Rounding:
    """The comparison within rounding.

    Attributes:
        divergence: The first one.
        num_compared: Outputs of modules.
        not_compared: Modules whose outputs have shapes that nothing explains.
        partial: The last module whose output ranks hold as terms of a sum.
    """

    divergence: Divergence | None = None
    partial: str = ""
    num_compared: int = 0
    not_compared: list[str] = field(default_factory=list[str])


def within_rounding(expected: Expected, ranks: Sequence[Record], plan: ParallelPlan) -> Rounding:
    """Find the first divergence of a plan from one device, in the order of computation."""
    found = Rounding()
    divergences = (
        divergence
        for step in range(len(expected.record.losses))
        for divergence in _of_step(expected, ranks, plan, step, found)
    )
    found.divergence = next((each for each in divergences if each is not None), None)
    return found


def _of_step(
    expected: Expected, ranks: Sequence[Record], plan: ParallelPlan, step: int, result: Rounding
) -> Iterator[Divergence | None]:
    yield _activations(expected, ranks, plan, step, result)
    yield _numbers("loss", expected, ranks, step, lambda r: r.losses)
    yield _tensors("gradient", expected, ranks, step, lambda r: r.gradients, backward=True)
    yield _numbers("norm of gradients", expected, ranks, step, lambda r: r.norms)
    yield _tensors("parameter", expected, ranks, step, lambda r: r.parameters)
    yield _tensors("buffer", expected, ranks, step, lambda r: r.buffers)


def _activations(
    expected: Expected, ranks: Sequence[Record], plan: ParallelPlan, step: int, result: Rounding
) -> Divergence | None:
    for key, wholes in expected.record.activations.items():
        if key.step != step or not key.module:
            continue
        held = {rank: r.activations[key] for rank, r in enumerate(ranks) if key in r.activations}
        num_calls = len(wholes) // expected.num_shards
        calls = {len(tensors) for tensors in held.values()}
        if not held or len(calls) != 1 or not num_calls or calls.pop() % num_calls:
            _note(result, key)
            continue
        perturbed = [r.activations[key] for r in expected.perturbed]
        for at, one in enumerate(wholes):
            shard, call = divmod(at, num_calls)
            bound = expected.bound(one, [p[at] for p in perturbed])
            by_shard = _by_shard(held, plan, call, num_calls)
            if expected.num_shards > 1:
                by_shard = {shard: by_shard[shard]}
            match = _match(one, by_shard, bound)
            if match is None:
                _note(result, key)
                continue
            result.num_compared += 1
            if match[1].error > bound:
                found = _divergence(expected, ranks, plan, key, one, match, bound)
                return replace(found, partial=result.partial)
            if match[1].placements.startswith("partial"):
                result.partial = key.module
    return None


def _note(result: Rounding, key: ModuleOutput) -> None:
    if key.module not in result.not_compared:
        result.not_compared.append(key.module)


def _by_shard(
    held: Mapping[int, Sequence[Tensor]], plan: ParallelPlan, call: int, num_calls: int
) -> dict[int, dict[Place, Tensor]]:
    """Return local tensors by the index of their rows in the batch, then by their place."""
    found: dict[int, dict[Place, Tensor]] = {}
    for rank, tensors in held.items():
        data_rank, place = place_of(rank, plan)
        parts = len(tensors) // num_calls
        for part in range(parts):
            own = found.setdefault(data_rank * parts + part, {})
            own[place] = tensors[part * num_calls + call]
    return found


def _match(
    one: Tensor, by_shard: Mapping[int, Mapping[Place, Tensor]], bound: float
) -> tuple[int, Match] | None:
    """Return the shard of the batch that is furthest off under the best of placements."""
    best: tuple[int, Match] | None = None
    for dim in (None, *range(one.dim())):
        matches = _under(one, by_shard, dim, bound)
        if matches is None:
            continue
        worst = max(matches.items(), key=lambda item: item[1].error)
        if best is None or worst[1].error < best[1].error:
            best = worst
        if worst[1].error <= bound:
            break
    return best


def _under(
    one: Tensor, by_shard: Mapping[int, Mapping[Place, Tensor]], dim: int | None, bound: float
) -> dict[int, Match] | None:
    num_shards, matches = len(by_shard), dict[int, Match]()
    if dim is not None and (num_shards == 1 or one.shape[dim] % num_shards):
        return None
    for shard, locals_ in sorted(by_shard.items()):
        whole = one if dim is None else one.chunk(num_shards, dim)[shard]
        match = best_match(whole, locals_, bound)
        if match is None:
            return None
        matches[shard] = match
    return matches


def _divergence(
    expected: Expected,
    ranks: Sequence[Record],
    plan: ParallelPlan,
    key: ModuleOutput,
    one: Tensor,
    match: tuple[int, Match],
    bound: float,
) -> Divergence:
    shard, found = match
    rank = next(
        rank
        for rank, record in enumerate(ranks)
        if key in record.activations
        and place_of(rank, plan)[1] == found.place
        and place_of(rank, plan)[0] == shard * num_data_ranks(plan) // _num_shards(plan)
    )
    return Divergence(
        step=key.step,
        what="activation",
        name=key.module,
        rank=rank,
        index=found.index,
        found=found.found,
        expected=found.expected,
        error=found.error / expected.unit(one),
        threshold=bound / expected.unit(one),
        placements=found.placements,
        fed_by=ranks[rank].fed_by.get(key, ""),
    )


def _num_shards(plan: ParallelPlan) -> int:
    return num_data_ranks(plan) * num_parts(plan)


def place_of(rank: int, plan: ParallelPlan) -> tuple[int, Place]:
    """Return which rows a rank has, and its place among the ranks that share them."""
    axes, at = plan.axes, dict[str, int]()
    for name in reversed(axes):
        rank, at[name] = divmod(rank, axes[name])
    data = (at["dp_replicate"] * axes["ep"] + at["ep"]) * axes["dp_shard"] + at["dp_shard"]
    return data, (at["cp"], at["tp"])


def _numbers(
    what: str,
    expected: Expected,
    ranks: Sequence[Record],
    step: int,
    of: Callable[[Record], Sequence[Tensor]],
) -> Divergence | None:
    if not of(expected.record):
        return None
    one = of(expected.record)[step]
    bound = expected.bound(one, [of(r)[step] for r in expected.perturbed])
    for rank, record in enumerate(ranks):
        found = of(record)[step]
        if not distance(one, found) <= bound:
            return _of_tensors(expected, what, "", step, rank, one, found, bound)
    return None


def _tensors(
    what: str,
    expected: Expected,
    ranks: Sequence[Record],
    step: int,
    of: Callable[[Record], Sequence[Mapping[str, Tensor]]],
    *,
    backward: bool = False,
) -> Divergence | None:
    ones, others = of(expected.record)[step], [of(r)[step] for r in expected.perturbed]
    least = _NOTHING * max(map(largest, ones.values()), default=0.0) if backward else 0.0
    for rank, record in enumerate(ranks):
        found = of(record)[step]
        if found.keys() != ones.keys():
            name = sorted(found.keys() ^ ones.keys())[0]
            note = "one device has none" if name in found else "the ranks have none"
            return Divergence(step=step, what=what, name=name, rank=rank, note=note)
    # The last parameter of forward is the first whose gradient is computed.
    for name in [*ones][::-1] if backward else ones:
        one = ones[name]
        bound = expected.bound(one, [other[name] for other in others], least)
        for rank, record in enumerate(ranks):
            found = of(record)[step][name]
            if found.shape != one.shape or not distance(one, found) <= bound:
                return _of_tensors(expected, what, name, step, rank, one, found, bound)
    return None


def _of_tensors(
    expected: Expected,
    what: str,
    name: str,
    step: int,
    rank: int,
    one: Tensor,
    found: Tensor,
    bound: float,
) -> Divergence:
    if one.shape != found.shape:
        shapes = f"{tuple(found.shape)}, one device {tuple(one.shape)}"
        return Divergence(step=step, what=what, name=name, rank=rank, note=f"shape {shapes}")
    match = best_match(one, {(0, 0): found}, 0.0)
    assert match is not None
    return Divergence(
        step=step,
        what=what,
        name=name,
        rank=rank,
        index=match.index,
        found=match.found,
        expected=match.expected,
        error=match.error / expected.unit(one),
        threshold=bound / expected.unit(one),
    )


def largest(x: Tensor) -> float:
    """Return the largest finite absolute value of a tensor, 0 if it has none."""
    finite = x.double().nan_to_num(posinf=0.0, neginf=0.0)
    return float(finite.abs().max()) if x.numel() else 0.0


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, infinite if their shapes differ."""
    match = best_match(one, {(0, 0): other}, 0.0)
    return torch.inf if match is None else match.error
