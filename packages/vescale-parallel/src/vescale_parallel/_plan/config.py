"""The sections of a plan, one per constraint prefix, each checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .choices import check_choices, check_size
from .frozen_mapping import FrozenMapping


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Which tensors are sharded inside one layer.

    Attributes:
        size: Ranks that share one copy of a layer.
        sequence: Also shard activations between layers along the sequence.
        sharding_policy: Who wrote ``sharding_plan``: see
            :func:`vescale_parallel.tensor_parallel_plan`.
        sharding_plan: FQN pattern (``*`` stands for one name component) to placement. A
            pattern ending in a parameter name places that parameter, for example
            ``"layers.*.mlp.up.weight": "Shard(0)"``. Marks in angle brackets say where
            activations are summed, gathered or cut, whose gradients are partial values, and which
            integers are divided; ``docs/guide/plans.md`` lists them.
        communication: ``"declared"`` refuses to redistribute sharded activations where
            ``sharding_plan`` does not say so: gathering logits that it leaves sharded raises.
        overlap: Chunks that the outputs of row-wise layers are computed in; the sum over ranks of
            one is sent while the next is computed. 1 computes them whole.
        proven_calls: For what forms of call ``sharding_plan`` was compared with one device when it
            was found. Other forms are compared when they occur; see
            ``docs/guide/tensor-parallel.md``.
    """

    size: int = 1
    sequence: bool = False
    sharding_policy: Literal["auto", "megatron", "huggingface", "fsdp-only", "manual"] = "auto"
    sharding_plan: Mapping[str, str] = field(default_factory=dict[str, str])
    communication: Literal["implicit", "declared"] = "implicit"
    overlap: int = 1
    proven_calls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choices("tensor_parallel.", self)
        object.__setattr__(self, "proven_calls", tuple(self.proven_calls))
        check_size("tensor_parallel.size", self.size)
        check_size("tensor_parallel.overlap", self.overlap)
        object.__setattr__(self, "sharding_plan", FrozenMapping(self.sharding_plan))


def _check_resharding(data: DataParallel) -> None:
    name, given = "data_parallel.reshard_after_forward", data.reshard_after_forward
    if isinstance(given, Mapping):
        bad = {key: value for key, value in given.items() if not isinstance(value, bool)}  # pyright: ignore[reportUnnecessaryIsInstance]: user input
        if bad:
            raise ValueError(f"expected {name} to be True or False of each pattern, got {bad!r}")
        object.__setattr__(data, "reshard_after_forward", FrozenMapping(given))
    elif not isinstance(given, bool):  # pyright: ignore[reportUnnecessaryIsInstance]: user input
        raise ValueError(
            f"expected {name} to be True, False, or patterns of blocks with one of them, "
            f"got {given!r}"
        )
    if data.reshard_after_forward is not True and data.zero_stage != 3:
        raise ValueError(
            f"{name} is of parameters that are gathered block by block: expected "
            f"data_parallel.zero_stage 3, got {data.zero_stage}"
        )


