"""How long it takes to find a plan for a model that fits on no device.

Run ``python benchmarks/plan.py --world-size 64``. It prints one JSON object: the plan for a Llama
of 70 billion parameters, and processor seconds of ``generate_plan``, the least of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time

import torch
from observe import llama_70b

from vescale_parallel import ParallelPlan
from vescale_planner import Cluster, generate_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--cluster", default="h200")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = llama_70b().bfloat16()
    ids = torch.zeros(1, arguments.tokens, dtype=torch.long)
    cluster = Cluster.preset(arguments.cluster)
    seconds = math.inf
    plan = ParallelPlan()
    for _ in range(arguments.repetitions):
        start = time.process_time()
        plan = generate_plan(
            model,
            world_size=arguments.world_size,
            cluster=cluster,
            example_batch={"input_ids": ids, "labels": ids},
        )
        seconds = min(seconds, time.process_time() - start)
    result = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(seconds, 2),
        "plan": plan.dotted(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
