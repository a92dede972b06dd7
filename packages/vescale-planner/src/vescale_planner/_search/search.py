"""Score every candidate: what it costs, what it needs, and which are out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from vescale_parallel import (
    PipelineParallel,
    ShardingProposal,
    SplitMethod,
    StagePlacement,
    StageRule,
    rule_of,
    state_bytes,
)
from vescale_planner._constraints import refuses_experts
from vescale_planner._experts import even_sizes
from vescale_planner._partition import (
    LocalPart,
    PipelineRank,
    Sharded,
    local_parts,
    pipeline_ranks,
)
from vescale_planner._prices.columns import Numerics, columns_of, kind_of
from vescale_planner._prices.cost import Cost, step_cost, step_costs
from vescale_planner._prices.memory import (
    Memory,
    memory_of_ranks,
    needed_of_all,
    peak_memory,
    peaks,
)
from vescale_planner._space.candidates import REPLICATE, Candidate, Rows, candidates
from vescale_planner._space.layouts import Layout, layouts, stated_batch, with_schedule
from vescale_planner._workload import Workload, itemsize_of
from vescale_planner.cluster import Cluster

from .ranking import ScoredCandidate, SearchResult, distinct, divided
from .sharding import decides_sharding, found_sharding
from .some_blocks import with_some_blocks
from .stage_starts import stage_starts


@dataclass
class Search:
    """The inputs of a search, and what it has worked out for each size.

    Attributes:
        model: Only names and shapes are read.
        workload: What one row costs.
        cluster: The machines.
        constraints: Checked dotted keys.
        states: Tensors of a parameter's size that the optimizer keeps.
        split_method: How blocks are divided over stages.
        example_batch: What sharding plans are compared with one device on.
        accumulates: Whether the rows of a replica without a pipeline are cut, unasked.
        proposals: For each tensor-parallel size that was checked, how layers are cut.
        pipelines: For each kind of pipeline that was tried, why it would not run, or "". It does
            not depend on what tensor-parallel ranks shard.
        in_parts: Why rows cannot be run in parts, or "", by pipelines, and by accumulating ranks.

    [Note: proven sizes] To find a sharding plan, layers are run on every rank's part of random
    numbers, which takes seconds a size. Candidates are priced by the plan of another size, which
    cuts the same layers, and only those to be returned are proven; a size that turns out
    impossible is left out then, with its candidates.
    """

    model: nn.Module
    workload: Workload
    cluster: Cluster
    constraints: Mapping[str, Any]
    states: int
    split_method: SplitMethod
    example_batch: Any = None
    accumulates: bool = False
    proposals: dict[int, ShardingProposal] = field(default_factory=dict["int", ShardingProposal])
    pipelines: dict[Hashable, str] = field(default_factory=dict["Hashable", "str"])
    in_parts: dict[bool, str] = field(default_factory=dict["bool", "str"])
    _sharding: dict[int, dict[str, str] | str] = field(
        default_factory=dict["int", "dict[str, str] | str"]
    )
    _ranks: dict[tuple[object, ...], tuple[PipelineRank, ...]] = field(
        default_factory=dict["tuple[object, ...]", "tuple[PipelineRank, ...]"]
    )
    _parts: dict[tuple[int, int], tuple[LocalPart, ...]] = field(
        default_factory=dict["tuple[int, int]", "tuple[LocalPart, ...]"]
    )
    # By sharding plan: most tensor-parallel sizes share one, and to resolve it walks the model.
    _sharded: dict[tuple[tuple[str, str], ...], Sharded] = field(
        default_factory=dict["tuple[tuple[str, str], ...]", Sharded]
    )
    # By what of other constraints decides them, sharding plans under those: a search that is
    # repeated, with batches that are accumulated for example, proves them once.
    _elsewhere: dict[str, tuple[dict[int, ShardingProposal], dict[int, dict[str, str] | str]]] = (
        field(default_factory=dict[str, Any])
    )
    _starts: dict[tuple[object, ...], list[int]] = field(
        default_factory=dict["tuple[object, ...]", "list[int]"]
    )

    @property
    def sequence(self) -> bool:
        """Whether activations between blocks are sharded along the sequence."""
        return bool(self.constraints.get("tensor_parallel.sequence", False))

    @property
    def numerics(self) -> Numerics:
        """What the constraints say of dtypes."""
        get = self.constraints.get
        reduce = get("precision.reduce")
        return Numerics(
            states=self.states,
            compute_itemsize=itemsize_of(get("precision.param"), self.workload.itemsize),
            casts=get("precision.param") is not None,
            reduce_itemsize=None if reduce is None else itemsize_of(reduce, 0),
            keeps_buffers=self.cluster.keeps_buffers,
            sums_first=get("pipeline_parallel.reduce_every", "step") == "step",
        )

    def run(self, world_size: int) -> SearchResult:
        """Score every candidate of a world size.

        Raises:
            ValueError: If no sizes of the axes multiply to the world size.
        """
        found: list[Candidate] = []
        rejected: dict[str, None] = {}
        rows = self.rows(world_size)
        has_loss = self.workload.returns_loss or not self.workload.observed
        for layout in layouts(world_size, self.constraints):
            reason = self._impossible(layout)
            if reason:
                rejected[reason] = None
                continue
            for each in candidates(
                layout,
                rows,
                self.workload.block_names,
                with_schedule(self.constraints, layout.pp, returns_loss=has_loss),
                accumulates=self.accumulates,
                experts=self._expert_sizes(layout),
            ):
                if isinstance(each, str):
                    rejected[each] = None
                else:
                    found.append(each)
        return self.divided(self._with_some_blocks(self.scored(found)), distinct(rejected))

    def _with_some_blocks(self, scored: list[ScoredCandidate]) -> list[ScoredCandidate]:
        if self.constraints.get("recompute") is not None or self.workload.block_calls:
            return scored
        limit, num_blocks = self.cluster.memory_bytes, len(self.workload.blocks)
        return scored + with_some_blocks(scored, self.scored, num_blocks, limit)

    def divided(self, scored: Iterable[ScoredCandidate], rejected: Iterable[str]) -> SearchResult:
        """Divide candidates into those that fit and those that do not."""
        return divided(scored, rejected, self.cluster.memory_bytes)

    def proven(self, result: SearchResult, tp: int) -> SearchResult:
        """Return a result in which a tensor-parallel size is proven: see [Note: proven sizes]."""
        if tp in self._sharding or tp == 1:
            return result
        likely, found = self.likely_sharding(tp), self.sharding(tp)
        if isinstance(found, dict) and isinstance(likely, dict) and likely.keys() == found.keys():
            return result
        every = *result.fits, *result.too_large
        scored = [each for each in every if each.candidate.layout.tp != tp]
        if isinstance(found, dict):
            again = (each.candidate for each in every if each.candidate.layout.tp == tp)
            scored += self.scored(again)
        reasons = [*result.rejected] if isinstance(found, dict) else [found, *result.rejected]
        return self.divided(scored, reasons)

    def rows(self, world_size: int) -> Rows:
        """Return the batch of all candidates: as constrained, or one that is stated."""
        given = self.constraints.get("batch.global_size")
        if given is not None:
            return Rows(global_size=given, example=self.workload.rows)
        stated = stated_batch(
            world_size, self.constraints, self.workload.rows, self.workload.tokens
        )
        return Rows(global_size=stated, example=self.workload.rows, is_stated=True)

    def memories(self, candidate: Candidate) -> tuple[Memory, ...]:
        """Return the memory of every pipeline rank."""
        return memory_of_ranks(
            candidate,
            self._ranks_of(candidate),
            numerics=self.numerics,
            output_bytes=self.workload.output_bytes,
        )

    def shard(self, tp: int, plan: dict[str, str]) -> None:
        """Take a sharding plan for a tensor-parallel size instead of looking for one."""
        self._sharding[tp] = plan

    def score(self, candidate: Candidate) -> ScoredCandidate:
        """Predict one candidate."""
        return self.scored([candidate])[0]

    def scored(self, candidates: Iterable[Candidate]) -> list[ScoredCandidate]:
        """Predict many: those that differ in numbers alone at once, by kind."""
        groups: dict[object, list[Candidate]] = {}
        for each in candidates:
            groups.setdefault((kind_of(each), self._rank_key(each)), []).append(each)
        return [scored for group in groups.values() for scored in self._scored_group(group)]

    def _scored_group(self, group: list[Candidate]) -> Iterator[ScoredCandidate]:
        columns, ranks, numerics = columns_of(group), self._ranks_of(group[0]), self.numerics
        steps = step_costs(columns, ranks, self.cluster, numerics=numerics).step
        output_bytes = self.workload.output_bytes
        totals = peaks(columns, ranks, numerics=numerics, output_bytes=output_bytes)
        needed = needed_of_all(totals, self.cluster)
        for each, step, nbytes in zip(group, steps.tolist(), needed.tolist(), strict=True):
            yield ScoredCandidate(
                candidate=each, step_seconds=step, needed_bytes=nbytes, search=self
            )

    def cost(self, candidate: Candidate) -> Cost:
        """Return what the step of one candidate is spent on."""
        ranks = self._ranks_of(candidate)
        return step_cost(candidate, ranks, self.cluster, numerics=self.numerics)

    def memory(self, candidate: Candidate) -> Memory:
        """Return what is in the memory of the fullest rank of one candidate."""
        return peak_memory(
            candidate,
            self._ranks_of(candidate),
            numerics=self.numerics,
            output_bytes=self.workload.output_bytes,
        )

    def sharding(self, tp: int) -> dict[str, str] | str:
        """Return the proven sharding plan for a tensor-parallel size, or why there is none."""
        if tp not in self._sharding:
            self._sharding[tp] = self._make_sharding(tp)
            for key in [key for key in self._ranks if key[0] == tp]:
                del self._ranks[key]
            for key in [key for key in self._parts if key[0] == tp]:
                del self._parts[key]
        return self._sharding[tp]

    def likely_sharding(self, tp: int) -> dict[str, str] | str:
        """Return the sharding plan of a size or of another one, see [Note: proven sizes]."""
        proven = (plan for plan in self._sharding.values() if plan and isinstance(plan, dict))
        if tp == 1 or tp in self._sharding:
            return self.sharding(tp)
        return next(proven, None) or self.sharding(tp)

    def under(self, constraints: Mapping[str, Any], *, keeps_sharding: bool) -> Search:
        """Return a search under other constraints, with the sharding plans of this if they are."""
        proposals, sharding = self.proposals, self._sharding
        if not keeps_sharding:
            decides = repr(
                sorted(each for each in constraints.items() if decides_sharding(each[0]))
            )
            proposals, sharding = self._elsewhere.setdefault(decides, ({}, {}))
        return replace(
            self,
            constraints=constraints,
            proposals=proposals,
            _sharding=sharding,
            _ranks={},
            _parts={},
            _starts={},
        )

    def with_sequence(self) -> Search:
        """Return a search of the same sharding plans with a sharded sequence, not yet checked."""
        constraints = {**self.constraints, "tensor_parallel.sequence": True}
        return replace(self, constraints=constraints, _ranks={}, _parts={})

    def starts(self, candidate: Candidate) -> list[int]:
        """Return the first block of every stage."""
        points = self.constraints.get("pipeline_parallel.split_points")
        if candidate.stages == 1:
            return [0]
        if points is not None:
            return [0, *(self.workload.block_names.index(point) for point in points)]
        key = self._decides_stages(candidate)
        if key not in self._starts:
            rule = self._stage_rule(candidate)
            rows, ep = candidate.rows_of_part, candidate.layout.ep
            self._starts[key] = stage_starts(self.workload, rule, rows, ep)
        return self._starts[key]

    def _decides_stages(self, candidate: Candidate) -> tuple[object, ...]:
        """Return what of a candidate decides where it is cut: less than all, to cut seldom."""
        if self.split_method not in ("memory", "auto"):
            return (candidate.stages,)
        found = (
            candidate.stages, candidate.rows_of_part, candidate.recompute, candidate.layout.ep
        )  # fmt: skip
        if self.split_method == "auto":
            return found
        schedule = candidate.schedule, candidate.virtual_stages, candidate.parts
        return (*found, *schedule, candidate.zero_stage, candidate.shard)

    def _stage_rule(self, candidate: Candidate) -> StageRule:
        """Return what is to be even over stages."""
        flops = self.cluster.flops_per_second_of(self.numerics.compute_itemsize)
        flops *= self.cluster.efficiency
        return StageRule(
            PipelineParallel(
                size=candidate.layout.pp,
                virtual_stages=candidate.virtual_stages,
                schedule=candidate.schedule,
                microbatches=candidate.microbatches,
                split_method=self.split_method,
            ),
            microbatches=candidate.parts,
            recomputes=candidate.recompute == "full",
            states=state_bytes(candidate.zero_stage, candidate.shard, self.states),
            flops_per_byte=flops / self.cluster.reached_memory_bytes_per_second,
        )

    def _expert_sizes(self, layout: Layout) -> list[int]:
        """Return by how many ranks experts may be shared, unasked.

        What the runtime refuses with them whatever the model is is left out; what it refuses of
        this model is asked once the plan is to be returned.
        """
        experts, copies = self.workload.experts, self.constraints.get(REPLICATE)
        is_cut = layout.tp > 1 and any(layer.is_listed for layer in experts)
        if not experts or is_cut or self._refuses_experts:
            return [1]
        found = even_sizes(experts, layout.dp * layout.cp)
        return [size for size in found if size == 1 or copies in (None, size)]

    @cached_property
    def _refuses_experts(self) -> bool:
        return refuses_experts(self.constraints)

    def _impossible(self, layout: Layout) -> str:
        if layout.pp > 1 and self.workload.no_pipeline:
            return self.workload.no_pipeline
        sharding = self.likely_sharding(layout.tp)
        return sharding if isinstance(sharding, str) else ""

    def _make_sharding(self, tp: int) -> dict[str, str] | str:
        found = found_sharding(self.model, self.constraints, self.example_batch, tp)
        if isinstance(found, ShardingProposal):
            self.proposals[tp] = found
            return found.plan
        return found

    def _ranks_of(self, candidate: Candidate) -> tuple[PipelineRank, ...]:
        layout, key = candidate.layout, self._rank_key(candidate)
        if key not in self._ranks:
            starts = self.starts(candidate)
            style = rule_of(candidate.schedule).style
            placement = StagePlacement(layout.pp, candidate.virtual_stages, style)
            parts = self.parts_of(layout.tp, layout.ep)
            self._ranks[key] = pipeline_ranks(self.workload, parts, starts, placement)
        return self._ranks[key]

    def _rank_key(self, candidate: Candidate) -> tuple[object, ...]:
        """Return what decides what pipeline ranks own; sizes of tensor parallelism first."""
        tp, pp = candidate.layout.tp, candidate.layout.pp
        style = rule_of(candidate.schedule).style
        sizes = tp, candidate.layout.ep, pp, candidate.virtual_stages
        return (*sizes, style, *self._decides_stages(candidate))

    def parts_of(self, tp: int, ep: int) -> tuple[LocalPart, ...]:
        """Return all parts of the model as ranks of tensor and expert parallelism have them."""
        if (tp, ep) not in self._parts:
            sharding = self.likely_sharding(tp)
            assert not isinstance(sharding, str)
            # Of a module by its own name, not of one in every block.
            cut_logits = any(
                key.endswith("<out>") and "*" not in key and placement == "Shard(-1)"
                for key, placement in sharding.items()
            )
            self._parts[tp, ep] = local_parts(
                self.workload,
                self._sharded_by(sharding),
                tp,
                sequence=self.sequence,
                cut_logits=cut_logits,
                ep=ep,
            )
        return self._parts[tp, ep]

    def _sharded_by(self, sharding: Mapping[str, str]) -> Sharded:
        key = tuple(sharding.items())
        if key not in self._sharded:
            plan = ShardingProposal(plan=dict(sharding), left_whole={})
            self._sharded[key] = Sharded(
                plan.sharded_parameters(self.model), plan.gathered_modules(self.model)
            )
        return self._sharded[key]
