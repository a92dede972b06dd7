"""CPU time, memory and messages of a pipeline, beside torch's own with hand-written stages.

    python benchmarks/pp.py [--ranks 2] [--steps 4] [--repeats 3] [--small] [--only "1F1B" ...]

Trains a Llama of 25 million parameters with AdamW on 4 micro-batches of 2 x 64 tokens, on two
stages; with ``--ranks 4`` on two copies of them (DDP around torch's stages). Every contender runs
in processes of its own: gloo, one thread a rank. Contenders alternate; figures are medians over
repeats, of the mean over ranks. CPU time is user and system time of a step; memory is the peak of
resident memory, and how far that is above what imports took.

``messages`` and ``sent_mb`` are of one step that is not timed: sends of tensors from stage to
stage at the level of torch.distributed. ``collectives`` and ``collective_kb`` are all others, with
the bytes a rank puts in. Prints JSON; ``ratio`` is to torch's pipeline under the same schedule.
``loss`` tells that all train alike. ``--small`` is a Llama of 3 million, for a quick look: nearly
all of its time is the host's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side.contenders import (
    Batch,
    Figures,
    adamw,
    alternated,
    begun,
    chosen,
    end,
    fresh,
    random_ids,
    timed,
    told,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)
from torch.utils._pytree import tree_leaves  # noqa: PLC2701 (no public name)

import vescale

Step = Callable[[Tensor], float | None]

STAGES, MICROBATCHES, ROWS, LENGTH = 2, 4, 2, 64
PEERS = {"vescale GPipe": ("torch GPipe",), "vescale 1F1B": ("torch 1F1B",)}
SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="*", help="parts of the contenders' names")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        run(options.contender, options.steps, options.small)
        return
    names = ["one device", *(name for ours, peers in PEERS.items() for name in (ours, *peers))]
    arguments = [f"--steps={options.steps}", *(["--small"] if options.small else [])]
    medians = alternated(
        __file__, chosen(names, options.only), options.ranks, options.repeats, arguments
    )
    heading = {"ranks": options.ranks, "torch": torch.__version__, "small": options.small}
    print(json.dumps(heading | told(medians, PEERS), indent=2))


def run(name: str, steps: int, is_small: bool) -> None:
    """Train as one rank of a contender; rank 0 prints its figures as JSON."""
    imported = begun()
    copies = dist.get_world_size() // STAGES
    whose, _, schedule = name.partition(" ")
    makers = {"vescale": ours, "torch": torchs, "one": one_device}
    train = makers[whose](fresh(is_small=is_small), schedule, copies)
    generator = torch.Generator().manual_seed(1)
    share = 0 if whose == "one" else dist.get_rank() % copies

    def step() -> float | None:
        rows = MICROBATCHES * ROWS
        ids_BS = random_ids(generator, rows * copies, LENGTH)
        return train(ids_BS if whose == "one" else ids_BS.chunk(copies)[share])

    figures = timed(step, steps, imported)
    with Messages() as counted:
        step()
    end(figures | counted.figures())


class Messages(TorchDispatchMode):
    """Counts what a rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = self.collectives = self.sent = self.put_in = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            nbytes = sum(t.nbytes for t in tree_leaves(args[0]) if isinstance(t, Tensor))
            if name == "c10d::send":
                self.messages, self.sent = self.messages + 1, self.sent + nbytes
            elif "recv" not in name:
                self.collectives, self.put_in = self.collectives + 1, self.put_in + nbytes
        return func(*args, **(kwargs or {}))

    def figures(self) -> Figures:
        return {
            "messages": self.messages,
            "sent_mb": self.sent / 1e6,
            "collectives": self.collectives,
            "collective_kb": self.put_in / 1e3,
        }


def one_device(model: nn.Module, schedule: str, copies: int) -> Step:
    """All of the model on every rank, micro-batches one after the other."""
    optimizer = adamw(model)

    def step(ids_BS: Tensor) -> float:
        parts = ids_BS.chunk(MICROBATCHES * copies)
        total = 0.0
        for part in parts:
            loss = model({"input_ids": part, "labels": part}) / len(parts)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def ours(model: nn.Module, schedule: str, copies: int) -> Step:
    plan = vescale.generate_plan(
        model,
        {
            "pipeline_parallel.size": STAGES,
            "pipeline_parallel.microbatches": MICROBATCHES,
            "pipeline_parallel.schedule": schedule.lower(),
            "data_parallel.size": copies,
        },
    )
    parallel, optimizer = vescale.parallelize(plan, model, adamw)

    def step(ids_BS: Tensor) -> float:
        batch: Batch = {"input_ids": ids_BS, "labels": ids_BS}
        loss = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class Stage(nn.Module):
    """The blocks of one of two stages, with the embedding or the head."""

    def __init__(self, llama: Any, index: int) -> None:
        super().__init__()
        half = len(llama.model.layers) // STAGES
        self.layers = llama.model.layers[index * half : (index + 1) * half]
        self.rotary = llama.model.rotary_emb
        self.embed = llama.model.embed_tokens if index == 0 else None
        self.norm = llama.model.norm if index == STAGES - 1 else None
        self.head = llama.lm_head if index == STAGES - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions_1S = torch.arange(x.shape[1], device=x.device)[None]
        cos_sin = self.rotary(x, positions_1S)
        for layer in self.layers:
            x = layer(x, position_embeddings=cos_sin, position_ids=positions_1S)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def torchs(model: Any, schedule: str, copies: int) -> Step:
    mesh = init_device_mesh("cpu", (STAGES, copies), mesh_dim_names=("pp", "dp"))
    index, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    own: nn.Module = Stage(model.model, index)
    del model
    if copies > 1:
        own = DistributedDataParallel(own, process_group=mesh.get_group("dp"))
    stage = PipelineStage(own, index, STAGES, torch.device("cpu"), group=group)
    runs = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=next_token_loss)
    optimizer = adamw(own)

    def step(ids_BS: Tensor) -> float | None:
        losses: list[Tensor] = []
        if index == 0:
            runs.step(ids_BS)
        else:
            runs.step(target=ids_BS, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    return step


def next_token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The loss of transformers' models."""
    shifted_BS = F.pad(labels_BS, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), shifted_BS.flatten())


if __name__ == "__main__":
    main()
