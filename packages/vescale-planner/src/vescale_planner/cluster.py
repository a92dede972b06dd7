"""The machines a plan is for: memory, arithmetic and links of one rank, as plain numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ._machines.calibrate import measured
from ._machines.presets import EFFICIENCY, PRESETS

_Range = tuple[str, Callable[[float], bool]]
_COUNT: _Range = ("to be a whole number above 0", lambda value: value >= 1 and value % 1 == 0)
_SPEED: _Range = ("above 0", lambda value: value > 0)
_NOT_NEGATIVE: _Range = ("of 0 or more", lambda value: value >= 0)
_REACHED: _Range = ("above 0, at most 1", lambda value: 0 < value <= 1)
_PART: _Range = ("between 0 and 1", lambda value: 0 <= value <= 1)
# What the numbers of a cluster may be, in words and as a test.
_EXPECTED: dict[str, _Range] = {
    "memory_bytes": _COUNT,
    "reserved_bytes": _NOT_NEGATIVE,
    "memory_bytes_per_second": _SPEED,
    "ranks_per_node": _COUNT,
    "intra_bytes_per_second": _SPEED,
    "inter_bytes_per_second": _SPEED,
    "nics_per_node": ("of 0 (one a rank) or more", lambda value: value >= 0),
    "intra_latency_seconds": _NOT_NEGATIVE,
    "inter_latency_seconds": _NOT_NEGATIVE,
    "launch_seconds": _NOT_NEGATIVE,
    "efficiency": _REACHED,
    "attention_efficiency": _REACHED,
    "memory_efficiency": _REACHED,
    "link_efficiency": _REACHED,
    "overlap": _PART,
    "interference": _PART,
    "half_width": _NOT_NEGATIVE,
    "alone_speed": ("of 1 or more", lambda value: value >= 1),
    "fragmentation": ("of 1 or more", lambda value: value >= 1),
}


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
        inter_bytes_per_second: One network card sending to another node, one direction.
        nics_per_node: Network cards of a node, which its ranks share evenly; 0 for one a rank.
        intra_latency_seconds: Of one message inside a node.
        inter_latency_seconds: Of one message to another node.
        launch_seconds: To start one operator, in forward or half of its backward.
        efficiency: Part of ``flops_per_second`` that large matrix products reach.
        attention_efficiency: Likewise of attention, counted over all scores, masked ones too.
        memory_efficiency: Part of ``memory_bytes_per_second`` that element-wise operators reach.
        link_efficiency: Part of the links' speed that collectives of large messages reach.
        overlap: Part of compute behind which data-parallel communication can hide.
        interference: Part of the time of hidden communication that compute takes longer, since
            kernels of collectives use multiprocessors and memory (Miao et al. 2023, Galvatron,
            measured 0.1 to 0.3).
        half_width: Of matrices this wide, products reach half of what very wide ones do.
        alone_speed: How many times as fast a rank computes while the others of its node wait:
            above 1 where ranks share processors.
        fragmentation: Reserved over allocated memory: of runs on GPUs the median is 1.04 to 1.11,
            depending on the stack.
        keeps_buffers: Whether what gradients are sent from, and arrive in, stays between steps. On
            processors it does: the C library splits what is freed.
        runs_ahead: Whether operators are started while others compute. On processors each is
            started when the one before is through, so that starting them adds to every step.

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
    nics_per_node: int = 0
    intra_latency_seconds: float = 5e-6
    inter_latency_seconds: float = 15e-6
    launch_seconds: float = 5e-6
    efficiency: float = 0.5
    attention_efficiency: float = 0.4
    memory_efficiency: float = 0.85
    link_efficiency: float = 0.8
    overlap: float = 0.8
    interference: float = 0.2
    half_width: float = 256.0
    alone_speed: float = 1.0
    fragmentation: float = 1.08
    keeps_buffers: bool = False
    runs_ahead: bool = True

    def __post_init__(self) -> None:
        peaks: Any = self.flops_per_second
        if not isinstance(peaks, Mapping) or not peaks or min(peaks.values()) <= 0:
            raise ValueError(
                "expected Cluster.flops_per_second as numbers above 0 by element size, "
                f"{{2: 1e15, 4: 5e14}} for example, got {peaks!r}"
            )
        for name, (expected, fits) in _EXPECTED.items():
            if not fits(getattr(self, name)):
                raise ValueError(
                    f"expected Cluster.{name} {expected}, got {getattr(self, name)!r}"
                )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that :meth:`preset` and ``generate_plan(cluster=...)`` know."""
        return tuple(_PRESETS)

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """Return a cluster by name, one of :meth:`names`.

        ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``, ``"gb200"``, ``"mi300x"`` or ``"cpu"``.

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
    def calibrate(cls) -> Cluster:
        """Measure what this machine reaches: products, attention, memory and collectives.

        Every rank of the default process group must call this, if there is one: all measure at the
        same time and return the same cluster. It takes seconds. What is not measured is that of
        :meth:`of_this_machine`; :meth:`to_file` keeps it.

        Example:
            >>> Cluster.calibrate().flops_per_second[4] > 0  # doctest: +SKIP
            True
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        found = replace(cls.of_this_machine(world_size), **measured())
        return replace(found, name=f"{found.name}, as measured")

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

    @property
    def inside_bytes_per_second(self) -> float:
        """What a rank reaches inside its node."""
        return self.intra_bytes_per_second * self.link_efficiency

    @property
    def outside_bytes_per_second(self) -> float:
        """What a rank reaches to another node while all ranks of its node communicate."""
        cards = (self.nics_per_node or self.ranks_per_node) / self.ranks_per_node
        return self.inter_bytes_per_second * cards * self.link_efficiency

    @property
    def reached_memory_bytes_per_second(self) -> float:
        """What element-wise operators reach."""
        return self.memory_bytes_per_second * self.memory_efficiency

    def to_json(self) -> str:
        """Return the cluster as indented JSON."""
        return json.dumps(asdict(self), indent=2)

    def to_file(self, path: str | Path) -> None:
        """Write the cluster to a ``.json``, ``.yaml`` or ``.yml`` file.

        Raises:
            ValueError: If the file is called otherwise.
            ImportError: If it is YAML and ``pyyaml`` is not installed.
        """
        path = Path(path)
        text = self.to_json() + "\n"
        if _is_yaml(path):
            text = _yaml(path).safe_dump(json.loads(text), sort_keys=False)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read what :meth:`to_json` wrote, or JSON written by hand.

        Raises:
            ValueError: If it is no JSON object, a field is unknown, or one is missing.

        Example:
            >>> Cluster.from_json(Cluster.preset("h100").to_json()) == Cluster.preset("h100")
            True
        """
        try:
            record: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a cluster as JSON, got {text[:80]!r}: {error}") from None
        return _of_record(record, "JSON")

    @classmethod
    def from_file(cls, path: str | Path) -> Cluster:
        """Read a cluster from a ``.json``, ``.yaml`` or ``.yml`` file.

        Raises:
            ValueError: As :meth:`from_json`, or if the file is called otherwise.
            ImportError: If it is YAML and ``pyyaml`` is not installed.
        """
        path = Path(path)
        if not _is_yaml(path):
            return cls.from_json(path.read_text(encoding="utf-8"))
        return _of_record(_yaml(path).safe_load(path.read_text(encoding="utf-8")), str(path))


def _is_yaml(path: Path) -> bool:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"expected a .json, .yaml or .yml file of a cluster, got {path}")
    return path.suffix != ".json"


def _yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ImportError(f"for {path}, pip install pyyaml, or use JSON") from None
    return yaml


def _of_record(record: Any, where: str) -> Cluster:
    """Construct a cluster from a mapping; a ``preset`` in it fills in what it leaves out."""
    if not isinstance(record, Mapping):
        raise ValueError(f"expected {where} to be an object of Cluster's fields, got {record!r}")
    values = dict(cast("Mapping[str, Any]", record))
    preset = values.pop("preset", None)
    known = [each.name for each in fields(Cluster)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f"unknown cluster field {unknown[0]!r} in {where}; known: 'preset', {known}"
        )
    # YAML reads 1e12 as a text, and JSON's keys are texts.
    for name, value in values.items():
        if name == "flops_per_second":
            values[name] = {int(size): float(rate) for size, rate in dict(value).items()}
        elif name not in {"name", "keeps_buffers", "runs_ahead"}:
            values[name] = _number(value, name, where)
    if preset is not None:
        return replace(Cluster.preset(preset), **values)
    try:
        return Cluster(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}; give 'preset' to fill in what is left out") from None


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected {name} in {where} to be a number, got {value!r}") from None
    return int(number) if number.is_integer() else number


_PRESETS = {
    name: Cluster(
        name=name,
        efficiency=EFFICIENCY[name][0],
        attention_efficiency=EFFICIENCY[name][1],
        **numbers,
    )
    for name, numbers in PRESETS.items()
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
        alone_speed=max(1.0, 1 / cores),
        ranks_per_node=local_ranks,
    )
