"""What deferred construction costs, against ordinary construction in the same process.

Prints one JSON object. Times are CPU seconds of the process, the least of the repetitions, one
thread; the ordinary and the deferred run alternate, so that both see the same machine. On CUDA
they are seconds until the device is done.

    python benchmarks/deferred.py [--hidden 1024] [--layers 8] [--repetitions 5] [--device cuda]
"""

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from observe import llama_70b, llama_405b
from torch import Tensor, nn

from vescale_deferred import deferred_init, fingerprint, materialize, read, skip_init
from vescale_dtensor import Box

_NUM_SHARDS = 8


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, 8)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)


class Model(nn.Module):
    """A decoder whose weights are normal, as transformers' are, after torch's own init."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32_000, hidden)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(layers)])
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)


def _shard(dim: int, index: int) -> Callable[..., Tensor]:
    """Return a maker of shard ``index`` of 8 along ``dim``."""

    def make(fqn: str, tensor: Tensor, read: Callable[[Box | None], Tensor]) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[dim] % _NUM_SHARDS:
            return read(None)
        shape, offset = list(tensor.shape), [0] * tensor.dim()
        shape[dim] //= _NUM_SHARDS
        offset[dim] = index * shape[dim]
        return read(Box(tuple(offset), tuple(shape)))

    return make


def _far_shards(hidden: int, layers: int) -> dict[str, float]:
    """Read 1/64 of each matrix of the last blocks of a model that fits nowhere."""
    start = time.process_time()
    model = deferred_init(Model, hidden, layers)
    recorded = time.process_time()
    numel = 0
    for block in model.blocks[-4:]:
        for weight in (parameter for parameter in block.parameters() if parameter.dim() == 2):
            rows = weight.shape[0] // 64
            numel += read(weight, Box((rows * 63, 0), (rows, weight.shape[1]))).numel()
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "deferred_init_seconds": recorded - start,
        "shard_numel": numel,
        "shard_numel_per_second": numel / (time.process_time() - recorded),
    }


def _seconds(run: Callable[[], object], device: str) -> float:
    gc.collect()
    torch.manual_seed(0)
    start = _now(device)
    run()
    return _now(device) - start


def _now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure deferred construction.")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--far-hidden", type=int, default=16384)
    parser.add_argument("--far-layers", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device: str = options.device

    def model() -> Model:
        with torch.device(device):
            return Model(options.hidden, options.layers)

    def shard(dim: int) -> nn.Module:
        return materialize(deferred_init(model), make=_shard(dim, _NUM_SHARDS - 1))

    runs: dict[str, Callable[[], object]] = {
        "ordinary": model,
        "deferred_init": lambda: deferred_init(model),
        "deferred_init_and_materialize": lambda: materialize(deferred_init(model)),
        "skip_init_and_materialize": lambda: materialize(skip_init(deferred_init(model))),
        "deferred_init_and_fingerprint": lambda: fingerprint(deferred_init(model)),
        "one_of_8_shards_dim_0": lambda: shard(0),
        "one_of_8_shards_dim_1": lambda: shard(1),
    }
    seconds = {name: _seconds(run, device) for name, run in runs.items()}
    for _ in range(options.repetitions - 1):
        for name, run in runs.items():
            seconds[name] = min(seconds[name], _seconds(run, device))
    whole = seconds["deferred_init_and_materialize"]
    result: dict[str, object] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "numba": find_spec("numba") is not None,
        "num_parameters": sum(p.numel() for p in deferred_init(model).parameters()),
        "seconds": seconds,
        "whole_over_ordinary": whole / seconds["ordinary"],
        "speedup_of_one_of_8_shards_dim_0": whole / seconds["one_of_8_shards_dim_0"],
        "speedup_of_one_of_8_shards_dim_1": whole / seconds["one_of_8_shards_dim_1"],
    }
    if device == "cpu":
        result["seconds_to_record_a_llama"] = {
            "70b": _seconds(lambda: deferred_init(llama_70b), device),
            "405b": _seconds(lambda: deferred_init(llama_405b), device),
        }
        result["shards_of_one_64th"] = _far_shards(options.far_hidden, options.far_layers)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
