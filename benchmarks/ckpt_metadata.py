"""What it costs a rank to plan a save and a load of very many tensors on very many ranks.

Run ``python benchmarks/ckpt_metadata.py --tensors 100000 --ranks 1000``. It prints one JSON
object: processor seconds of each step at one rank, the best of several repetitions, and the bytes
that the rank tells the others. The other ranks are imagined: they say what this one says. No
tensor is written. A busy machine makes processor time longer, too, so it also prints how long the
json module takes to read, write and read the manifest; compare with that.
"""

# ruff: noqa: PLC2701 (the steps have no public names, and torch has no public fake process group)

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._format.blocks import BlockIndex
from vescale_ckpt._format.file_layout import FilePlan, plan_files
from vescale_ckpt._format.manifest import Manifest, StoredFile, dump_manifest, parse_manifest
from vescale_ckpt._load.match import match
from vescale_ckpt._load.read_assignment import assign_reads
from vescale_ckpt._load.read_items import read_items_of
from vescale_ckpt._save.consistency import fingerprint, plan_save, ties_of
from vescale_ckpt._save.save import divide, snapshot
from vescale_ckpt._save.shared_files import WriteAssignment, keys_by_file, write_items_of

T = TypeVar("T")

_BLOCK_NBYTES = 1 << 20
_COLUMNS = 16


@dataclass(frozen=True)
class ImaginedRanks(ControlGroup):
    """Ranks that all say the same."""

    said_nbytes: list[int] = field(default_factory=list[int])

    def all_gather(self, message: Any) -> list[Any]:
        text = json.dumps(message)
        self.said_nbytes.append(len(text))
        return [json.loads(text)] * self.size

    def reduce(
        self, words: npt.NDArray[np.signedinteger[Any]], operation: dist.ReduceOp.RedOpType
    ) -> None:
        self.said_nbytes.append(words.nbytes)


def state_of(num_tensors: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Return a model and Adam's moments, each tensor sharded over all ranks."""
    rows = mesh.size()
    local = torch.zeros(num_tensors, _COLUMNS)
    names = [f"layers.{i // 12}.attention.w{i % 12}.weight" for i in range(num_tensors // 3)]
    shards = iter(local.split(1))

    def group() -> dict[str, DTensor]:
        return {
            name: DTensor.from_local(
                next(shards),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((rows, _COLUMNS)),
                stride=(_COLUMNS, 1),
            )
            for name in names
        }

    return {"model": group(), "optimizer": {"exp_avg": group(), "exp_avg_sq": group()}}


class Clock:
    """Processor seconds by step, the best of all repetitions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, step: str, action: Callable[[], T]) -> T:
        start = time.process_time()
        result = action()
        spent = time.process_time() - start
        self.seconds[step] = min(spent, self.seconds.get(step, spent))
        return result


def locate(plan: FilePlan, assignment: WriteAssignment, ranks: ControlGroup) -> None:
    """Find out where each tensor's bytes go, as writing does."""
    for keys in keys_by_file(plan, assignment).values():
        for key in keys:
            for _ in write_items_of(key, plan, assignment, ranks):
                pass


@torch.no_grad()
def measure(state: dict[str, Any], ranks: ImaginedRanks, clock: Clock) -> None:
    """Do what a save and a load do on one rank, but for the tensors' bytes."""
    taken = clock.run("save: walk the state", lambda: snapshot(state, ranks))
    ties = clock.run("save: find ties", lambda: ties_of(taken.shards))
    prints = clock.run(
        "save: digest", lambda: fingerprint(taken.encoded, taken.shards, ties, ranks)
    )
    by_rank = [prints] * ranks.size
    save_plan = clock.run(
        "save: agree", lambda: plan_save(taken.encoded, taken.shards, ties, by_rank, ranks)
    )
    plan = clock.run("save: lay out", lambda: plan_files(save_plan.table))
    assignment = clock.run("save: divide", lambda: divide(save_plan, taken.shards, plan))
    clock.run("writing: locate", lambda: locate(plan, assignment, ranks))
    files = {
        name: StoredFile(nbytes=file.nbytes, checksums=(7,) * -(-file.nbytes // _BLOCK_NBYTES))
        for name, file in plan.files.items()
    }
    manifest = Manifest(
        block_nbytes=_BLOCK_NBYTES,
        files=files,
        tensors=plan.tensors,
        aliases=save_plan.aliases,
        tree=save_plan.tree,
    )
    text = clock.run("save: write the manifest (rank 0)", lambda: dump_manifest(manifest))
    read = clock.run("load: read the manifest", lambda: parse_manifest(text, "manifest"))
    matched = clock.run("load: match", lambda: match(state, read, ranks.rank, strict=True))
    items = clock.run("load: locate", lambda: read_items_of(read, matched.targets))
    block_index = BlockIndex(read)
    clock.run(
        "load: choose readers", lambda: assign_reads(block_index, items, ranks, in_parts=True)
    )
    clock.run("json module alone", lambda: json.loads(json.dumps(json.loads(text))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=arguments.ranks)
    state = state_of(arguments.tensors, init_device_mesh("cpu", (arguments.ranks,)))
    clock = Clock()
    said: list[int] = []
    gc.collect()
    gc.freeze()
    for _ in range(arguments.repetitions):
        ranks = ImaginedRanks(3, arguments.ranks, None)
        measure(state, ranks, clock)
        said = ranks.said_nbytes
    totals = {
        kind: sum(spent for step, spent in clock.seconds.items() if step.startswith(kind))
        for kind in ("save", "load")
    }
    result = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "tensors": arguments.tensors,
        "ranks": arguments.ranks,
        "cpu_seconds": {step: round(spent, 3) for step, spent in clock.seconds.items()},
        "cpu_seconds_in_all": {kind: round(spent, 3) for kind, spent in totals.items()},
        "said_nbytes": said,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