def _check_replicas(data: DataParallel) -> None:
    """Raise if copies are to share out optimizer state where there is another plan for that."""
    if not data.replicate_zero_stage:
        return
    copies, size = data.replicate_size, data.size
    name = "data_parallel.replicate_zero_stage 1 shards optimizer state over copies of a model "
    if data.zero_stage != 3:
        raise ValueError(
            f"{name}that is sharded itself: expected data_parallel.zero_stage 3, got "
            f"{data.zero_stage}; stages 1 and 2 shard the optimizer state over all "
            "data_parallel.size ranks with data_parallel.replicate_size 1"
        )
    if copies == 1:
        raise ValueError(
            f"{name}: expected data_parallel.replicate_size above 1, got 1, where zero_stage 3 "
            "shards everything over all ranks; leave replicate_zero_stage out"
        )
    if copies == size:
        raise ValueError(
            f"{name}that is sharded itself: expected data_parallel.replicate_size below "
            f"data_parallel.size ({size}), got {copies}; where every rank has all parameters, "
            "that is data_parallel.zero_stage 2 with replicate_size 1"
        )
    if data.offload != "none":
        raise ValueError(
            f"{name}on the device, where what they share is kept: expected data_parallel.offload "
            f"'none', got {data.offload!r}"
        )


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """How the batch, and with ZeRO the model state, is split over replicas.

    Attributes:
        size: Parts the global batch is cut into.
        replicate_size: Of these, copies of the sharded state (hybrid sharding); divides
            ``size``. With ``zero_stage`` 0 everything is replicated whatever it says.
        replicate_zero_stage: 1 shards the optimizer state and the gradients over those copies, too
            (HFSDP): each gets back what the others updated once a step. With ``zero_stage`` 3.
        zero_stage: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        prefetch: Blocks whose parameters are gathered while the ones before them compute, with
            ``zero_stage`` 3; 0 gathers each when it is reached.
        reduction: Gradients are summed in rank order (``ordered``), to the bits of one device, or
            in the order of the backend's own reductions (``library``).
        reshard_after_forward: With ``zero_stage`` 3, whether the gathered parameters of a block
            are freed behind its forward pass, and gathered again for its backward pass. Or of
            which blocks they are: FQN pattern (``*`` stands for one name component) to True or
            False; True for blocks that no pattern is of.
        offload: What is in the host's memory: nothing, what the ``optimizer`` updates (sharded
            parameters, their gradients, its state), which steps there, or the ``parameters`` too:
            with ``zero_stage`` 3, the device has those then only that are gathered.
    """

    size: int = 1
    replicate_size: int = 1
    replicate_zero_stage: Literal[0, 1] = 0
    zero_stage: Literal[0, 1, 2, 3] = 0
    prefetch: int = 1
    reduction: Literal["ordered", "library"] = "ordered"
    reshard_after_forward: bool | Mapping[str, bool] = True
    offload: Literal["none", "optimizer", "parameters"] = "none"

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the sharded state."""
        return 1 if self.zero_stage == 0 else self.size // self.replicate_size

    @property
    def state_replicas(self) -> int:
        """Copies of the sharded parameters that share out the optimizer state of these."""
        return self.replicate_size if self.replicate_zero_stage else 1

    def __post_init__(self) -> None:
        check_choices("data_parallel.", self)
        check_size("data_parallel.size", self.size)
        check_size("data_parallel.replicate_size", self.replicate_size)
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise ValueError(
                "expected data_parallel.prefetch to be a number of blocks, 0 for none, "
                f"got {self.prefetch!r}"
            )
        _check_resharding(self)
        if self.offload == "parameters" and self.zero_stage != 3:
            raise ValueError(
                "data_parallel.offload 'parameters' is of parameters that are gathered block by "
                f"block: expected data_parallel.zero_stage 3, got {self.zero_stage}; 'optimizer' "
                "goes with every stage"
            )
        if self.size % self.replicate_size:
            raise ValueError(
                f"expected data_parallel.replicate_size to divide data_parallel.size "
                f"({self.size}), got {self.replicate_size}"
            )
        _check_replicas(self)


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Ranks that share every sequence, each with a slice of it in blocks.

    Attributes:
        size: How many. They are besides those of ``data_parallel.size``, and get the same rows.
        method: How they attend: ``"all_to_all"`` has each compute whole sequences of some heads;
            in a ``"ring"`` keys and values travel, and there may be fewer heads than ranks.
        outputs: What a call returns that is differentiated by a loss that it returns: ``"loss"``
            has the head and the loss run on slices, and leaves out tensors larger than what
            leaves the blocks, as logits; with ``"whole"`` every rank computes and returns them.
    """

    size: int = 1
    method: Literal["all_to_all", "ring"] = "all_to_all"
    outputs: Literal["loss", "whole"] = "loss"

    def __post_init__(self) -> None:
        check_size("context_parallel.size", self.size)
        check_choices("context_parallel.", self)


@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """Which ranks of a batch share the experts of a mixture.

    Attributes:
        size: Ranks that each have other experts, and send them each other's tokens; divides
            ``data_parallel.size`` times ``context_parallel.size``, whose ranks they are. What is
            no expert has a copy on each, whatever the stage of ZeRO.
    """

    size: int = 1

    def __post_init__(self) -> None:
        check_size("expert_parallel.size", self.size)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How the data set becomes batches.

    A ready ``DataLoader`` says all of it itself but ``gradient_accumulation``.

    Attributes:
        global_size: Samples in one optimizer step over all ranks; None if no data set is given,
            or a ready ``DataLoader``.
        shuffle: A new order every epoch, a function of ``seed`` and the epoch.
        seed: Seed of the order.
        drop_last: Leave out samples that do not fill a global batch.
        num_workers: Processes on every rank that fetch samples; 0 for the rank's own.
        pin_memory: Fetch into memory that a GPU can copy from while it computes.
        prefetch_factor: Batches that each worker has ready; None for torch's 2.
        gradient_accumulation: Micro-batches that each rank's rows are run in, forward and
            backward of one after the other, inside of one call of the model. A pipeline runs so
            many times its own ``microbatches``.
    """

    global_size: int | None = None
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = True
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    gradient_accumulation: int = 1

    def __post_init__(self) -> None:
        check_choices("batch.", self)
        if self.global_size is not None:
            check_size("batch.global_size", self.global_size)
        check_size("batch.gradient_accumulation", self.gradient_accumulation)
        if self.num_workers != 0:
            check_size("batch.num_workers", self.num_workers)
        if self.prefetch_factor is not None:
            check_size("batch.prefetch_factor", self.prefetch_factor)
            if self.num_workers == 0:
                raise ValueError(
                    "batch.prefetch_factor needs batch.num_workers above 0: batches are made "
                    f"ahead by workers, got {self.prefetch_factor} with none"
                )


Dtype = Literal["float64", "float32", "bfloat16", "float16"]
_SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
    "float": "float32", "fp64": "float64", "double": "float64",
}  # fmt: skip


def _dtype_name(dtype: Any) -> Any:
    """Return how a plan calls a dtype that may be torch's, or a short name of it."""
    # Not by torch.dtype: a plan is made without torch.
    name = str(dtype).removeprefix("torch.") if type(dtype).__name__ == "dtype" else dtype
    return _SHORT.get(name, name) if isinstance(name, str) else name


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of compute; None means the parameter's own dtype.

    Attributes:
        param: Parameters in forward and backward. The optimizer keeps the original dtype.
        reduce: Gradients while they are summed over ranks.
        cast_inputs: Whether floating-point inputs of a call are cast to the dtype of ``param``.
    """

    param: Dtype | None = None
    reduce: Dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param", "reduce"):
            object.__setattr__(self, name, _dtype_name(getattr(self, name)))
        check_choices("precision.", self)
