"""The plan: what will be split where. Plain frozen data, checked before anything communicates."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from .choices import check_choices, hints_of
from .combinations import check_experts, check_reductions
from .config import Batch, ContextParallel, DataParallel, ExpertParallel, Precision, TensorParallel
from .numerics import check_numerics, numerics_in_words
from .pipeline_config import PipelineParallel
from .printed import entry, filled, in_words, rates
from .recomputation import Recompute, checked_keep, checked_recompute, keeps_some

_FORMAT = 1
# What a plan says of itself; nobody constrains it.
_OF_PLANNER = ("model", "estimate", "reasons")


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """Which model a plan was made for.

    Attributes:
        name: Class name of the module.
        num_parameters: Number of distinct parameter tensors.
        numel: Number of parameter elements.
        digest: Hash of every parameter's FQN, shape and dtype.
    """

    name: str
    num_parameters: int
    numel: int
    digest: str

    def __str__(self) -> str:
        return f"{self.name} ({self.num_parameters} parameters, {self.numel} elements)"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the planner predicts for one optimizer step.

    Attributes:
        step_seconds: How long it takes.
        memory_bytes: Of the fullest rank.
        samples: Rows of the batch over all ranks; None if nothing was predicted of them.
        tokens: Likewise; None without a sequence.
        flops: Of forward and backward over all ranks, without what is computed again.
        peak_flops_per_second: Of one rank's device, in the dtype of compute.
        device: Name of the cluster that these are of.
        is_assumed: Whether samples, tokens and flops are assumed, for want of an example batch.
    """

    step_seconds: float
    memory_bytes: int
    samples: int | None = None
    tokens: int | None = None
    flops: float | None = None
    peak_flops_per_second: float | None = None
    device: str = ""
    is_assumed: bool = False

    def mfu(self, world_size: int) -> float | None:
        """Return the share of the devices' peak that the model's own flops use."""
        if not self.flops or not self.peak_flops_per_second:
            return None
        return self.flops / (self.step_seconds * world_size * self.peak_flops_per_second)


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """What :func:`vescale_parallel.parallelize` does to a model, as data.

    Written by a planner or by hand, compared with ``==``, stored as JSON, and printed in the
    dotted form of the constraints.

    Example:
        >>> plan = ParallelPlan(data_parallel=DataParallel(size=2, zero_stage=3))
        >>> plan.world_size
        2
        >>> ParallelPlan.from_json(plan.to_json()) == plan
        True
    """

    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)
    pipeline_parallel: PipelineParallel = field(default_factory=PipelineParallel)
    data_parallel: DataParallel = field(default_factory=DataParallel)
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    expert_parallel: ExpertParallel = field(default_factory=ExpertParallel)
    batch: Batch = field(default_factory=Batch)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = "none"
    recompute_keep: tuple[str, ...] = ()
    compile: Literal["none", "blocks"] = "none"
    compile_backend: str = "inductor"
    numerics: Literal["default", "invariant"] = "default"
    numerics_chunks: int = 8
    model: ModelSignature | None = None
    estimate: Estimate | None = None
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_sections()
        self._check_compile()
        self._check_recompute()
        check_choices("", self)
        check_numerics(
            self.numerics,
            self.numerics_chunks,
            self.tensor_parallel,
            self.data_parallel,
            alone={
                "context_parallel.size": self.context_parallel.size,
                "expert_parallel.size": self.expert_parallel.size,
                "tensor_parallel.overlap": self.tensor_parallel.overlap,
            },
            compiled=self.compile,
        )
        object.__setattr__(self, "reasons", tuple(self.reasons))
        check_experts(self.expert_parallel, self.data_parallel, self.context_parallel)
        check_reductions(self.pipeline_parallel, self.data_parallel)
        shards = self.data_parallel.size * self.num_microbatches
        size = self.batch.global_size
        if size is not None and size % shards:
            accumulated = self.batch.gradient_accumulation
            name, factor = " x batch.gradient_accumulation", f" x {accumulated}"
            raise ValueError(
                f"expected batch.global_size to be a multiple of data_parallel.size x "
                f"pipeline_parallel.microbatches{name if accumulated > 1 else ''} "
                f"({self.data_parallel.size} x {self.pipeline_parallel.microbatches}"
                f"{factor if accumulated > 1 else ''} = {shards}), got {size}; "
                f"the nearest sizes are {size // shards * shards or shards} and "
                f"{(size // shards + 1) * shards}"
            )

    def _check_sections(self) -> None:
        for name, hint in hints_of(ParallelPlan).items():
            if name in _OF_PLANNER or not is_dataclass(hint):
                continue
            kind, value = cast("Any", hint), getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(
                    f"expected {name} to be a {kind.__name__}, got {value!r}; write for example "
                    f"{name}={kind.__name__}({fields(kind)[0].name}=..)"
                )

    def _check_compile(self) -> None:
        given = cast("object", self.compile)
        if given is False:  # what plans of before "blocks" say
            object.__setattr__(self, "compile", "none")
        if given is True or given == "model":
            raise ValueError(
                f"expected compile to be 'none' or 'blocks', got {self.compile!r}: a whole model "
                "is not compiled, whose forward gathers, sends and averages between its blocks; "
                "use 'blocks'"
            )
        if type(self.compile_backend) is not str or not self.compile_backend:
            raise ValueError(
                "expected compile_backend to be a name that torch.compile knows ('inductor', "
                f"'aot_eager', ..), got {self.compile_backend!r}"
            )

    def _check_recompute(self) -> None:
        recompute = checked_recompute(self.recompute)
        object.__setattr__(self, "recompute", recompute)
        object.__setattr__(self, "recompute_keep", checked_keep(self.recompute_keep, recompute))
        if self.compile != "none" and keeps_some(recompute):
            raise ValueError(
                "recompute 'selective' tells operators apart, of which a block that compile "
                f"{self.compile!r} compiles has none: expected recompute 'none' or 'full', or "
                f"compile 'none', got {recompute!r}"
            )

    @property
    def num_microbatches(self) -> int:
        """Parts that each data-parallel rank's batch is run in, one after the other."""
        return self.pipeline_parallel.microbatches * self.batch.gradient_accumulation

    @property
    def axes(self) -> dict[str, int]:
        """Size of every mesh axis, outermost first.

        Ranks that share experts are data-parallel ones as far as these divide, and then ranks
        that share a sequence, which are not counted as ``cp`` again. They are next to each other,
        as they send each other all tokens of every layer; under ZeRO 3 those that gather
        parameters are, which is more (decision 58).
        """
        data, experts = self.data_parallel, self.expert_parallel.size
        of_data = math.gcd(experts, data.size)
        shard = data.shard_size
        if experts > 1 and data.zero_stage:
            # What is no expert has a copy on each rank that shares the experts.
            shard = data.size // of_data
        context = self.context_parallel.size // (experts // of_data)
        sharded = {"dp_shard": shard, "cp": context}
        return {
            "pp": self.pipeline_parallel.size,
            "dp_replicate": data.size // shard // of_data,
            **({"ep": experts, **sharded} if data.zero_stage == 3 else {**sharded, "ep": experts}),
            "tp": self.tensor_parallel.size,
        }

    @property
    def world_size(self) -> int:
        """Number of ranks the plan needs."""
        return math.prod(self.axes.values())

    def check_world_size(self, world_size: int) -> None:
        """Raise if the plan is for another number of ranks.

        Raises:
            ValueError: With the axes that make up the plan's number.
        """
        if self.world_size != world_size:
            axes = " x ".join(f"{name} {size}" for name, size in self.axes.items() if size > 1)
            raise ValueError(
                f"expected {self.world_size} ranks ({axes or 'no axis above 1'}), "
                f"got world size {world_size}; {_how_to_start(self.world_size)}, "
                "or generate another plan"
            )

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        return json.dumps({"format": _FORMAT, **_record(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ParallelPlan:
        """Read what :meth:`to_json` wrote, or JSON written by hand; fields may be left out.

        Raises:
            ValueError: If it is no JSON object, is of a newer format, or has unknown fields.
        """
        try:
            record: Any = json.loads(text)
        except (json.JSONDecodeError, TypeError) as error:
            given = f"{text[:80]!r}" if isinstance(text, str) else type(text).__name__  # pyright: ignore[reportUnnecessaryIsInstance]: user input
            raise ValueError(
                f"expected a plan as JSON, got {given}, which is not: {error}; of a file, give "
                "what is in it: ParallelPlan.from_json(Path(..).read_text())"
            ) from None
        if not isinstance(record, dict):
            raise ValueError(f"expected a plan as a JSON object, got {type(record).__name__}")
        record = dict(cast("dict[str, Any]", record))
        version = record.pop("format", _FORMAT)
        if version != _FORMAT:
            raise ValueError(f"expected plan format {_FORMAT}, got {version!r}; upgrade vescale")
        return _build(cls, record, "")

    def __str__(self) -> str:
        lines = self._told()
        for key, value in self.dotted().items():
            # What was verified is for the runtime; it is in the JSON.
            if key != "tensor_parallel.proven_calls":
                lines += entry(key, value)
        return "\n".join([*lines, *self._chosen()])

    def explain(self) -> str:
        """Return what the plan does, what is predicted of it and why it was chosen, in sentences.

        It is what the plan itself knows, read from JSON as well. ``vescale_planner.explain_plan``
        says more of a choice, and ``vescale_planner.predict`` what any plan takes.

        Example:
            >>> print(ParallelPlan(data_parallel=DataParallel(size=2)).explain())
            plan for 2 ranks
              the batch is split over 2 data-parallel replicas
              parameters, gradients and optimizer state are replicated in each (as DDP does)
            nothing is predicted of it, and it gives no reasons: generate_plan did not return it
        """
        chosen = self._chosen() or [
            "nothing is predicted of it, and it gives no reasons: generate_plan did not return it"
        ]
        return "\n".join([*self._told(), *chosen])

    def _told(self) -> list[str]:
        """Return lines of what the plan does."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        lines = filled(f"plan for {ranks}" + (f", {self.model}" if self.model else ""), "", "  ")
        for sentence in in_words(
            self.tensor_parallel,
            self.pipeline_parallel,
            self.data_parallel,
            self.expert_parallel,
            self.context_parallel,
            self.recompute,
        ):
            lines += filled(sentence, "  ", "    ")
        if self.numerics == "invariant":
            lines += filled(numerics_in_words(self.numerics_chunks), "  ", "    ")
        return lines

    def _chosen(self) -> list[str]:
        """Return lines of why it was chosen, as far as it says."""
        lines = filled(self._predicted(self.estimate), "", "  ") if self.estimate else []
        for reason in self.reasons:
            lines += filled(reason, "- ", "  ")
        return lines

    def described(self) -> dict[str, str]:
        """Return every field as text, by its constraint key, to compare plans."""
        keys = {**constraint_keys(), **{name: (name,) for name in _OF_PLANNER}}
        return {key: repr(_get(self, path)) for key, path in keys.items()}

    def _predicted(self, estimate: Estimate) -> str:
        said = [
            f"predicted: {estimate.step_seconds:.3g} s a step",
            f"{estimate.memory_bytes / 2**30:.3g} GiB a rank",
            *rates(
                estimate.step_seconds,
                estimate.samples,
                estimate.tokens,
                estimate.mfu(self.world_size),
            ),
        ]
        return ", ".join(said) + (" (of an assumed batch, see below)" * estimate.is_assumed)

    def dotted(self) -> dict[str, Any]:
        """Return every field that differs from the default, by its constraint key."""
        plain = ParallelPlan()
        found: dict[str, Any] = {}
        for key, path in constraint_keys().items():
            value, default = _get(self, path), _get(plain, path)
            if value != default:
                found[key] = dict(value) if isinstance(value, Mapping) else value
        return found


def constraint_keys() -> dict[str, tuple[str, ...]]:
    """Return every dotted constraint key and the attributes it stands for."""
    keys: dict[str, tuple[str, ...]] = {}
    plain = ParallelPlan()
    for each in fields(ParallelPlan):
        if each.name in _OF_PLANNER:
            continue
        section = getattr(plain, each.name)
        if is_dataclass(section):
            for inner in fields(section):
                keys[f"{each.name}.{inner.name}"] = (each.name, inner.name)
        else:
            keys[each.name] = (each.name,)
    return keys


def _how_to_start(world_size: int) -> str:
    """Return the command that starts this program on as many ranks."""
    script = Path(sys.argv[0]).name
    script = script if script.endswith(".py") else "train.py"
    missing = "" if "RANK" in os.environ else "this process was not started by torchrun; "
    return f"{missing}start as many ranks: torchrun --nproc-per-node {world_size} {script}"


def _get(plan: ParallelPlan, path: tuple[str, ...]) -> Any:
    value: Any = plan
    for name in path:
        value = getattr(value, name)
    return value


def _record(value: Any) -> Any:
    """Return a plan, or a part of one, as values JSON has."""
    if is_dataclass(value):
        return {each.name: _record(getattr(value, each.name)) for each in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value


def _build(cls: Any, record: Any, prefix: str) -> Any:
    """Construct a plan or a section of one from JSON."""
    if not isinstance(record, dict):
        raise ValueError(f"expected plan field {prefix[:-1]!r} to be an object, got {record!r}")
    hints = hints_of(cls)
    fields_of_json = cast("dict[str, Any]", record)
    unknown = sorted(set(fields_of_json) - set(hints))
    if unknown:
        raise ValueError(f"unknown plan field {prefix + unknown[0]!r}; known: {sorted(hints)}")
    values: dict[str, Any] = {}
    for name, value in fields_of_json.items():
        section = next((t for t in (hints[name], *get_args(hints[name])) if is_dataclass(t)), None)
        if section is not None and value is not None:
            value = _build(section, value, f"{prefix}{name}.")
        values[name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)
