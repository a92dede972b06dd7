"""Compare what modules returned on ranks with what they returned on one device."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from vescale_parallel import PackedDim, ParallelPlan

from .placements import Match, Place, best_match, match_in_any_order
from .record import ModuleOutput, Record
from .report import Divergence
from .rounding import Expected
from .training import num_data_ranks, num_parts

Shards = Mapping[int, Mapping[Place, Tensor]]  # by the index of their rows in the batch


@dataclass
class Activations:
    """The activations of all ranks, beside those of one device.

    Attributes:
        num_compared: How many were compared so far.
        not_compared: Modules whose outputs have shapes that nothing explains.
    """

    expected: Expected
    ranks: Sequence[Record]
    plan: ParallelPlan
    num_compared: int = 0
    not_compared: list[str] = field(default_factory=list[str])
    # The last module whose output ranks hold as terms of a sum.
    _partial: str = ""

    @cached_property
    def _parts(self) -> frozenset[PackedDim]:
        """The parts that dims are made of, on any rank."""
        return frozenset().union(*(rank.packed_dims for rank in self.ranks))

    @cached_property
    def _rows(self) -> Mapping[tuple[int, str], Collection[int]]:
        """How many rows modules return in a step, those of one kind together."""
        found: dict[tuple[int, str], set[int]] = {}
        for key, outputs in self.expected.record.activations.items():
            found.setdefault(_kind(key), set()).update(len(x) for x in outputs if x.dim())
        return found

    def _are_picked(self, key: ModuleOutput, whole: Tensor, num_calls: int) -> bool:
        """Whether data decides which rows an output has, as of experts, and in which order."""
        is_of_some = whole.dim() in (1, 2) and len(whole) not in self.expected.rows_and_tokens
        return num_calls > 1 or is_of_some or len(self._rows[_kind(key)]) > 1

    def first_divergence(self, step: int) -> Divergence | None:
        """Compare what modules returned in a step, in the order in which they were called."""
        for key, wholes in self.expected.record.activations.items():
            if key.step != step or not key.module:
                continue
            if self.plan.compile != "none" and not any(key in r.activations for r in self.ranks):
                continue  # within a compiled block, which nobody looks into
            for at, whole in enumerate(wholes):
                divergence = self._compared(key, at, whole, len(wholes))
                if divergence is not None:
                    return divergence
        return None

    def _compared(
        self, key: ModuleOutput, at: int, whole: Tensor, num_outputs: int
    ) -> Divergence | None:
        """Compare one tensor that a module returned on one device."""
        expected, num_calls = self.expected, num_outputs // self.expected.num_shards
        perturbed = [r.activations.get(key, []) for r in expected.perturbed]
        if num_outputs % expected.num_shards or {*map(len, perturbed)} != {num_outputs}:
            return self._not_comparable(key)  # data decides how often it is called
        bound = expected.bound(whole, [outputs[at] for outputs in perturbed])
        shard, call = divmod(at, num_calls)
        found: tuple[int, int, Match] | None = None  # stage, shard
        # A module around stages runs on several, on nothing where it is not its turn.
        for stage, by_shard in self._by_stage(key, call, num_calls):
            own = by_shard if expected.num_shards == 1 else {shard: by_shard[shard]}
            match = _match(whole, own, bound, self._parts)
            is_found = match is not None and match[1].error <= bound
            if not is_found and self._are_picked(key, whole, num_calls):
                match = _better(match, match_in_any_order(whole, own, bound), own)
            if not is_found and not whole.dim() and len(own) > 1:
                match = _of_numbers(whole, own, bound)
            if match is not None and (found is None or match[1].error < found[2].error):
                found = stage, *match
        if found is None:
            return self._not_comparable(key)
        self.num_compared += 1
        if found[2].error > bound:
            return self._divergence(key, whole, *found, bound)
        if found[2].placements.startswith("partial"):
            self._partial = key.module
        return None

    def _not_comparable(self, key: ModuleOutput) -> None:
        if key.module not in self.not_compared:
            self.not_compared.append(key.module)

    def _by_stage(
        self, key: ModuleOutput, call: int, num_calls: int
    ) -> Iterator[tuple[int, Shards]]:
        """Yield the local tensors of one of a module's calls, for each rank of the pipeline."""
        parts, stages = num_parts(self.plan), dict[int, dict[int, dict[Place, Tensor]]]()
        for rank, record in enumerate(self.ranks):
            tensors = record.activations.get(key, [])
            if len(tensors) < parts * num_calls:
                continue
            stage, data_rank, place = place_of(rank, self.plan)
            # Calls before were those in which a pipeline learned shapes.
            tensors = tensors[len(tensors) - parts * num_calls :]
            for part in range(parts):
                shards = stages.setdefault(stage, {}).setdefault(data_rank * parts + part, {})
                shards[place] = tensors[part * num_calls + call]
        num_shards = num_data_ranks(self.plan) * parts
        yield from ((at, shards) for at, shards in stages.items() if len(shards) == num_shards)
        if num_calls > 1 and self.plan.pipeline_parallel.virtual_stages > 1:
            yield from self._by_turns(key)

    def _by_turns(self, key: ModuleOutput) -> Iterator[tuple[int, Shards]]:
        """Yield the same for ranks with several stages, of each of all calls.

        Every stage runs what it can of forward, on its turn, so a rank may call a module behind
        the blocks of one micro-batch behind those of others, and before the blocks of each in all
        of its stages. Calls of all micro-batches are given as that of any.
        """
        parts, turns = (
            num_parts(self.plan),
            dict[tuple[int, int], dict[int, dict[Place, Tensor]]](),
        )
        for rank, record in enumerate(self.ranks):
            stage, data_rank, place = place_of(rank, self.plan)
            for turn, tensor in enumerate(record.activations.get(key, [])):
                shards = turns.setdefault((stage, turn), {})
                for part in range(parts):
                    shards.setdefault(data_rank * parts + part, {})[place] = tensor
        num_shards = num_data_ranks(self.plan) * parts
        yield from ((at, of) for (at, _), of in turns.items() if len(of) == num_shards)

    def _divergence(
        self,
        key: ModuleOutput,
        whole: Tensor,
        stage: int,
        shard: int,
        match: Match,
        bound: float,
    ) -> Divergence:
        where = (stage, shard // num_parts(self.plan), match.place)
        rank = next(r for r in range(len(self.ranks)) if place_of(r, self.plan) == where)
        unit = self.expected.unit(whole)
        return Divergence(
            step=key.step,
            what="activation",
            name=key.module,
            rank=rank,
            index=match.index,
            found=match.found,
            expected=match.expected,
            error=match.error / unit,
            threshold=bound / unit,
            placements=match.placements,
            fed_by=self.ranks[rank].fed_by.get(key, ""),
            partial=self._partial,
        )


def _kind(key: ModuleOutput) -> tuple[int, str]:
    return key.step, re.sub(r"\d+", "*", key.module)


def place_of(rank: int, plan: ParallelPlan) -> tuple[int, int, Place]:
    """Return a rank's place in the pipeline, which rows it has, and where it shares them."""
    rank, tp = divmod(rank, plan.tensor_parallel.size)
    rank, cp = divmod(rank, plan.context_parallel.size)
    stage, data = divmod(rank, plan.data_parallel.size)
    return stage, data, (cp, tp)


def _match(
    whole: Tensor, by_shard: Shards, bound: float, parts: Collection[PackedDim]
) -> tuple[int, Match] | None:
    """Return the shard of the batch that is furthest off under the best of placements."""
    best: tuple[int, Match] | None = None
    for dim in (None, *range(whole.dim())):
        matches = _under(whole, by_shard, dim, bound, parts)
        if matches is None:
            continue
        worst = max(matches.items(), key=lambda item: item[1].error)
        if best is None or worst[1].error < best[1].error:
            best = worst
        if worst[1].error <= bound:
            break
    return best


def _of_numbers(whole: Tensor, by_shard: Shards, bound: float) -> tuple[int, Match] | None:
    """Compare a number that a module computes of its rows, as a head does that returns a loss.

    None if one device's is neither the mean nor the sum of the shards': it may be a mean over
    tokens, of which they have not equally many. What the loop gets is compared as the loss.
    """
    places = set[Place]().union(*by_shard.values())
    numbers = {place: torch.stack([of[place] for of in by_shard.values()]) for place in places}
    for join in (torch.mean, torch.sum):
        match = best_match(whole, {place: join(x) for place, x in numbers.items()}, bound)
        if match is not None and match.error <= bound:
            return min(by_shard), match
    return None


def _better(
    one: tuple[int, Match] | None, other: Match | None, by_shard: Shards
) -> tuple[int, Match] | None:
    if other is None or (one is not None and one[1].error <= other.error):
        return one
    return min(by_shard), other


def _under(
    whole: Tensor,
    by_shard: Shards,
    dim: int | None,
    bound: float,
    parts: Collection[PackedDim],
) -> dict[int, Match] | None:
    """Return how shards match if the rows are along a dim; None if the shapes do not."""
    num_shards, matches = len(by_shard), dict[int, Match]()
    if dim is not None and (num_shards == 1 or whole.shape[dim] % num_shards):
        return None
    for shard, locals_ in sorted(by_shard.items()):
        part = whole if dim is None else whole.chunk(num_shards, dim)[shard]
        match = best_match(part, locals_, bound, parts)
        if match is None:
            return None
        matches[shard] = match
    return matches
