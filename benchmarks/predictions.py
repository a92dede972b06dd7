"""Predicted against measured: every plan of a space, on ranks of this machine.

    python benchmarks/predictions.py [--models llama gpt2 vit] [--ranks 1 2 4] [--steps 5]

For every number of ranks ``Cluster.calibrate`` measures the machine, all ranks at once. Then every
plan of the space (``space``) is priced by ``predict`` and trained with AdamW by gloo ranks of one
thread each, in processes of its own. Prints JSON; ``plans`` has of each

- ``seconds``: predicted and measured time of a step, the median over steps of the slowest rank,
- ``mb``: predicted and measured memory of the fullest rank's tensors, as torch's statistics count
  it on GPUs. Measured by what is resident in a second step, in processes whose allocator gives
  back at once what is freed, less what is resident between steps and is no tensor: 7 to 10 MB of
  each rank here. Gradients of the last step are cleared behind forward, but before it where
  micro-batches have theirs in it,

and ``models`` has of each model the rank correlation of the times, the mean and the largest error
of time and memory, and ``chosen``: the measured time of the plan with the least predicted time, as
a multiple of that of the fastest, numbers of ranks taken together.

Processes are forked from this one, which has imported what they need: whoever runs 40 plans does
not wait 40 times for imports.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from side_by_side.contenders import resident
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GPT2Config,
    LlamaConfig,
    ViTConfig,
)

import vescale
from vescale_parallel import ParallelPlan, with_constraints
from vescale_planner import Cluster, generate_plan, predict
from vescale_testing.memory import peak_nbytes

ROWS, LENGTH, VOCABULARY = 8, 128, 4096
Constraints = dict[str, Any]
FORK = multiprocessing.get_context("fork")


def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=4,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_embd=384, n_layer=4, n_head=8, vocab_size=VOCABULARY, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def vit() -> nn.Module:
    config = ViTConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
        image_size=128, patch_size=16,
    )  # fmt: skip
    config.num_labels = 100
    return AutoModelForImageClassification.from_config(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "vit": vit}


def rows_of(model: str, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if model == "vit":
        pixels = torch.randn(rows, 3, 128, 128, generator=generator)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(0, 100, (rows,), generator=generator),
        }
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


DP, ZERO, TP = "data_parallel.size", "data_parallel.zero_stage", "tensor_parallel.size"
PP, PARTS = "pipeline_parallel.size", "pipeline_parallel.microbatches"
ACCUMULATION = "batch.gradient_accumulation"

SHORT = {
    DP: "dp", ZERO: "zero", TP: "tp", PP: "pp", PARTS: "micro-batches",
    ACCUMULATION: "accumulation",
}  # fmt: skip


def space(num_ranks: int) -> Iterator[Constraints]:
    """Yield what the plans of some ranks differ in: a global batch of 8 rows for each."""
    for tp in _divisors(num_ranks):
        for pp in _divisors(num_ranks // tp):
            sizes = {TP: tp, PP: pp, DP: num_ranks // tp // pp}
            for zero in (0, 1, 2, 3) if sizes[DP] > 1 else (0,):
                for recompute in ("none", "full"):
                    kind = {**sizes, ZERO: zero, "recompute": recompute}
                    yield from _in_parts(kind)


def _in_parts(kind: Constraints) -> Iterator[Constraints]:
    if kind[PP] > 1:
        for parts in (kind[PP], 2 * kind[PP]):
            if kind[DP] * parts <= ROWS:
                yield {**kind, PARTS: parts}
    else:
        yield kind
        if kind["recompute"] == "none":
            yield {**kind, ACCUMULATION: 2}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass
class Priced:
    """A plan as JSON, its name, and what is predicted of it."""

    name: str
    plan: str
    seconds: float
    mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=MODELS)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", help="part of the names of plans")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for model in options.models:
        MODELS[model]()  # transformers imports a model's file when it is first built
    found: dict[str, dict[str, Any]] = {model: {} for model in options.models}
    for num_ranks in options.ranks:
        cluster = on_ranks(num_ranks, calibrated)[0]
        for model in options.models:
            for priced in on_ranks(1, prices, model, num_ranks, cluster)[0]:
                if options.only and options.only not in priced.name:
                    continue
                seconds = on_ranks(num_ranks, step_seconds, model, priced.plan, options.steps)
                mb = on_ranks(num_ranks, step_mb, model, priced.plan)
                found[model][f"{num_ranks} ranks, {priced.name}"] = record = {
                    "seconds": [round(priced.seconds, 4), round(max(seconds), 4)],
                    "mb": [round(priced.mb, 1), round(max(mb), 1)],
                }
                said = f"{model}, {num_ranks} ranks, {priced.name}"
                print(said, json.dumps(record), file=sys.stderr, flush=True)
    scores = {model: scored(plans) for model, plans in found.items()}
    print(json.dumps({"torch": torch.__version__, "models": scores, "plans": found}, indent=2))


def on_ranks(num_ranks: int, run: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what a function returns on each of some ranks, in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [FORK.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            FORK.Process(target=_rank, args=(rank, num_ranks, folder, ends[rank][1], run, args))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        found = [end.recv() if end.poll(300) else "nothing within 300 s" for end, _ in ends]
        for rank in ranks:
            rank.join(10)
            rank.kill()
    for each in found:
        if isinstance(each, str):
            sys.exit(each)
    return [each[0] for each in found]


def _rank(
    rank: int, num_ranks: int, folder: str, end: Any, run: Callable[..., Any], args: Any
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=120),
        )
        end.send([run(*args)])
    except BaseException:  # whatever it is, the parent tells it
        end.send(traceback.format_exc())
    end.close()
    os._exit(0)  # what imports started belongs to the parent


def calibrated() -> Cluster:
    return Cluster.calibrate()


def prices(model: str, num_ranks: int, cluster: Cluster) -> list[Priced]:
    """Return the plans of the space, priced; that they are legal is seen as they are trained."""
    built = MODELS[model]()
    found: list[Priced] = []
    for kind in space(num_ranks):
        plan = with_constraints(_sharded(model, kind[TP]), {**kind, "batch.global_size": ROWS})
        rows = rows_of(model, ROWS // kind[DP])
        price = predict(built, plan, cluster, example_batch=rows)
        name = ", ".join(f"{SHORT.get(key, key)} {value}" for key, value in kind.items())
        nbytes = price.memory_bytes - cluster.reserved_bytes
        found.append(Priced(name, plan.to_json(), price.step_seconds, nbytes / 1e6))
    return found


@functools.cache
def _sharded(model: str, size: int) -> ParallelPlan:
    """Return a plan of so many tensor-parallel ranks, with the layers that the planner shards."""
    if size == 1:
        return ParallelPlan()
    constraints = {TP: size, DP: 1, PP: 1, "tensor_parallel.sequence": False}
    return generate_plan(
        MODELS[model](), constraints, world_size=size, cluster="cpu",
        example_batch=rows_of(model, ROWS),
    )  # fmt: skip


def step_seconds(model: str, plan: str, steps: int) -> float:
    """Return the median seconds of a step, behind one that warms up."""
    step = trained(model, plan)
    taken: list[float] = []
    for _ in range(steps + 1):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def step_mb(model: str, plan: str) -> float:
    """Return the most that tensors take in the second step.

    That is how much more is resident than before the step, and the tensors that there were then.
    """
    _give_back()
    step = trained(model, plan)
    step()
    alive = tensors_mb()
    _give_back()
    before = resident("RssAnon")
    peak_nbytes(reset=True)
    step()
    return resident("VmHWM") - resident("RssFile") - before + alive


def tensors_mb() -> float:
    """Return what the tensors of this process take, what several are in once."""
    gc.collect()
    storages = {x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)}
    found = sorted((each.data_ptr(), each.nbytes()) for each in storages if each.data_ptr())
    total = end = 0
    for first, nbytes in found:
        total += max(first + nbytes - max(first, end), 0)
        end = max(end, first + nbytes)
    return total / 1e6


def trained(model: str, plan: str) -> Callable[[], None]:
    """Return what trains this rank's rows for a step."""
    parsed = ParallelPlan.from_json(plan)
    built, optimizer = vescale.parallelize(
        parsed, MODELS[model](), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4)
    )
    rows = ROWS // parsed.data_parallel.size
    first = rows * vescale.data_parallel_rank(built)
    batch = {name: whole[first : first + rows] for name, whole in rows_of(model, ROWS).items()}
    in_parts = parsed.batch.gradient_accumulation > 1 or parsed.pipeline_parallel.size > 1

    def step() -> None:
        if in_parts:
            optimizer.zero_grad()
        outputs = built(**batch)
        if not in_parts:
            optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()

    return step


def _give_back() -> None:
    """Have glibc map what is over 64 KiB on its own, and unmap it when it is freed."""
    glibc = ctypes.CDLL(None)
    glibc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    glibc.malloc_trim(0)


def scored(plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    predicted, measured = np.array([each["seconds"] for each in plans.values()]).T
    errors = {
        of: [abs(a - b) / b for a, b in (each[of] for each in plans.values())]
        for of in ("seconds", "mb")
    }
    best = [name for name, each in plans.items() if each["seconds"][1] == measured.min()]
    return {
        "plans": len(plans),
        "rank_correlation": round(_spearman(predicted, measured), 3),
        "chosen": round(float(measured[predicted.argmin()] / measured.min()), 3),
        "chosen_plan": [*plans][predicted.argmin()],
        "fastest_plan": best[0],
        "mean_error": {of: round(mean(each), 3) for of, each in errors.items()},
        "largest_error": {of: round(max(each), 3) for of, each in errors.items()},
    }


def _spearman(one: Any, other: Any) -> float:
    first, second = (np.argsort(np.argsort(each)) for each in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


if __name__ == "__main__":
    main()
