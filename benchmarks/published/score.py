"""Predict published measurements, and print how far off.

Run ``python benchmarks/published/score.py``; ``--stack NAME`` for one stack, ``--json`` for every
row. ``README.md`` beside it says where rows are from.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vescale_parallel import (
    Batch,
    DataParallel,
    ParallelPlan,
    PipelineParallel,
    Precision,
    TensorParallel,
)
from vescale_planner import predict

Row = dict[str, Any]


class Block(nn.Module):
    """A transformer block: GPT's, or Llama's where the feed-forward is gated."""

    def __init__(self, model: Mapping[str, int]) -> None:
        super().__init__()
        hidden, self.heads = model["hidden"], model["heads"]
        self.kv_heads = model.get("kv_heads", self.heads)
        self.width, gated = hidden // self.heads, model.get("gated_ffn")
        both = 2 * self.kv_heads * self.width
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, hidden + both), nn.Linear(hidden, hidden)
        ffn = gated or 4 * hidden
        self.gate = nn.Linear(hidden, ffn, bias=False) if gated else None
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        kv = self.kv_heads * self.width
        q, k, v = self.qkv(normed).split([x.shape[-1], kv, kv], dim=-1)
        heads = [part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (q, k, v)]
        attended = functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        if self.gate is None:
            return x + self.down(functional.gelu(self.up(normed)))
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Transformer(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, model: Mapping[str, int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model["vocab"], model["hidden"])
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["layers"]))
        self.norm = nn.LayerNorm(model["hidden"])
        self.head = nn.Linear(model["hidden"], model["vocab"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", help="only that one")
    parser.add_argument("--json", action="store_true", help="print every row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = json.loads((Path(__file__).parent / "rows.json").read_text())
    rows = [row for row in rows if arguments.stack in (None, row["stack"])]
    for row in rows:
        row["measured_seconds"], row["predicted_seconds"] = measured_seconds(row), predicted(row)
        row["tokens"] = row["global_batch"] * row["model"]["tokens"] / row["gpus"]
        if arguments.json:
            print(json.dumps(row), flush=True)
    scores = [score(stack, rows) for stack in dict.fromkeys(row["stack"] for row in rows)]
    for each in scores:
        print(each["line"])
    for name in ("preset", "calibrated"):
        errors = [each[name] for each in scores if each[name] is not None]
        if errors:
            print(f"macro mean error, {name}: {statistics.mean(errors):.1%}")


def predicted(row: Row) -> float:
    """Return the predicted seconds of a step."""
    model = row["model"]
    with torch.device("meta"):
        network = Transformer(model)
    ids = torch.zeros(1, model["tokens"], dtype=torch.long)
    return predict(network, plan_of(row), row["cluster"], example_batch=ids).step_seconds


def plan_of(row: Row) -> ParallelPlan:
    """Return the plan of a row."""
    dp = row["gpus"] // (row["tp"] * row["pp"])
    parts = row["global_batch"] // (dp * row["micro_batch"])
    staged, virtual = row["pp"] > 1, row.get("virtual_stages", 1)
    return ParallelPlan(
        tensor_parallel=TensorParallel(size=row["tp"], sequence=row.get("sequence", False)),
        pipeline_parallel=PipelineParallel(
            size=row["pp"],
            schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
            virtual_stages=virtual,
            microbatches=parts if staged else 1,
        ),
        data_parallel=DataParallel(
            size=dp, zero_stage=row.get("zero_stage", 0), reduction="library"
        ),
        batch=Batch(global_size=row["global_batch"], gradient_accumulation=1 if staged else parts),
        precision=Precision(param="bfloat16"),
        recompute=row.get("recompute", "none"),
    )


def measured_seconds(row: Row) -> float:
    """Return the measured seconds of a step, by the paper's count of flops where it has those."""
    measured, model = row["measured"], row["model"]
    if "step_seconds" in measured:
        return measured["step_seconds"]
    layers, hidden, vocab = model["layers"], model["hidden"], model["vocab"]
    length, rows = model["tokens"], row["global_batch"]
    if "tflops_with_recompute" in measured:
        # Narayanan et al. 2021, equation 3.
        beside = 1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
        flops = 96 * rows * length * layers * hidden**2 * beside
        return flops / (row["gpus"] * measured["tflops_with_recompute"] * 1e12)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in Transformer(model).parameters())
    return 6 * numel * rows * length / (row["gpus"] * measured["tflops"] * 1e12)


def score(stack: str, rows: Sequence[Row]) -> Row:
    """Return the errors of a stack; the first row fixes the factor and is not scored then."""
    own = [row for row in rows if row["stack"] == stack]
    pairs = [(row["measured_seconds"], row["predicted_seconds"]) for row in own]
    raw = [abs(guess / truth - 1) for truth, guess in pairs]
    factor = pairs[0][0] / pairs[0][1]
    rest = [abs(factor * guess / truth - 1) for truth, guess in pairs[1:]]
    rates = [
        [row["tokens"] / row[f"{kind}_seconds"] for row in own]
        for kind in ("measured", "predicted")
    ]
    spread = max(rates[0]) / min(rates[0])
    order = rank_correlation(*rates) if len(own) > 2 and spread > 1.05 else None
    calibrated = statistics.mean(rest) if rest else None
    line = f"{stack:26} {len(own):3} rows, error {statistics.mean(raw):6.1%}"
    line += "" if calibrated is None else f", calibrated {calibrated:6.1%}"
    line += "" if order is None else f", rank correlation {order:.2f}"
    return {"line": line, "preset": statistics.mean(raw), "calibrated": calibrated}


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's coefficient."""
    places = [[sorted(values).index(value) for value in values] for values in (left, right)]
    return statistics.correlation(*map(list[float], places))


if __name__ == "__main__":
    main()
