"""How far predictions are from published measurements: prints one JSON object.

    python benchmarks/published/score.py [--rows] [--space]

Rows are in rows.json, each with its stack; stacks say where they are from and how that was
checked. One row of every stack calibrates: the median in order of GPUs, then of flops. Its time
scales the parts of the peak that matrix products and attention reach. All others are predicted:

- ``time``: mean over stacks of their mean absolute error, and the 90th percentile over rows, once
  with presets alone (all rows) and once with the calibrating row (the others).
- ``rank_correlation``: of tokens/s a GPU, of stacks whose fastest row is above 1.05 times their
  slowest.
- ``memory``: error of states and activations where a row has both, and which layouts do not fit
  into the memory that they ran in.
- ``space`` (with ``--space``, slow): how many layouts of the same ranks and batch are predicted to
  be faster than the published one, and whether the search has it at all.

What is priced is the plan as vescale would run it, with two exceptions that every stack has: sums
by the backend's own collectives, and gradients summed in the dtype of compute.
"""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from decoder import Decoder, example

from vescale_parallel import StagePlacement
from vescale_planner import Cluster
from vescale_planner._partition import PipelineRank, Sharded, local_parts, pipeline_ranks
from vescale_planner._parts import Part
from vescale_planner._prices.columns import Numerics
from vescale_planner._prices.cost import Cost, step_cost
from vescale_planner._prices.memory import Memory, needed_bytes, peak_memory
from vescale_planner._search.ranking import ScoredCandidate
from vescale_planner._search.search import Search
from vescale_planner._space.candidates import Candidate
from vescale_planner._space.layouts import Layout
from vescale_planner._workload import Workload, computed_in, workload_of

Row = dict[str, Any]
PUBLISHED: dict[str, Any] = json.loads(
    Path(__file__).with_name("rows.json").read_text(encoding="utf-8")
)
_SEEN_LAYERS = 2
# Of AdamW, which all stacks ran.
_STATES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--space", action="store_true", help="rank the layouts in their space")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stacks = {name: rows_of(name) for name in PUBLISHED["stacks"]}
    found = {name: scored(name, rows) for name, rows in stacks.items()}
    every = [each for rows in found.values() for each in rows]
    held = [each for each in every if not each["calibrates"]]
    print(
        json.dumps(
            {
                "rows": len(every),
                "stacks": {name: summary(rows) for name, rows in found.items()},
                "presets": errors(found, "preset_error"),
                "one_row_a_stack": errors(
                    {n: [r for r in rows if not r["calibrates"]] for n, rows in found.items()},
                    "error",
                ),
                "rank_correlation": correlations(found),
                "memory": memory(held, every),
                **(
                    {"space": [in_space(row) for row in distinct_layouts()]}
                    if arguments.space
                    else {}
                ),
                **({"each": every} if arguments.rows else {}),
            },
            indent=1,
        )
    )


def rows_of(stack: str) -> list[Row]:
    return [
        {**row, "index": i} for i, row in enumerate(PUBLISHED["rows"]) if row["stack"] == stack
    ]


