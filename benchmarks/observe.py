"""What observing a large model costs: CPU seconds, and the memory of a process of its own.

    python benchmarks/observe.py [--models llama-70b deepseek-v3-671b] [--rows 1] [--length 2048]

Every model is built on the meta device and observed in a child process, one thread; its peak
resident memory is beside what the same process held before (torch and transformers). Prints
JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from vescale_parallel import observe


def llama_70b() -> nn.Module:
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama_405b() -> nn.Module:
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def mixtral_8x22b() -> nn.Module:
    config = MixtralConfig(
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=56,
        num_attention_heads=48,
        num_key_value_heads=8,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def deepseek_v3_671b() -> nn.Module:
    return DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama-70b": llama_70b,
    "llama-405b": llama_405b,
    "mixtral-8x22b": mixtral_8x22b,
    "deepseek-v3-671b": deepseek_v3_671b,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "batch": [options.rows, options.length],
    }
    # Not forked: the peak of a forked process starts at its parent's.
    context = multiprocessing.get_context("spawn")
    for name in options.models:
        with ProcessPoolExecutor(1, mp_context=context) as child:
            figures = child.submit(measure, name, options.rows, options.length)
            results[name] = figures.result()
    print(json.dumps(results, indent=2))


def measure(name: str, rows: int, length: int) -> dict[str, Any]:
    """Observe one model and return what it took."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = MODELS[name]().train()
    ids_BS = torch.zeros(rows, length, dtype=torch.long)
    before = _peak_mb()
    start = time.process_time()
    found = observe(model, {"input_ids": ids_BS, "labels": ids_BS})
    seconds = time.process_time() - start
    return {
        "cpu_seconds": round(seconds, 2),
        "peak_resident_mb": round(_peak_mb()),
        "peak_resident_mb_before": round(before),
        "num_parameters": found.numel,
        "module_calls": len(found.modules),
        "flops": found.flops,
        "saved_bytes": found.saved_bytes,
        "uncounted": found.uncounted,
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
