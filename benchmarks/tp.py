"""Tensor parallelism of one Llama, beside torch's, transformers' and a hand-written one.

    python benchmarks/tp.py [--small] [--ranks 2] [--steps 4] [--repeats 5]

Starts its own ranks: gloo, one thread each. Contenders are built once and alternate; figures
are medians over repeats, the mean of the ranks. ``plain`` is the whole model on every rank, with
the whole batch: no parallelism. The figure to compare on a machine with few cores is the CPU
time a rank spends per step; with ``--small`` nearly all of it is the host's.

Operators, collectives and the bytes that this rank sends (a ring's for reductions) are counted
at the dispatcher in a step that is not timed; what ``vescale overlap`` runs on a thread of its own
is not seen there. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)
from torch.utils._pytree import tree_leaves  # noqa: PLC2701 (no public name)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import vescale
from vescale_parallel import ParallelPlan, with_constraints

Batch = dict[str, Tensor]
Step = Callable[[Batch], float]
Clip = Callable[[], object]

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")


@dataclass(kw_only=True)
class Contender:
    """One way to train the model, and what was measured of it."""

    step: Step
    cpu_ms: list[float] = field(default_factory=list[float])
    wall_ms: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])


class Counter(TorchDispatchMode):
    """Counts operators on plain tensors, and among them collectives and what they send."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.collectives = self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(each not in (Tensor, nn.Parameter) for each in types):
            return NotImplemented  # what a subclass does on plain tensors comes here again
        name = func.name()
        if not name.startswith(("c10d::", "_c10d_functional::")):
            self.operators += 1
        elif "wait_tensor" not in name:
            self.collectives += 1
            self.nbytes += _bytes_sent(name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))


def _bytes_sent(name: str, args: tuple[Any, ...]) -> int:
    ranks = dist.get_world_size()
    # c10d's own operators, but for the reductions in place, take outputs before inputs.
    outputs_first = name.startswith(("_allgather", "allgather_", "alltoall_base", "_reduce_sc"))
    sent: Any = args[1] if outputs_first else args[0]
    nbytes = sum(t.nbytes for t in tree_leaves(sent) if isinstance(t, Tensor))
    if "gather" in name:
        return nbytes * (ranks - 1)
    passes = 2 if "reduce" in name and "scatter" not in name else 1
    return passes * nbytes * (ranks - 1) // ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=None)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--small", action="store_true", help="1 x 16 tokens, hidden 128")
    parser.add_argument("--only", nargs="*", default=None, help="names of contenders")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = ("-m", "torch.distributed.run", "--standalone")
        ranks = f"--nproc-per-node={options.ranks}"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *torchrun, ranks, *sys.argv]
        sys.exit(subprocess.run(command, env=env, check=False).returncode)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    results = measure(options)
    if dist.get_rank() == 0:
        print(json.dumps(results, indent=2))
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return each contender's figures, by name."""
    hidden = options.hidden or (128 if options.small else 512)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        vocab_size=options.vocabulary,
        use_cache=False,
    )
    rows, length = (1, 16) if options.small else (8, 64)
    generator = torch.Generator().manual_seed(1)

    def batches(count: int) -> list[Batch]:
        shape = (count, rows, length)
        ids = torch.randint(0, options.vocabulary, shape, generator=generator)
        return [{"input_ids": ids_BS, "labels": ids_BS} for ids_BS in ids]

    runs, notes = build(config, options.only)
    for repeat in range(options.repeats + 1):
        same = batches(options.steps)
        for contender in runs.values():
            run(contender, same, timed=repeat > 0)
    one = batches(1)[0]
    counted = {name: count(contender, one) for name, contender in runs.items()}
    return {
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "num_parameters": sum(p.numel() for p in fresh(config).parameters()),
        "batch": [rows, length],
        "notes": notes,
        "contenders": {
            name: report(contender, counted[name], runs["plain"], counted["plain"])
            for name, contender in runs.items()
        },
    }


