"""How far predictions are from published measurements of mixtures of experts: one JSON object.

    python benchmarks/published/mixtures.py

Rows are in mixtures.json, with their source. Models are transformers' own, on the meta device, and
prices are what ``vescale_planner.predict`` says of the published layout with presets alone: no row
calibrates anything. Sums are by the backend's own collectives, which is what was measured.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers

import vescale
from vescale_parallel import Batch, DataParallel, ExpertParallel, ParallelPlan, PipelineParallel
from vescale_planner import Cluster, Prediction, predict

Row = dict[str, Any]
PUBLISHED: dict[str, Any] = json.loads(
    Path(__file__).with_name("mixtures.json").read_text(encoding="utf-8")
)


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = [compared(row) for row in PUBLISHED["rows"]]
    errors = [abs(row["error"]) for row in rows]
    print(json.dumps({"mean_error": mean(errors), "worst": max(errors), "rows": rows}, indent=1))


def compared(row: Row) -> Row:
    found = predicted(row)
    rate = found.tokens_per_second_per_device
    return {
        **row,
        "predicted": round(rate),
        "error": round(rate / row["rate"] - 1, 3),
        "seconds": {name: round(each, 3) for name, each in asdict(found.breakdown).items()},
    }


def predicted(row: Row) -> Prediction:
    """Return the price of a published layout."""
    ids_BS = torch.zeros(1, row["length"], dtype=torch.long)
    batch = {"input_ids": ids_BS, "labels": ids_BS}
    cluster = Cluster.preset(row["hardware"])
    return predict(model_of(row["model"]), plan_of(row), cluster, example_batch=batch)


def plan_of(row: Row) -> ParallelPlan:
    ranks = row["gpus"] // row["pp"]
    parts, is_pipelined = row["batch"] // ranks // row["micro_batch"], row["pp"] > 1
    return ParallelPlan(
        data_parallel=DataParallel(size=ranks, zero_stage=1, reduction="library"),
        expert_parallel=ExpertParallel(size=row["ep"]),
        pipeline_parallel=PipelineParallel(
            size=row["pp"],
            microbatches=parts if is_pipelined else 1,
            schedule="interleaved_1f1b" if row["virtual_stages"] > 1 else "1f1b",
            virtual_stages=row["virtual_stages"],
        ),
        batch=Batch(global_size=row["batch"], gradient_accumulation=1 if is_pipelined else parts),
    )


@functools.cache
def model_of(name: str) -> Any:
    config = transformers.AutoConfig.for_model(**PUBLISHED["models"][name])
    make = transformers.AutoModelForCausalLM.from_config
    return vescale.deferred_init(make, config, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
