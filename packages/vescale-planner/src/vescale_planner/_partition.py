"""What each rank of a pipeline owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from vescale_parallel import StagePlacement

from ._parts import ParameterSize, Part
from ._workload import Workload

_SizeOf = Callable[[ParameterSize], float]


@dataclass(frozen=True)
class Sharded:
    """What a sharding plan names: parameters that are cut, and norms that are gathered around."""

    parameters: frozenset[str]
    gathered: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LocalPart:
    """One part of the model on one rank of the tensor-parallel axis.

    Attributes:
        part: The part as one device sees it.
        share: Fraction of its parameter bytes that is cut over the tensor-parallel ranks.
        tp: Size of the tensor-parallel axis.
        is_block: Whether it is a block, whose activations are cut with its matrices.
        sequence: Whether what it hands on, and what stays whole otherwise, is cut along the
            sequence; blocks only.
        is_last: Whether it is what runs behind the blocks.
        keeps_cut: Whether what it returns stays cut over the tensor-parallel ranks: logits of an
            output layer whose plan says so, and what the loss keeps of them.
        ep: Ranks that share its experts, of which it has its part.
        expert_share: As ``share``, of its experts' bytes alone.
        gathered_bytes: What its norms are called with around which it is gathered, for one row.
        is_tied: Whether the first stage has its parameters, too, and steps them.
        trained_share: As ``share``, of the parameters that are trained.
        has_backward: Whether something is trained in it, or before it.
    """

    part: Part
    share: float
    tp: int
    is_block: bool
    sequence: bool = False
    is_last: bool = False
    keeps_cut: bool = False
    ep: int = 1
    expert_share: float = 0.0
    gathered_bytes: float = 0.0
    is_tied: bool = False
    trained_share: float = 0.0
    has_backward: bool = True

    @cached_property
    def nbytes(self) -> float:
        """Parameter bytes of one rank."""
        return self._held(self.part.parameters, self.share, lambda p: p.nbytes)

    @cached_property
    def numel(self) -> float:
        """Parameter elements of one rank."""
        return self._held(self.part.parameters, self.share, lambda p: p.numel)

    @cached_property
    def trained_bytes(self) -> float:
        """Of ``nbytes``, those of parameters that are trained."""
        if len(self.part.trained) == len(self.part.parameters):
            return self.nbytes
        return self._held(self.part.trained, self.trained_share, lambda p: p.nbytes)

    @cached_property
    def trained_numel(self) -> float:
        """Of ``numel``, those of parameters that are trained."""
        if len(self.part.trained) == len(self.part.parameters):
            return self.numel
        return self._held(self.part.trained, self.trained_share, lambda p: p.numel)

    @property
    def num_trained(self) -> int:
        """How many parameters are trained, whatever their sizes."""
        return len(self.part.trained)

    def _held(self, parameters: Sequence[ParameterSize], share: float, size_of: _SizeOf) -> float:
        """Return what one rank has of some of its parameters together, by their sizes."""
        whole = sum(map(size_of, parameters)) * _cut(share, self.tp)
        if self.ep == 1:
            return whole
        elsewhere = sum(size_of(p) * p.elsewhere(self.ep) for p in parameters)
        return whole - elsewhere * _cut(self.expert_share, self.tp)

    @cached_property
    def experts_here(self) -> float:
        """Of ``numel``, those of experts."""
        return self._of_experts(self.part.experts)

    @property
    def expert_numel(self) -> float:
        """Of ``trained_numel``, those of experts that other ranks do not have."""
        trained = [each for each in self.part.experts if each.is_trained]
        return self._of_experts(trained) if self.ep > 1 else 0.0

    def _of_experts(self, parameters: Sequence[ParameterSize]) -> float:
        here = sum(p.numel * (1 - p.elsewhere(self.ep)) for p in parameters)
        return here * _cut(self.expert_share, self.tp)

    @cached_property
    def products(self) -> float:
        """Flops of products with matrices outside of experts, of forward, for one row."""
        part = self.part
        outside = part.flops - part.attention_flops - part.expert_flops
        return outside * _cut(self._share_outside, self.tp)

    @property
    def _share_outside(self) -> float:
        """As ``share``, of what is no expert."""
        experts, total = sum(p.nbytes for p in self.part.experts), self.part.nbytes
        if not 0 < experts < total:
            return self.share
        cut = self.share * total - self.expert_share * experts
        return min(max(cut / (total - experts), 0.0), 1.0)

    @cached_property
    def expert_flops(self) -> float:
        """Likewise of experts: a rank computes as many as without others to share them with."""
        return self.part.expert_flops * _cut(self.expert_share, self.tp)

    @cached_property
    def expert_width(self) -> float:
        """How wide the matrices of experts here are: tensor parallelism cuts between the two."""
        return self.part.expert_width(self.tp if self.expert_share > 0 else 1)

    @property
    def rows_of_expert(self) -> float:
        """Rows that one expert here is called with, for one row of every rank that shares it."""
        return self.part.rows_of_expert * self.ep

    @cached_property
    def attention_flops(self) -> float:
        """Of attention's scores, whose heads are cut with its matrices."""
        return self.part.attention_flops * _cut(self._share_outside, self.tp)

    @cached_property
    def saved_bytes(self) -> float:
        """Kept for backward, for one row.

        Of 34 bytes a token and hidden element 10 are norms, residuals and the inputs of cut
        layers, which only sequence parallelism cuts (Korthikanti et al. 2022): six hidden states
        at most, three by each norm.
        """
        if not self.is_block:
            return self.part.saved_bytes / (self.tp if self.keeps_cut else 1)
        whole = min(10 / 34 * self.part.saved_bytes, 6 * self.part.output_bytes)
        inside = (self.part.saved_bytes - whole) * _cut(self.share, self.tp)
        return inside + whole / self._handed_parts

    @cached_property
    def widest_bytes(self) -> float:
        """The largest tensor that one of its modules returns, for one row."""
        return self.part.widest_bytes * _cut(self.share, self.tp)

    @cached_property
    def handed_bytes(self) -> float:
        """What one rank holds of what the part hands to the next, for one row."""
        return self.part.output_bytes / self._handed_parts

    @cached_property
    def selective_bytes(self) -> float:
        """What a block keeps that runs again but for its products, for one row.

        Results of two of these, of attention and of the MLP, are no narrower than what it returns.
        """
        whole = min(2 * self.part.output_bytes, self.part.products_bytes)
        inside = (self.part.products_bytes - whole) * _cut(self.share, self.tp)
        return min(inside + whole + self.handed_bytes, self.saved_bytes)

    @cached_property
    def numbers(self) -> tuple[object, ...]:
        """All that its price depends on: blocks of equal numbers are priced once."""
        part = self.part
        sizes = part.numel, part.nbytes, part.flops, part.attention_flops, part.saved_bytes
        handed = part.output_bytes, part.input_bytes, part.width, part.keys_bytes
        how = (
            self.share, self.tp, self.is_block, self.sequence, self.is_last, self.keeps_cut,
            self.gathered_bytes, part.widest_bytes, part.products_bytes, self.is_tied,
            self.has_backward, self.trained_bytes, part.trained_share(of_experts=False),
            self.num_trained,
        )  # fmt: skip
        if part.experts:
            sent = part.sent_bytes, part.num_exchanges, self.expert_share, self.experts_here
            sent = *sent, part.routed_rows, self.expert_width, part.trained_share(of_experts=True)
            how = (*how, self.ep, *sent)
        return (*sizes, *handed, *how)

    @property
    def _handed_parts(self) -> int:
        return self.tp if self.sequence and self.is_block else 1