def run(contender: Contender, batches: list[Batch], *, timed: bool) -> None:
    """Train on some batches; the mean CPU and wall time over ranks is one repeat."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    losses = [contender.step(batch) for batch in batches]
    spent = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall])
    dist.all_reduce(spent)
    cpu_ms, wall_ms = (spent / len(batches) / dist.get_world_size() * 1e3).tolist()
    contender.losses += losses
    if timed:
        contender.cpu_ms.append(cpu_ms)
        contender.wall_ms.append(wall_ms)


def count(contender: Contender, batch: Batch) -> Counter:
    with Counter() as counter:
        contender.step(batch)
    return counter


def report(found: Contender, counted: Counter, plain: Contender, ops: Counter) -> dict[str, Any]:
    pairs = zip(found.losses, plain.losses, strict=True)
    return {
        "cpu_ms_per_rank_step": round(statistics.median(found.cpu_ms), 2),
        "wall_ms_per_step": round(statistics.median(found.wall_ms), 2),
        "operators_per_step": counted.operators,
        "operators_over_plain": counted.operators - ops.operators,
        "collectives_per_step": counted.collectives,
        "bytes_sent_per_rank_step": counted.nbytes,
        "largest_relative_loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
    }


def build(config: LlamaConfig, only: list[str] | None) -> tuple[dict[str, Contender], list[str]]:
    """Return the contenders, and why one is missing."""
    makers: dict[str, Callable[[LlamaConfig], Step]] = {
        "plain": plain,
        "hand-written": hand_written,
        "torch parallelize_module": torch_parallelize_module,
        "transformers": transformers_plan,
        "vescale": lambda config: ours(config, {}),
        "vescale sequence": lambda config: ours(config, {"tensor_parallel.sequence": True}),
        "vescale overlap": lambda config: ours(config, {"tensor_parallel.overlap": 2}),
    }
    runs: dict[str, Contender] = {}
    notes: list[str] = []
    for name, make in makers.items():
        if only and name not in only and name != "plain":
            continue
        try:
            runs[name] = Contender(step=make(config))
        except ValueError as error:
            if "not available" not in str(error):
                raise
            notes.append(f"{name}: {error}")
    return runs, notes


def fresh(config: LlamaConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Clip) -> Step:
    def step(batch: Batch) -> float:
        loss = model(**batch).loss
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(config: LlamaConfig) -> Step:
    model = fresh(config)
    return stepper(model, adamw(model), lambda: clip_grad_norm_(model.parameters(), 1.0))


def ours(config: LlamaConfig, constraints: dict[str, Any]) -> Step:
    plan = with_constraints(
        ParallelPlan(), {"tensor_parallel.size": dist.get_world_size(), **constraints}
    )
    model, optimizer = vescale.parallelize(plan, fresh(config), adamw)
    return stepper(model, optimizer, lambda: clip_grad_norm_(model.parameters(), 1.0))


def torch_parallelize_module(config: LlamaConfig) -> Step:
    model = fresh(config)
    styles: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    styles |= {f"model.layers.*.self_attn.{name}": ColwiseParallel() for name in _COLUMNS[:3]}
    styles |= {f"model.layers.*.mlp.{name}": ColwiseParallel() for name in _COLUMNS[3:]}
    styles |= {f"model.layers.*.self_attn.{_ROWS[0]}": RowwiseParallel()}
    styles |= {f"model.layers.*.mlp.{_ROWS[1]}": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return of_mixed_parameters(parallelize_module(model, mesh, styles))


def transformers_plan(config: LlamaConfig) -> Step:
    """The plan that the model carries, applied by what transformers calls as it loads one."""
    sizes = DistributedConfig(tp_size=dist.get_world_size())
    sizes, _, meshes = LlamaForCausalLM.prepare_distribute_model(sizes)
    return of_mixed_parameters(
        LlamaForCausalLM.maybe_distribute_model(fresh(config), sizes, meshes)
    )


def of_mixed_parameters(model: nn.Module) -> Step:
    """Train parameters of which some are DTensors; torch's foreach loops take no mixed lists."""
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": cut}, {"params": whole}], lr=1e-3)

    def clip() -> None:
        norm: Any = get_total_norm([p.grad for p in cut if p.grad is not None])
        rest = get_total_norm([p.grad for p in whole if p.grad is not None])
        total = torch.linalg.vector_norm(torch.stack([norm.full_tensor(), rest]))
        mesh = norm.device_mesh
        clip_grads_with_norm_(cut, 1.0, DTensor.from_local(total, mesh, run_check=False))
        clip_grads_with_norm_(whole, 1.0, total)

    return stepper(model, optimizer, clip)


def hand_written(config: LlamaConfig) -> Step:
    """Plain local weights, and as few collectives as the same split needs.

    Two all-reduces a layer in forward and two in backward: the modules that share an input
    share the sum of its gradient. One gather of the logits, one sum of the head's gradient.
    """
    model: Any = fresh(config)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in part.named_children():
                if name in _COLUMNS + _ROWS:
                    _keep_own(linear, 0 if name in _COLUMNS else 1)
            part.register_forward_pre_hook(_copy_in, with_kwargs=True)
        for row in (layer.self_attn.o_proj, layer.mlp.down_proj):
            row.register_forward_hook(lambda _, args, output: _SumOut.apply(output))
    _keep_own(model.lm_head, 0)
    model.lm_head.register_forward_pre_hook(_copy_in, with_kwargs=True)
    model.lm_head.register_forward_hook(lambda _, args, output: _GatherOut.apply(output))
    split = ("_proj.weight", "lm_head.weight")
    cut = [p for name, p in model.named_parameters() if name.endswith(split)]
    whole = [p for name, p in model.named_parameters() if not name.endswith(split)]

    def clip() -> None:
        squares = get_total_norm([p.grad for p in cut if p.grad is not None]) ** 2
        dist.all_reduce(squares)
        rest = get_total_norm([p.grad for p in whole if p.grad is not None]) ** 2
        clip_grads_with_norm_(model.parameters(), 1.0, (squares + rest).sqrt())

    return stepper(model, adamw(model), clip)


def _keep_own(linear: nn.Linear, dim: int) -> None:
    own = linear.weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    linear.weight = nn.Parameter(own.clone())


def _copy_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (_CopyIn.apply(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _CopyIn.apply(kwargs["hidden_states"])}


class _CopyIn(torch.autograd.Function):
    """Identity forward, sum of gradients over ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _SumOut(torch.autograd.Function):
    """Sum over ranks forward, in place; identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class _GatherOut(torch.autograd.Function):
    """Concatenate the last dim over ranks forward, take this rank's part backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.chunk(dist.get_world_size(), -1)[dist.get_rank()]


if __name__ == "__main__":
    main()