def calibrating(rows: list[Row]) -> Row:
    """Return the row that calibrates its stack."""
    ordered = sorted(rows, key=lambda r: (r["gpus"], r["batch"] * flops_of(r), r["index"]))
    return ordered[(len(ordered) - 1) // 2]


def flops_of(row: Row) -> float:
    return workload(row["model"], row["length"]).flops


def is_fused(row: Row) -> bool:
    """Return whether the stack's gates are one kernel, which keeps less for backward."""
    return bool(PUBLISHED["stacks"][row["stack"]].get("fused_gate"))


@functools.cache
def workload(model: str, length: int, fused: bool = False) -> Workload:
    """Return a model's workload, seen on two layers: all are alike."""
    shape = PUBLISHED["models"][model]
    with torch.device("meta"):
        seen = workload_of(Decoder(shape, _SEEN_LAYERS, fused=fused), example(length))
    last = seen.blocks[-1]

    def block(index: int) -> Part:
        names = (
            replace(p, fqn=p.fqn.replace("layers.1.", f"layers.{index}.")) for p in last.parameters
        )
        return replace(last, parameters=tuple(names))

    return replace(
        seen,
        blocks=tuple(block(index) for index in range(shape["layers"])),
        block_names=tuple(f"layers.{index}" for index in range(shape["layers"])),
    )


def cluster_of(stack: str) -> Cluster:
    hardware = PUBLISHED["stacks"][stack]["hardware"]
    if isinstance(hardware, str):
        return Cluster.preset(hardware)
    preset = Cluster.preset(hardware["preset"])
    return replace(preset, **{k: v for k, v in hardware.items() if k != "preset"})


def search_of(row: Row, cluster: Cluster, **constraints: Any) -> Search:
    base = workload_in_half(row["model"], row["length"], is_fused(row))
    constraints = {
        "precision.param": "bfloat16",
        "data_parallel.reduction": "library",
        "tensor_parallel.sequence": row["sequence"],
        "batch.global_size": row["batch"],
        "pipeline_parallel.reduce_every": "step" if sums_first(row) else "microbatch",
        **constraints,
    }
    with torch.device("meta"):
        model = Decoder(
            PUBLISHED["models"][row["model"]], PUBLISHED["models"][row["model"]]["layers"]
        )
    search = Search(
        model,
        base,
        cluster,
        constraints,
        _STATES,
        "flops",
        accumulates=True,
    )
    sharding = {
        **dict.fromkeys(("embed.weight", "head.weight"), "Shard(0)"),
        "head.<out>": "Shard(-1)",
    }
    for name in ("q_proj", "k_proj", "v_proj", "gate", "up"):
        if name != "gate" or PUBLISHED["models"][row["model"]]["gated"]:
            sharding[f"layers.*.{name}.weight"] = "Shard(0)"
    for name in ("o_proj", "down"):
        sharding[f"layers.*.{name}.weight"] = "Shard(1)"
    for size in (2**power for power in range(1, 8)):
        search.shard(size, sharding)
    return search


def sums_first(row: Row) -> bool:
    """Whether gradients are summed over ranks once a step: who shards them does so at once."""
    return row["zero"] < 2


def candidate_of(row: Row) -> Candidate:
    rows = row["batch"] // row["dp"]
    parts = rows // row["micro_batch"]
    pipelined = row["pp"] > 1
    return Candidate(
        layout=Layout(row["tp"], row["pp"], row["dp"], row["cp"]),
        zero_stage=row["zero"],
        replicate=row["replicate"],
        schedule="interleaved_1f1b" if row["virtual_stages"] > 1 else "1f1b",
        virtual_stages=row["virtual_stages"],
        microbatches=parts if pipelined else 1,
        accumulation=1 if pipelined else parts,
        recompute=row["recompute"],
        rows=rows,
        reduction="library",
        attends="gather",
    )


@dataclass(frozen=True)
class Price:
    """What is predicted of a row."""

    cost: Cost
    memory: Memory
    needed_bytes: int


def predicted(row: Row, cluster: Cluster) -> Price:
    candidate, ranks = candidate_of(row), ranks_of(row["index"])
    work = workload_in_half(row["model"], row["length"], is_fused(row))
    numerics = Numerics(
        states=_STATES,
        compute_itemsize=2,
        casts=True,
        sums_first=sums_first(row),
    )
    memory = peak_memory(candidate, ranks, numerics=numerics, output_bytes=work.output_bytes)
    cost = step_cost(candidate, ranks, cluster, numerics=numerics)
    return Price(cost, memory, needed_bytes(memory, cluster))


@functools.cache
def ranks_of(index: int) -> tuple[PipelineRank, ...]:
    """Return what pipeline ranks own: all matrices and the logits are cut, blocks are even."""
    row = PUBLISHED["rows"][index]
    work = workload_in_half(row["model"], row["length"], is_fused(row))
    names = frozenset(
        each.fqn
        for each in (*(p for part in work.parts for p in part.parameters), *work.tied)
        if each.fqn.endswith("weight") and "norm" not in each.fqn
    )
    parts = local_parts(work, Sharded(names), row["tp"], sequence=row["sequence"], cut_logits=True)
    stages = row["pp"] * row["virtual_stages"]
    placement = StagePlacement(row["pp"], row["virtual_stages"])
    starts = [round(stage * len(work.blocks) / stages) for stage in range(stages)]
    return pipeline_ranks(work, parts, starts, placement)


@functools.cache
def workload_in_half(model: str, length: int, fused: bool) -> Workload:
    return computed_in(workload(model, length, fused), 2)


def calibrated(cluster: Cluster, row: Row) -> Cluster:
    """Scale what compute reaches so that a row takes the time that was measured."""
    low, high = 0.1, 1 / max(cluster.efficiency, cluster.attention_efficiency)

    def scaled(factor: float) -> Cluster:
        return replace(
            cluster,
            efficiency=cluster.efficiency * factor,
            attention_efficiency=cluster.attention_efficiency * factor,
        )

    for _ in range(40):
        middle = (low + high) / 2
        slow = predicted(row, scaled(middle)).cost.step > row["seconds"]
        low, high = (middle, high) if slow else (low, middle)
    return scaled((low + high) / 2)


def scored(stack: str, rows: list[Row]) -> list[Row]:
    preset, chosen = cluster_of(stack), calibrating(rows)
    fitted = calibrated(preset, chosen)
    found: list[Row] = []
    for row in rows:
        plain, best = predicted(row, preset), predicted(row, fitted)
        measured = row["seconds"]
        memory = plain.memory
        each: Row = {
            "stack": stack,
            "row": f"{row['model']} s{row['length']} b{row['batch']} on {row['gpus']}",
            "calibrates": row["index"] == chosen["index"],
            "seconds": measured,
            "preset_error": plain.cost.step / measured - 1,
            "error": best.cost.step / measured - 1,
            "rate": row["batch"] * row["length"] / measured / row["gpus"],
            "predicted_rate": row["batch"] * row["length"] / best.cost.step / row["gpus"],
            "needed_gib": plain.needed_bytes / 2**30,
            "fits": plain.needed_bytes <= preset.memory_bytes
            or PUBLISHED["stacks"][stack].get("fits") is False,
            "cost": str(best.cost),
        }
        if "memory_gib" in row:
            given = row["memory_gib"]
            states = memory.parameters + memory.gradients + memory.optimizer
            each["memory_errors"] = [
                states / 2**30 / given["states"] - 1,
                memory.activations / 2**30 / given["activations"] - 1,
            ]
        found.append(each)
    return found


def summary(rows: list[Row]) -> Row:
    others = [each for each in rows if not each["calibrates"]]
    return {
        "rows": len(rows),
        "calibrated_by": next(each["row"] for each in rows if each["calibrates"]),
        "presets": round(mean(abs(each["preset_error"]) for each in rows), 4),
        "one_row": round(mean(abs(each["error"]) for each in others), 4) if others else None,
    }


def errors(found: dict[str, list[Row]], which: str) -> Row:
    values = {name: [abs(each[which]) for each in rows] for name, rows in found.items() if rows}
    every = sorted(value for each in values.values() for value in each)
    return {
        "macro_mean": round(mean(mean(each) for each in values.values()), 4),
        "p90": round(every[min(len(every) - 1, int(0.9 * len(every)))], 4),
    }


def correlations(found: dict[str, list[Row]]) -> Row:
    result: Row = {}
    for name, rows in found.items():
        rates = [each["rate"] for each in rows]
        if len(rows) > 2 and max(rates) > 1.05 * min(rates):
            result[name] = round(spearman(rates, [each["predicted_rate"] for each in rows]), 3)
    return {**result, "mean": round(mean(result.values()), 3)}


def spearman(one: list[float], other: list[float]) -> float:
    def ranks(values: list[float]) -> list[float]:
        ordered = sorted(values)
        # Equal values share the mean of their places.
        return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]

    a, b = ranks(one), ranks(other)
    half = (len(a) - 1) / 2
    top = sum((x - half) * (y - half) for x, y in zip(a, b, strict=True))
    below = sum((x - half) ** 2 for x in a) * sum((y - half) ** 2 for y in b)
    return top / below**0.5 if below else 0.0


