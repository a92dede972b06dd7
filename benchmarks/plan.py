"""How long it takes to find a plan for a model that fits on no device.

Run ``python benchmarks/plan.py --world-size 64 --layers 80``. It prints one JSON object: processor
seconds of ``generate_plan``, the least of the repetitions, for a Llama of the given depth and the
widths of the one with 70 billion parameters, and the plan.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vescale_parallel import ParallelPlan
from vescale_planner import Cluster, generate_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--cluster", default="h200")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=arguments.layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
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