def _cut(share: float, tp: int) -> float:
    return share / tp + 1 - share


@dataclass(frozen=True)
class PipelineRank:
    """What one rank of the pipeline axis owns: one list of parts a virtual stage."""

    stages: tuple[tuple[LocalPart, ...], ...]

    @cached_property
    def parts(self) -> tuple[LocalPart, ...]:
        """The parts of all its stages."""
        return tuple(part for stage in self.stages for part in stage)

    @cached_property
    def distinct(self) -> tuple[LocalPart, ...]:
        """Those parts, of calls of one block the first: the rank has its parameters once."""
        first = {part.part.names: part for part in reversed(self.parts) if part.part.numel}
        kept = {id(part) for part in first.values()}
        return tuple(p for p in self.parts if not p.part.numel or id(p) in kept)

    @cached_property
    def kinds(self) -> tuple[tuple[LocalPart, int], ...]:
        """Its parts that differ in their numbers, and how many there are of each."""
        found: dict[object, tuple[LocalPart, int]] = {}
        for part in self.parts:
            first, count = found.get(part.numbers, (part, 0))
            found[part.numbers] = first, count + 1
        return tuple(found.values())

    @cached_property
    def numbers(self) -> tuple[object, ...]:
        """All that its price depends on besides its place."""
        kinds = ((part.numbers, count) for part, count in self.kinds)
        return (*kinds, self.unit_bytes, self.trained_bytes)

    @cached_property
    def numel(self) -> float:
        """Parameter elements."""
        return sum(part.numel for part in self.distinct)

    @cached_property
    def expert_numel(self) -> float:
        """Of those that are trained, the ones of experts that ranks share."""
        return sum(p.expert_numel for p in self.distinct)

    @cached_property
    def nbytes(self) -> float:
        """Parameter bytes."""
        return sum(self.unit_bytes)

    @cached_property
    def trained_numel(self) -> float:
        """Of the elements, those of parameters that are trained."""
        return sum(part.trained_numel for part in self.distinct)

    @cached_property
    def num_trained(self) -> int:
        """How many parameters are trained."""
        return sum(part.num_trained for part in self.distinct)

    @cached_property
    def trained_bytes(self) -> float:
        """Of the bytes, those of parameters that are trained."""
        return sum(part.trained_bytes for part in self.distinct)

    @cached_property
    def stepped_bytes(self) -> float:
        """Of those, the ones that its optimizer has."""
        return self.trained_bytes - sum(p.trained_bytes for p in self.parts if p.is_tied)

    @cached_property
    def trained_blocks(self) -> tuple[float, ...]:
        """Bytes of what is trained of every block, the most first."""
        sizes = (part.trained_bytes for part in self.distinct if part.is_block)
        return tuple(sorted(sizes, reverse=True))

    @cached_property
    def trained_outside(self) -> float:
        """Bytes of what is trained and in no block."""
        return sum(part.trained_bytes for part in self.distinct if not part.is_block)

    @cached_property
    def block_bytes(self) -> tuple[float, ...]:
        """Parameter bytes of every block, the largest first."""
        sizes = (part.nbytes for part in self.distinct if part.is_block)
        return tuple(sorted(sizes, reverse=True))

    @cached_property
    def outside_bytes(self) -> float:
        """Parameter bytes of what is in no block."""
        return sum(part.nbytes for part in self.distinct if not part.is_block)

    @cached_property
    def unit_bytes(self) -> tuple[float, ...]:
        """Parameter bytes of every part, the largest first."""
        return tuple(sorted((part.nbytes for part in self.distinct), reverse=True))

    @cached_property
    def saved_bytes(self) -> float:
        """What all its parts keep for backward, for one row."""
        return sum(part.saved_bytes * count for part, count in self.kinds)

    @cached_property
    def recomputed_bytes(self) -> float:
        """Likewise, of blocks only what they are handed."""
        kept = ((p.handed_bytes if p.is_block else p.saved_bytes) * n for p, n in self.kinds)
        return sum(kept)

    @cached_property
    def selective_bytes(self) -> float:
        """Likewise, of blocks also what their products return."""
        kept = ((p.selective_bytes if p.is_block else p.saved_bytes) * n for p, n in self.kinds)
        return sum(kept)