def memory(held: list[Row], every: list[Row]) -> Row:
    pairs = [each["memory_errors"] for each in held if "memory_errors" in each]
    return {
        "states": [round(each[0], 3) for each in pairs],
        "activations": [round(each[1], 3) for each in pairs],
        "do_not_fit": [
            f"{each['stack']}: {each['row']}: {each['needed_gib']:.0f} GiB"
            for each in every
            if not each["fits"]
        ],
    }


def distinct_layouts() -> list[Row]:
    """Return one row of every model, length and stack that is cut in more ways than one."""
    first: dict[tuple[str, str, int], Row] = {}
    for row in PUBLISHED["rows"]:
        if row["tp"] * row["pp"] * row["cp"] > 1:
            first.setdefault((row["stack"], row["model"], row["length"]), row)
    return list(first.values())


# Sizes of context parallelism that are searched.
_CONTEXTS = (1, 2, 4, 8, 16)


def in_space(row: Row) -> Row:
    """Return where a published layout is among all that the search scores.

    The layout is what its authors chose: sizes of axes, stages, micro-batches. What they could not
    choose is held as it was: a stack that recomputes everything has no layouts without, and one
    without ZeRO none that are sharded. ``share_of_all`` is among all that vescale could do.
    """
    asked, cluster = candidate_of(row), cluster_of(row["stack"])
    held = {"recompute": row["recompute"], "data_parallel.zero_stage": row["zero"]}
    search = search_of(row, cluster, **held)
    every = [each for cp in _contexts(row) for each in _scored(search, row, cp, held)]
    wider = search_of(row, cluster)
    own = search.score(asked)
    freely = [
        each for cp in _contexts(row) for each in _fitting(_scored(wider, row, cp, {}), cluster)
    ]
    fits = _fitting(every, cluster)
    faster = [each for each in fits if each.step_seconds < own.step_seconds]
    best = min(fits, key=lambda each: each.step_seconds, default=own)
    return {
        "layout": f"{row['stack']}: {row['model']} on {row['gpus']}: {asked}",
        "in_space": any(each.candidate == asked for each in every),
        "fits": own.needed_bytes <= cluster.memory_bytes,
        "candidates": len(every),
        "faster": len(faster),
        "share": round(len(faster) / max(1, len(fits)), 4),
        "times_the_best": round(own.step_seconds / best.step_seconds, 3),
        "best": str(best.candidate),
        "share_of_all": round(
            sum(each.step_seconds < own.step_seconds for each in freely) / max(1, len(freely)), 4
        ),
    }


def _contexts(row: Row) -> list[int]:
    return [cp for cp in _CONTEXTS if row["gpus"] % cp == 0 and row["length"] // cp >= 2048]


def _scored(search: Search, row: Row, cp: int, held: dict[str, Any]) -> list[ScoredCandidate]:
    given = {**search.constraints, **held, "context_parallel.size": cp}
    given["context_parallel.method"] = "gather"
    found = search.under(given, keeps_sharding=True).run(row["gpus"])
    return [*found.fits, *found.too_large]


def _fitting(scored: list[ScoredCandidate], cluster: Cluster) -> list[ScoredCandidate]:
    return [each for each in scored if each.needed_bytes <= cluster.memory_bytes]


if __name__ == "__main__":
    main()
