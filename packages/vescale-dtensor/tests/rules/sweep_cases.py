"""What the sweep runs: samples of torch's own operator database, and placements for them."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

from vescale_dtensor import DTensor, InterleavedShard, RaggedShard, distribute_tensor, is_sharded
from vescale_dtensor._comm.emulation import per_rank

from .device import DEVICE

# Importing the database forbids assigning to torch.backends, for the whole process.
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

OPERATORS: list[Any] = sorted(database.op_db, key=lambda op: op.formatted_name)
# Their results are whatever the memory held; of attention on GPUs the seed of no dropout is.
UNINITIALIZED = frozenset({
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "resize_", "resize_as_",
    "torch.ops.aten._efficient_attention_forward", "torch.ops.aten._flash_attention_forward",
})  # fmt: skip
# Made by CUDA's runtime compiler from tensors' addresses, past the dispatcher.
UNDISPATCHED = frozenset({
    "jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args", "jiterator_binary",
    "jiterator_binary_return_by_ref", "jiterator_unary",
})  # fmt: skip
# The database makes tensors of these sizes; the even ones divide by four ranks and by two.
EVEN_SIZES = {"XS": 2, "S": 4, "M": 8, "L": 16}
# Their samples rely on the database's sizes without checking: others read out of bounds.
FIXED_SIZES = frozenset({"_segment_reduce"})
MAX_NUMEL = 20_000

Placements = tuple[Placement, ...]
# Per tensor of a sample; None leaves the tensor a plain one.
Assignment = tuple[Placements | None, ...]


@dataclass(frozen=True)
class Sample:
    """Arguments of an operator, tensors apart.

    Attributes:
        tensors: All tensors among the arguments, contiguous, each once.
        build: Returns the arguments with other tensors in their places.
    """

    tensors: tuple[Tensor, ...]
    build: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def dtypes_of(op: Any, index: int) -> list[torch.dtype]:
    """Return the widest float of an operator and one other dtype, which rotates with ``index``."""
    supported = op.supported_dtypes(DEVICE)
    floats = [t for t in (torch.float64, torch.float32, torch.bfloat16) if t in supported][:1]
    others = [t for t in (torch.int64, torch.complex128, torch.bool) if t in supported]
    return floats + ([others[index % len(others)]] if others else [])


def samples_of(op: Any, dtype: torch.dtype, num_samples: int) -> list[Sample]:
    """Return samples spread over those of the database, the last one of even sizes."""
    default = _generated(op, dtype)
    with sized({} if op.name in FIXED_SIZES else EVEN_SIZES):
        even = _generated(op, dtype)
    found = _spread(default, max(1, num_samples - 1))
    return [*found, *_spread(even, num_samples - len(found))]


def _generated(op: Any, dtype: torch.dtype) -> list[Sample]:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        drawn: list[Any] = []
        # Some samples only exist for the database's own sizes.
        with suppress(Exception):
            drawn.extend(islice(op.sample_inputs(DEVICE, dtype), 60))
        made = [_sample(each) for each in drawn]
    return [sample for sample in made if sample is not None]


def _sample(drawn: Any) -> Sample | None:
    leaves, structure = pytree.tree_flatten(((drawn.input, *drawn.args), drawn.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    own: dict[int, Tensor] = {id(leaves[place]): leaves[place] for place in places}
    order = {key: index for index, key in enumerate(own)}
    if not own or any(t.layout != torch.strided or t.is_nested for t in own.values()):
        return None
    if sum(t.numel() for t in own.values()) > MAX_NUMEL:
        return None

    def build(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed = list(leaves)
        for place in places:
            changed[place] = tensors[order[id(leaves[place])]]
        return pytree.tree_unflatten(changed, structure)

    plain = tuple(
        t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        for t in own.values()
    )
    return Sample(plain, build)


def _spread(samples: list[Sample], count: int) -> list[Sample]:
    """Return ``count`` samples: the one with most dims, and others evenly spaced."""
    if not samples or count <= 0:
        return []
    widest = max(range(len(samples)), key=lambda i: sum(t.ndim for t in samples[i].tensors))
    step = max(1, len(samples) // count)
    chosen = dict.fromkeys([widest, *range(len(samples) - 1, -1, -step)])
    return [samples[i] for i in list(chosen)[:count]]


@contextmanager
def sized(sizes: dict[str, int]) -> Iterator[None]:
    """Let the database make tensors of other sizes."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name == database.__name__ or name.startswith("torch.testing._internal.opinfo")
    ]
    before = [(m, name, getattr(m, name)) for m in modules for name in sizes if hasattr(m, name)]
    for module, name, _ in before:
        setattr(module, name, sizes[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def assignments(
    sample: Sample, mesh: DeviceMesh, rng: random.Random, count: int
) -> list[Assignment]:
    """Return placements for the tensors of a sample, as many of each kind as fit ``count``."""
    num = len(sample.tensors)
    whole: Placements = (Replicate(),) * mesh.ndim
    kinds: list[list[Assignment]] = [[], [], [], []]
    for index, tensor in enumerate(sample.tensors):
        alone, pending, ragged = kinds[0], kinds[1], kinds[2]
        for axis in range(mesh.ndim):
            for target, options in (
                (alone, [Shard(dim) for dim in range(tensor.ndim)]),
                (pending, [Partial()] if _is_inexact(tensor) else []),
                (ragged, _ragged(tensor, mesh.size(axis))),
            ):
                for option in options:
                    placed = (*whole[:axis], option, *whole[axis + 1 :])
                    target.append(tuple(placed if i == index else whole for i in range(num)))
    for dim in range(max(t.ndim for t in sample.tensors)):
        together = tuple(
            (Shard(dim),) * mesh.ndim if t.ndim > dim else whole for t in sample.tensors
        )
        kinds[3].append(together)
    for kind in kinds:
        rng.shuffle(kind)
    found: list[Assignment] = [(whole,) * num] if rng.random() < 0.3 else []
    while len(found) < count - 1 and any(kinds):
        found.extend(kind.pop() for kind in kinds if kind)
    return [*found[: count - 1], _any_placements(sample, mesh, rng)]


def _any_placements(sample: Sample, mesh: DeviceMesh, rng: random.Random) -> Assignment:
    """Return placements that are drawn for every tensor and mesh axis."""
    drawn: list[Placements | None] = []
    for index, tensor in enumerate(sample.tensors):
        if index and rng.random() < 0.15:
            drawn.append(None)
            continue
        placements: list[Placement] = []
        for axis in range(mesh.ndim):
            dims = range(tensor.ndim)
            options: list[Placement] = [Replicate(), *(Shard(dim) for dim in dims)]
            options += [Partial()] if _is_inexact(tensor) else []
            if not any(is_sharded(each) for each in placements):
                options += _ragged(tensor, mesh.size(axis))
                options += [InterleavedShard(d, 2) for d in dims if tensor.shape[d] % 2 == 0]
                lengths = ((d, tensor.shape[d]) for d in dims if tensor.shape[d] > 2)
                options += [InterleavedShard(d, (n - 1, 1)) for d, n in lengths]
            flattened = {d for p in placements if isinstance(p, RaggedShard) for d in p.dims[1:]}
            if flattened:
                taken = flattened | {0}
                options = [p for p in options if not (isinstance(p, Shard) and p.dim in taken)]
            placements.append(rng.choice(options))
        drawn.append(tuple(placements))
    return tuple(drawn)


def _ragged(tensor: Tensor, num_ranks: int) -> list[Placement]:
    """Return cuts that leave ranks without elements."""
    if not tensor.ndim or not tensor.numel():
        return []
    found: list[Placement] = []
    for dims in ((0,), (0, 1))[: tensor.ndim]:
        size = tensor.shape[: dims[-1] + 1].numel()
        units = [0] * num_ranks
        units[-2] = size // 3
        units[1] += size - size // 3
        found.append(RaggedShard(dims, 1, tuple(units)))
    return found


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def distributed(tensor: Tensor, mesh: DeviceMesh, placements: Placements | None) -> Tensor:
    """Return ``tensor`` distributed; pending sums are of parts that differ and add up exactly."""
    if placements is None:
        return tensor.clone()
    held = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
    result = distribute_tensor(tensor, mesh, held)
    if held == placements:
        return result
    pending = [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]

    # Added up from the first rank to the last no intermediate sum is rounded.
    weights = {2: (0.5, 0.5), 4: (0.25, 0.25, 0.5, 0.0)}

    def partial_sum(coordinate: tuple[int, ...], local: Tensor) -> Tensor:
        for axis in pending:
            weight = weights[mesh.size(axis)][coordinate[axis]]
            local = local * weight if weight else torch.full_like(local, -0.0)
        return local

    local = per_rank(partial_sum, mesh, result.to_local())
    return DTensor.from_local(local, mesh, placements, shape=tensor.shape)
