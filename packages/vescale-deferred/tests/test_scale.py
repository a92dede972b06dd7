"""Models that do not fit: peak memory, in a process of its own."""

import json
import subprocess
import sys
import textwrap

import pytest

_MIB = 2**20
_PRELUDE = """
import json, resource
import torch
from torch import nn
from vescale_deferred import deferred_init, materialize
from vescale_dtensor import Box

torch.set_num_threads(1)
torch.manual_seed(0)

def peak_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def measure(run):
    before = peak_nbytes()
    result = run()
    return result, {"nbytes": peak_nbytes() - before}
"""


def _run(code: str) -> dict[str, float]:
    source = _PRELUDE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _record_llama(**config: int) -> dict[str, float]:
    return _run(f"""
        import transformers
        transformers.logging.set_verbosity_error()
        config = transformers.LlamaConfig(**{config!r})
        factory = transformers.AutoModelForCausalLM.from_config
        transformers.LlamaForCausalLM  # imports it
        model, figures = measure(lambda: deferred_init(factory, config))
        figures["numel"] = sum(p.numel() for p in model.parameters())
        print(json.dumps(figures))
    """)


@pytest.mark.slow
def test_a_llama_of_70b_parameters_is_recorded_in_little_memory():
    figures = _record_llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    assert figures["numel"] > 70e9
    assert figures["nbytes"] < 1024 * _MIB


@pytest.mark.nightly
def test_a_llama_of_405b_parameters_is_recorded_in_little_memory():
    figures = _record_llama(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    assert figures["numel"] > 405e9
    assert figures["nbytes"] < 1024 * _MIB


_SHARDS = """
    def net(hidden, num_layers, dtype):
        layers = [nn.Linear(hidden, hidden, dtype=dtype) for _ in range(num_layers)]
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            layer.weight.data.mul_(0.5)
        return nn.Sequential(*layers)

    def make(fqn, tensor, read):
        dim = {dim} if tensor.dim() > 1 else 0
        shape, offset = list(tensor.shape), [0] * tensor.dim()
        shape[dim] //= 64
        offset[dim] = shape[dim] * 63
        return read(Box(tuple(offset), tuple(shape)))

    model = deferred_init(net, {hidden}, {num_layers}, {dtype})
    _, figures = measure(lambda: materialize(model, make=make))
    figures["shard_nbytes"] = sum(p.nbytes for p in model.parameters())
    print(json.dumps(figures))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_one_64th_take_little_more_memory_than_they_are_large(dim: int):
    figures = _run(
        _SHARDS.format(dim=dim, hidden=8192, num_layers=3 - 2 * dim, dtype="torch.float32")
    )
    assert figures["nbytes"] < figures["shard_nbytes"] + 256 * _MIB


@pytest.mark.nightly
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_large_tensors_take_little_more_memory_than_they_are_large(dim: int):
    figures = _run(
        _SHARDS.format(dim=dim, hidden=32768, num_layers=8 - 6 * dim, dtype="torch.bfloat16")
    )
    assert figures["nbytes"] < figures["shard_nbytes"] + 256 * _MIB
