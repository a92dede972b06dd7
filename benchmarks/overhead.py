"""What tensor parallelism costs one rank besides its own arithmetic and the network.

    python benchmarks/overhead.py [--ranks 8] [--hidden 1024] [--tokens 512] [--repeats 9]

Rank 0 of ``--ranks`` ranks runs alone: its process group is torch's fake one, whose collectives
return at once, with whatever is in memory. It is compared with a plain Llama of just that rank's
sizes (its heads, features and rows of the vocabulary), and with torch's ``parallelize_module``
under the same group. Forward and backward, on the accelerator if there is one, else by CPU time;
the three alternate. Prints JSON: medians over repeats of milliseconds a step, and what they are of
the plain one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701 (no public name)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import vescale
from vescale_parallel import ParallelPlan, with_constraints

_STYLES: dict[str, Any] = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    steps = build(options, device)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.repeats + 2):
        for name, step in steps.items():
            spent = timed(step, device)
            if repeat >= 2:
                seconds[name].append(spent)
    plain = seconds["plain"]
    found = {
        name: {
            "ms": round(statistics.median(times) * 1e3, 2),
            "of_plain": round(
                statistics.median(a / b for a, b in zip(times, plain, strict=True)), 3
            ),
        }
        for name, times in seconds.items()
    }
    print(json.dumps({"device": device, "torch": torch.__version__, **vars(options), **found}))


def build(options: argparse.Namespace, device: str) -> dict[str, Callable[[], object]]:
    """Return one forward and backward of each contender."""
    vocabulary = 32 * options.ranks
    ids_BS = torch.zeros(1, options.tokens, dtype=torch.long, device=device)

    def model(parts: int) -> PreTrainedModel:
        config = LlamaConfig(
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden // parts,
            num_hidden_layers=options.layers,
            num_attention_heads=2 * options.ranks // parts,
            num_key_value_heads=2 * options.ranks // parts,
            head_dim=options.hidden // (2 * options.ranks),
            vocab_size=vocabulary // parts,
            use_cache=False,
        )
        made: Any = LlamaForCausalLM(config)
        return made.to(device)

    plan = with_constraints(ParallelPlan(), {"tensor_parallel.size": options.ranks})
    mesh = init_device_mesh(device, (options.ranks,))
    contenders = {
        "plain": model(options.ranks),
        "vescale": vescale.parallelize(plan, model(1)),
        "torch parallelize_module": parallelize_module(model(1), mesh, _STYLES),
    }

    def stepper(name: str) -> Callable[[], object]:
        def step() -> None:
            contenders[name](input_ids=ids_BS, labels=ids_BS).loss.backward()

        def stock() -> None:
            with loss_parallel():
                step()

        return stock if name.startswith("torch") else step

    return {name: stepper(name) for name in contenders}


def timed(step: Callable[[], object], device: str) -> float:
    """Return the seconds of a few steps, each."""
    count = 3
    start = time.perf_counter() if device == "cuda" else time.process_time()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count
    return (time.process_time() - start) / count


if __name__ == "__main__":
    main()
