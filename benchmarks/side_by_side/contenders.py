"""Contenders in processes of their own, that alternate, and one Llama that all of them train."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)
from transformers import AutoModelForCausalLM, LlamaConfig

Batch = dict[str, Tensor]
Trained = tuple[nn.Module, torch.optim.Optimizer]
Figures = dict[str, float]
VOCABULARY = 4096


class Net(nn.Module):
    """A Llama of 25 million parameters that returns its loss."""

    def __init__(self, *, is_small: bool = False) -> None:
        super().__init__()
        hidden = 128 if is_small else 512
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=6,
            num_attention_heads=8,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def forward(self, batch: Batch) -> Tensor:
        return self.model(**batch).loss


def fresh(*, is_small: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Net(is_small=is_small)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def with_optimizer(model: nn.Module) -> Trained:
    return model, adamw(model)


def random_ids(generator: torch.Generator, rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def chosen(names: Sequence[str], only: Sequence[str] | None) -> list[str]:
    """Return the names with one of some parts in them; all without any.

    What is a name chooses nothing else: ``torch FSDP2`` is in ``torch FSDP2, gathered once``.
    """
    if not only:
        return list(names)
    parts = [part for part in only if part not in names]
    return [name for name in names if name in only or any(part in name for part in parts)]


def alternated(
    script: str, names: Sequence[str], ranks: int, repeats: int, arguments: Sequence[str]
) -> dict[str, Figures]:
    """Run every contender ``repeats`` times, in turn; return the medians of its figures.

    Says on stderr what has run, how long it took, starting included, and its figures.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names:
            began = time.monotonic()
            runs[name].append(_started(script, name, ranks, arguments))
            seconds = time.monotonic() - began
            said = f"{name}, {repeat + 1} of {repeats}: {seconds:.0f} s"
            print(said, json.dumps(runs[name][-1]), file=sys.stderr, flush=True)
    return {
        name: {key: round(statistics.median(run[key] for run in each), 4) for key in each[0]}
        for name, each in runs.items()
    }


def _started(script: str, name: str, ranks: int, arguments: Sequence[str]) -> Figures:
    """Run a contender in processes of its own; return its figures."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", script, f"--contender={name}", *arguments),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def told(
    medians: Mapping[str, Figures], peers: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Return the medians of every contender, and ours next to the best peer's."""
    ratios: dict[str, Figures] = {}
    for name, others in peers.items():
        beside = [medians[peer] for peer in others if peer in medians]
        if name in medians and beside:
            ratios[name] = {
                key: round(medians[name][key] / min(peer[key] for peer in beside), 3)
                for key in medians[name]
                if key != "loss" and all(peer[key] for peer in beside)
            }
    return {"contenders": dict(medians), "ratio": ratios}


def begun() -> float:
    """Begin as one rank of a contender; return the resident MB that imports took."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    return resident()


def timed(step: Callable[[], float | None], steps: int, imported: float) -> Figures:
    """Return this rank's figures of ``steps`` steps behind one that warms up.

    A step returns its loss, None on a rank that has none.
    """
    loss, cpu = step(), time.process_time()
    for _ in range(steps):
        loss = step()
    spent = (time.process_time() - cpu) / steps * 1e3
    peak = resident("VmHWM")
    return {
        "cpu_ms_per_rank_step": spent,
        "peak_mb": peak,
        "peak_mb_above_imports": peak - imported,
        "loss": float("nan") if loss is None else loss,
    }


class Dispatched(TorchDispatchMode):
    """Counts operators, and how many of them are collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.collectives += str(func).startswith("c10d")
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[], float | None]) -> Figures:
    """Return how many operators and collectives a step of this rank dispatches."""
    with Dispatched() as dispatched:
        step()
    return {"operators": dispatched.operators, "collectives": dispatched.collectives}


def end(figures: Figures) -> None:
    """Print the mean of all ranks' figures, of those ranks that have one, and end the process."""
    values = torch.tensor([*figures.values()], dtype=torch.float64)
    known = values.isnan().logical_not().double()
    values = values.nan_to_num()
    dist.all_reduce(values)
    dist.all_reduce(known)
    if dist.get_rank() == 0:
        means = (values / known).tolist()
        print(json.dumps(dict(zip(figures, means, strict=True))), flush=True)
    dist.barrier()
    os._exit(0)  # DDP sometimes does not come to an end here


def resident(key: str = "VmRSS") -> float:
    """Return the resident memory of this process in MB; ``VmHWM`` is its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1e3
