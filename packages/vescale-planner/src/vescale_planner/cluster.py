"""The machines a plan is for: memory, arithmetic and links of one rank, as plain numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

_GB = 10**9
_TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What one rank has, and how ranks are connected. All ranks are alike.

    Attributes:
        name: What messages call it.
        memory_bytes: Of one rank's device.
        reserved_bytes: Of those, what the driver and communicators take.
        flops_per_second: Peak of dense matrix products, by element size in bytes.
        memory_bytes_per_second: Peak of reading or writing device memory.
        ranks_per_node: Ranks that the fast links connect.
        intra_bytes_per_second: One rank sending inside its node, one direction.
        inter_bytes_per_second: One rank sending to another node, one direction.
        intra_latency_seconds: Of one message inside a node.
        inter_latency_seconds: Of one message to another node.
        launch_seconds: To start one operator.
        efficiency: Part of ``flops_per_second`` that large matrix products reach.
        overlap: Part of backward behind which data-parallel communication can hide.

    Example:
        >>> Cluster.preset("h200").ranks_per_node
        8
    """

    name: str
    memory_bytes: int
    reserved_bytes: int
    flops_per_second: Mapping[int, float]
    memory_bytes_per_second: float
    ranks_per_node: int
    intra_bytes_per_second: float
    inter_bytes_per_second: float
    intra_latency_seconds: float = 5e-6
    inter_latency_seconds: float = 15e-6
    launch_seconds: float = 5e-6
    efficiency: float = 0.5
    overlap: float = 0.8

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected Cluster.{name} above 0, got {getattr(self, name)!r}")
        speeds = ("memory_bytes_per_second", "intra_bytes_per_second", "inter_bytes_per_second")
        for name in speeds:
            if not getattr(self, name) > 0:
                raise ValueError(f"expected Cluster.{name} above 0, got {getattr(self, name)!r}")
        for name in ("efficiency", "overlap"):
            if not 0 <= getattr(self, name) <= 1 or (name == "efficiency" and not self.efficiency):
                raise ValueError(
                    f"expected Cluster.{name} between 0 and 1, got {getattr(self, name)!r}"
                )
        if not self.flops_per_second:
            raise ValueError("expected Cluster.flops_per_second for one element size, got none")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that :meth:`preset` and ``generate_plan(cluster=...)`` know."""
        return tuple(_PRESETS)

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """Return a cluster by name: ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``, ``"cpu"``.

        Raises:
            ValueError: If there is no such preset.
        """
        if name.lower() not in _PRESETS:
            raise ValueError(
                f"expected a cluster of {sorted(_PRESETS)}, got {name!r}; for other machines give "
                "a vescale.Cluster with their numbers"
            )
        return _PRESETS[name.lower()]

    @classmethod
    def of_this_machine(cls, world_size: int) -> Cluster:
        """Return what this machine has. Reads no free memory, so that equal ranks agree.

        Args:
            world_size: Ranks that share the machine where ``LOCAL_WORLD_SIZE`` is not set and
                there is no GPU.
        """
        if torch.cuda.is_available():
            return _of_gpu()
        return _of_cpu(max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))

    def flops_per_second_of(self, itemsize: int) -> float:
        """Return the peak for elements of that many bytes, or of the nearest wider ones."""
        sizes = sorted(self.flops_per_second)
        return self.flops_per_second[next((s for s in sizes if s >= itemsize), sizes[-1])]

    def bytes_per_second(self, span: int) -> float:
        """Return the speed of one rank in a group that spans that many neighbouring ranks."""
        inside = span <= self.ranks_per_node
        return self.intra_bytes_per_second if inside else self.inter_bytes_per_second

    def latency_seconds(self, span: int) -> float:
        """Return the latency in a group that spans that many neighbouring ranks."""
        inside = span <= self.ranks_per_node
        return self.intra_latency_seconds if inside else self.inter_latency_seconds


# NVIDIA's data sheets: dense tensor-core peak at 2 bytes, plain float32 (torch's default
# matmul precision is not TF32) at 4, float64 tensor cores at 8; NVLink one direction; one
# network card a GPU, 200 Gbit/s for the A100 and 400 Gbit/s for the others.
_PRESETS = {
    "a100": Cluster(
        name="a100",
        memory_bytes=80 * _GB,
        reserved_bytes=2 * _GB,
        flops_per_second={2: 312 * _TERA, 4: 19.5 * _TERA, 8: 19.5 * _TERA},
        memory_bytes_per_second=2039 * _GB,
        ranks_per_node=8,
        intra_bytes_per_second=300 * _GB,
        inter_bytes_per_second=25 * _GB,
    ),
    "h100": Cluster(
        name="h100",
        memory_bytes=80 * _GB,
        reserved_bytes=2 * _GB,
        flops_per_second={2: 989 * _TERA, 4: 67 * _TERA, 8: 67 * _TERA},
        memory_bytes_per_second=3350 * _GB,
        ranks_per_node=8,
        intra_bytes_per_second=450 * _GB,
        inter_bytes_per_second=50 * _GB,
    ),
    "h200": Cluster(
        name="h200",
        memory_bytes=141 * _GB,
        reserved_bytes=2 * _GB,
        flops_per_second={2: 989 * _TERA, 4: 67 * _TERA, 8: 67 * _TERA},
        memory_bytes_per_second=4800 * _GB,
        ranks_per_node=8,
        intra_bytes_per_second=450 * _GB,
        inter_bytes_per_second=50 * _GB,
    ),
    "b200": Cluster(
        name="b200",
        memory_bytes=180 * _GB,
        reserved_bytes=2 * _GB,
        flops_per_second={2: 2250 * _TERA, 4: 75 * _TERA, 8: 37 * _TERA},
        memory_bytes_per_second=8000 * _GB,
        ranks_per_node=8,
        intra_bytes_per_second=900 * _GB,
        inter_bytes_per_second=50 * _GB,
    ),
    # One core of a server a rank; gloo between two processes of one machine, measured at
    # 0.2 ms and 1.6 GB/s; 10 Gbit/s between machines.
    "cpu": Cluster(
        name="cpu",
        memory_bytes=4 * _GB,
        reserved_bytes=_GB // 2,
        flops_per_second={4: 50e9, 8: 25e9},
        memory_bytes_per_second=10 * _GB,
        ranks_per_node=64,
        intra_bytes_per_second=1.6 * _GB,
        inter_bytes_per_second=1.25 * _GB,
        intra_latency_seconds=2e-4,
        inter_latency_seconds=5e-4,
        overlap=0.0,
    ),
}


def as_cluster(cluster: Cluster | str | None, world_size: int) -> Cluster:
    """Return a cluster that was given, by name or not at all: then it is this machine.

    Raises:
        ValueError: If there is no cluster of that name.
        TypeError: If it is something else.
    """
    match cluster:
        case None:
            return Cluster.of_this_machine(world_size)
        case str():
            return Cluster.preset(cluster)
        case Cluster():
            return cluster
        case _:
            raise TypeError(
                f"expected cluster to be a name of {sorted(_PRESETS)} or a vescale.Cluster, "
                f"got {cluster!r}"
            )


def _of_gpu() -> Cluster:
    found = torch.cuda.get_device_name().lower()
    known = next((preset for name, preset in _PRESETS.items() if name in found), None)
    # An unknown GPU has the speeds of the oldest preset and its own memory.
    nearest = known or replace(_PRESETS["a100"], name=f"{found} (speeds of an a100)")
    return replace(
        nearest,
        memory_bytes=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())),
    )


def _of_cpu(local_ranks: int) -> Cluster:
    core = _PRESETS["cpu"]
    cores = (os.cpu_count() or 1) / local_ranks
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks
    return replace(
        core,
        name=f"this machine, 1/{local_ranks} of its memory and cores a rank",
        memory_bytes=memory,
        reserved_bytes=min(core.reserved_bytes, memory // 10),
        flops_per_second={size: rate * cores for size, rate in core.flops_per_second.items()},
        memory_bytes_per_second=core.memory_bytes_per_second * cores,
        ranks_per_node=local_ranks,
    )