def local_parts(
    workload: Workload,
    sharded: Sharded,
    tp: int,
    *,
    sequence: bool = False,
    cut_logits: bool = False,
    ep: int = 1,
) -> tuple[LocalPart, ...]:
    """Return all parts of the model as a tensor-parallel rank has them.

    Args:
        workload: The model.
        sharded: What is cut.
        tp: Size of the tensor-parallel axis.
        sequence: Whether activations between blocks are cut along the sequence.
        cut_logits: Whether what the model returns stays cut.
        ep: Ranks that share experts.
    """
    parts = workload.parts
    found: list[LocalPart] = []
    has_backward = False
    for index, part in enumerate(parts):
        is_block = 0 < index < len(parts) - 1
        # An output layer with tied weights owns nothing and computes with them.
        counted = part.parameters + (workload.tied if index == len(parts) - 1 else ())
        share = _share_cut(counted, sharded)
        # A model without blocks is one part, whose activations are cut like a block's.
        whole = not workload.blocks and index == 0
        expert_share = _share_cut([each for each in counted if each.num_experts], sharded)
        trained = [each for each in counted if each.is_trained]
        has_backward = has_backward or bool(trained)
        is_last = index == len(parts) - 1
        keeps_cut = is_last and cut_logits and share > 0
        gathered = sum(nbytes for fqn, nbytes in part.norm_bytes if fqn in sharded.gathered)
        how = is_block or whole, sequence, is_last, keeps_cut, ep, expert_share, gathered
        trained_share = _share_cut(trained, sharded)
        found.append(LocalPart(part, share, tp, *how, False, trained_share, has_backward))
    return tuple(found)


def _share_cut(parameters: Sequence[ParameterSize], sharded: Sharded) -> float:
    """Return which part of some parameters' bytes is cut."""
    total = sum(each.nbytes for each in parameters)
    cut = sum(each.nbytes for each in parameters if each.fqn in sharded.parameters)
    return cut / total if total else 0.0


def pipeline_ranks(
    workload: Workload,
    parts: Sequence[LocalPart],
    starts: Sequence[int],
    placement: StagePlacement,
) -> tuple[PipelineRank, ...]:
    """Return what every pipeline rank owns.

    Tied parameters are on the first and the last stage.
    """
    first, last = 0, len(starts) - 1
    stages: list[tuple[LocalPart, ...]] = []
    for stage, (start, end) in enumerate(pairwise([*starts, len(workload.blocks)])):
        owned = list(parts[1 + start : 1 + end])
        if stage == first:
            owned.insert(0, parts[0])
        if stage == last:
            owned.append(parts[-1])
        if stage == last and last > 0 and workload.tied:
            twice = Part(parameters=workload.tied)
            held = replace(parts[-1], part=twice, sequence=False, is_last=False, keeps_cut=False)
            owned.append(replace(held, ep=1, gathered_bytes=0.0, is_tied=True))
        stages.append(tuple(owned))
    return tuple(
        PipelineRank(tuple(stages[stage] for stage in placement.stages_of(rank)))
        for rank in range(placement.size)
    )
