"""CPU time, peak memory and bytes of ranks that share sequences, beside torch's context_parallel.

    python benchmarks/context.py [--ranks 2] [--steps 2] [--repeats 3] [--length 2048] [--only ...]

Trains a Llama of 25 million parameters on one long row. Every contender runs in processes of its
own: gloo, one thread a rank; of ``one device`` every rank does all of it. Contenders alternate;
figures are medians over repeats, of the mean over ranks. CPU time is user and system time of a
step; memory is the peak of resident memory, and how far that is above what imports took, the check
against one device included; bytes are what a rank sends in a step, operators and collectives what
one more step dispatches. Prints JSON; ``ratio`` is to the best peer (``PEERS``), and of torch's
``context_parallel`` how far its attention is off one device's, or what it raises, by the CPU's
fused kernel and by matrix products: torch 2.13 has neither for CPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side.contenders import (
    Trained,
    adamw,
    alternated,
    begun,
    chosen,
    counted,
    end,
    fresh,
    random_ids,
    timed,
    told,
    with_optimizer,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import vescale
from vescale_parallel import ContextParallel, explain

_TORCH = "torch's context_parallel"
PEERS = {
    "vescale all-to-all": ("one device",),
    "vescale ring": ("one device", "vescale all-to-all"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--small", action="store_true", help="a Llama of 2 million parameters")
    parser.add_argument("--only", nargs="*", help="parts of the contenders' names")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender == _TORCH:
        attend_by_torch()
        return
    if options.contender:
        run(options.contender, options.steps, options.length, is_small=options.small)
        return
    names = chosen([*contenders(options.ranks)], options.only)
    given = [f"--steps={options.steps}", f"--length={options.length}"]
    given += ["--small"] if options.small else []
    medians = alternated(__file__, names, options.ranks, options.repeats, given)
    heading = {
        "ranks": options.ranks,
        "length": options.length,
        "torch": torch.__version__,
        "torch's context_parallel": said_by_torch(options.ranks),
    }
    print(json.dumps(heading | told(medians, PEERS), indent=2))


def run(name: str, steps: int, length: int, *, is_small: bool) -> None:
    """Train as one rank of a contender; rank 0 prints its figures as JSON."""
    imported = begun()
    model, optimizer = contenders(dist.get_world_size())[name](fresh(is_small=is_small))
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        ids_BS = random_ids(generator, 1, length)
        loss = model({"input_ids": ids_BS, "labels": ids_BS})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    figures = timed(step, steps, imported)
    figures["sent_mb"] = sent_by(model, step) / 1e6
    end(figures | counted(step))


def contenders(ranks: int) -> dict[str, Callable[[nn.Module], Trained]]:
    """Return what is compared; each makes a model and its optimizer of a fresh model."""
    return {
        "one device": with_optimizer,
        "vescale all-to-all": lambda model: ours(model, ranks, "all_to_all"),
        "vescale ring": lambda model: ours(model, ranks, "ring"),
    }


def ours(model: nn.Module, ranks: int, method: Any) -> Trained:
    context = ContextParallel(size=ranks, method=method)
    return vescale.parallelize(vescale.ParallelPlan(context_parallel=context), model, adamw)


def sent_by(model: nn.Module, step: Callable[[], object]) -> int:
    """Return the bytes that this rank sends in a step."""
    if not hasattr(model, "_vescale_engine"):
        step()
        return 0
    with explain(model) as found:
        step()
    return sum(axis.nbytes for axis in found.axes)


def said_by_torch(ranks: int) -> str:
    """Return what torch's context parallelism makes of causal attention on CPUs."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", __file__, f"--contender={_TORCH}"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def attend_by_torch() -> None:
    """Print, as rank 0, how far torch's attention of slices is off that of the whole."""
    begun()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kernels = {"fused": SDPBackend.FLASH_ATTENTION, "matrix products": SDPBackend.MATH}
    said = "; ".join(f"{name}: {attended(mesh, each)}" for name, each in kernels.items())
    if dist.get_rank() == 0:
        print(said, flush=True)


def attended(mesh: DeviceMesh, kernel: SDPBackend) -> str:
    """Return how far causal attention of slices is off that of the whole, or what it raises."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    buffers = [q, k, v, whole]
    try:
        with (
            sdpa_kernel(kernel),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)),
        ):
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return f"off one device by {float((made - whole).abs().max()):.1g}"
    # Whatever a contender raises is its figure.
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


if __name__ == "__main__":
    main()
