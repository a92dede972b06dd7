"""How long it takes to find a plan for a model that fits on no device, and how much memory.

    python benchmarks/plan.py [--model llama-70b] [--world-size 64]

It prints one JSON object: the plan, processor seconds of ``generate_plan`` (of this process, all
threads), the process's peak of resident memory and what it was before, how many candidates
were scored, and how many sharding plans and pipelines were run to check them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import platform
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from observe import MODELS

from vescale_planner import Cluster, generate_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-70b")
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--cluster", default="h200")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counted = _Counts()
    checks: dict[str, int] = {"propose_sharding": 0, "check_pipeline": 0}
    for file, name in (("_search.sharding", "propose_sharding"), ("_runnable", "check_pipeline")):
        module = importlib.import_module(f"vescale_planner.{file}")
        setattr(module, name, _counting(getattr(module, name), name, checks))
    logging.getLogger("vescale.planner").addHandler(counted)
    logging.getLogger("vescale.planner").setLevel(logging.DEBUG)
    with torch.device("meta"):
        model = MODELS[arguments.model]().bfloat16()
    ids_BS = torch.zeros(1, arguments.tokens, dtype=torch.long)
    batch = {"input_ids": ids_BS, "labels": ids_BS, "attention_mask": torch.ones_like(ids_BS)}
    before, start = _peak(), time.process_time()
    plan = generate_plan(
        model,
        world_size=arguments.world_size,
        cluster=Cluster.preset(arguments.cluster),
        example_batch=batch,
    )
    seconds = time.process_time() - start
    result = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(seconds, 2),
        "peak_bytes": _peak(),
        "peak_bytes_before": before,
        "candidates": counted.scored,
        "checks": checks,
        "plan": {k: v for k, v in plan.dotted().items() if "sharding_plan" not in k},
    }
    print(json.dumps(result, indent=2))


class _Counts(logging.Handler):
    """Hears how many candidates there were."""

    scored = 0

    def emit(self, record: logging.LogRecord) -> None:
        told = str(record.msg).startswith(("%d candidates fit", "%d with context parallelism"))
        if told and isinstance(record.args, tuple):
            self.scored += sum(int(str(count)) for count in record.args[:2])


def _counting(run: Callable[..., Any], name: str, counts: dict[str, int]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return run(*args, **kwargs)

    return counted


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
