"""Run a step on this rank, or on every rank of an emulated world in one process.

[Note: emulation] A program on DTensors is the same on every rank; only local tensors and
coordinates differ. So one process can run it for all ranks: a local tensor is then a
:class:`RankTensor` that carries every rank's, operators on it run once per rank, and a
collective moves data between its parts. Everything in this package that depends on the rank
goes through :func:`per_rank`; everything that moves data through :mod:`.primitives`. Nothing
else knows whether ranks are processes or parts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._caches import forget_with_world, forget_world
from vescale_dtensor._torch_private import FakeStore, make_wrapper, pytree, seeing_lazy_bits

from .without_memory import WithoutMemory


class RankTensor(WithoutMemory, Tensor):
    """The tensors of all emulated ranks, used as if they were one.

    Shape and strides are those of the rank that the emulation looks through.

    Attributes:
        parts: One tensor per rank.
    """

    has_memory = "x.of_rank(rank) for the tensor of one rank"
    parts: tuple[Tensor, ...]

    def __new__(cls, parts: Sequence[Tensor]) -> RankTensor:
        shown = parts[_world().rank]
        tensor = make_wrapper(
            cls,
            shown.shape,
            strides=shown.stride(),
            dtype=shown.dtype,
            device=shown.device,
            requires_grad=False,
        )
        tensor.parts = tuple(parts)
        return tensor

    def of_rank(self, rank: int) -> Tensor:
        """Return the tensor of one rank."""
        return self.parts[rank]

    def tolist(self) -> Any:
        """Return nested lists, if those of all ranks are equal."""
        lists = [part.tolist() for part in self.parts]
        # As text, for a number that is none equals nothing.
        _join_leaf(tuple(map(str, lists)))
        return lists[_world().rank]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"RankTensor(rank {_world().rank} of {len(self.parts)}: {self.parts[_world().rank]})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise NotImplementedError("emulated ranks cannot be compiled")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(rank: int) -> Any:
            own_args, own_kwargs = part_of(rank, (args, kwargs or {}))
            return func(*own_args, **own_kwargs)

        with drawing_from((kwargs or {}).get("generator")), seeing_lazy_bits():
            results = [*_each_rank(run)]
        given = pytree.tree_leaves((args, kwargs or {}))
        known = {id(t.parts[0]): t for t in given if isinstance(t, RankTensor)}
        return pytree.tree_map_only(
            RankTensor, lambda joined: known.get(id(joined.parts[0]), joined), _join(results)
        )


class EmulatedWorld:
    """Ranks that live in this process; what :func:`emulate` yields.

    Attributes:
        size: Number of ranks.
        rank: The rank whose shapes and coordinates Python code sees.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank

    def per_rank(self, fn: Callable[[int], Any]) -> Any:
        """Return what ``fn(rank)`` gives for every rank, its tensors joined."""
        return _join([*_each_rank(fn)])


_current: EmulatedWorld | None = None


@contextmanager
def emulate(world_size: int, *, rank: int = 0) -> Iterator[EmulatedWorld]:
    """Run the ranks of a distributed program in this process and thread.

    Inside, meshes can be made as usual. DTensors hold the local tensors of all ranks, and have
    the bits that the same program has on ``world_size`` processes. ``to_local()`` gives a
    :class:`RankTensor`; ``to_local().of_rank(3)`` is what rank 3 would have.

    Args:
        world_size: Number of ranks.
        rank: The rank through whose eyes Python code looks: its coordinate is what
            ``mesh.get_coordinate()`` says, its local shape what ``to_local().shape`` says.

    Raises:
        RuntimeError: If a process group is initialized already.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Shard
        >>> from vescale_dtensor import distribute_tensor, emulate
        >>> with emulate(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     x = distribute_tensor(torch.arange(8.0), mesh, (Shard(0),))
        ...     print(x.sum().item(), x.to_local().of_rank(3))
        28.0 tensor([6., 7.])
    """
    # The world is a property of the process, as torch's is.
    global _current
    if dist.is_initialized():
        raise RuntimeError("expected no process group: emulated ranks bring their own")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank in 0..{world_size - 1}, got {rank}")
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # torch wraps it once more for every group, for the life of the process: each emulated world
    # would put "[rank0]: " before every line of later errors.
    sys.excepthook = hook
    _current = EmulatedWorld(world_size, rank)
    try:
        yield _current
    finally:
        _current = None
        forget_world()
        dist.destroy_process_group()


def is_emulated() -> bool:
    """Whether ranks are parts of this process."""
    return _current is not None


def per_rank(fn: Callable[..., Any], mesh: DeviceMesh, *locals_: Any) -> Any:
    """Call ``fn(coordinate, *locals)`` for this rank, or for every emulated one.

    ``locals_`` are trees of local tensors, of which a rank gets its own; the tensors that emulated
    ranks return are joined.
    """
    if _current is None:
        return fn(coordinate_of(mesh), *locals_)
    coordinates = coordinates_of_ranks(mesh)

    def run(rank: int) -> Any:
        return fn(coordinates[rank], *part_of(rank, locals_))

    return _join([*_each_rank(run)])


def of_own_memory(local: Tensor) -> Tensor:
    """Return a plain tensor as that of every emulated rank, each with elements of its own.

    Those of the rank that is shown are the tensor's own, as they are where ranks are processes.
    """
    if _current is None or isinstance(local, RankTensor):
        return local
    shown = _current.rank
    return RankTensor([
        local if rank == shown else _copied(local) for rank in range(_current.size)
    ])  # fmt: skip


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    once = tensor[tuple(slice(0, 1 if step == 0 else None) for step in tensor.stride())]
    copy = once.new_empty_strided(once.shape, once.stride()).copy_(once)
    return copy.expand(tensor.shape)


def as_it_is(local: Tensor) -> Tensor:
    """Return a local tensor with the shape that it has after an operator may have resized it."""
    return RankTensor(local.parts) if isinstance(local, RankTensor) else local


def offset_of(local: Tensor) -> int:
    """Return where a local tensor begins in its storage."""
    first = local.parts[0] if isinstance(local, RankTensor) else local
    return int(first.storage_offset())


def part_of(rank: int, tree: Any) -> Any:
    """Return ``tree`` with the tensors of one emulated rank."""
    return pytree.tree_map_only(RankTensor, lambda t: t.parts[rank], tree)


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's coordinate on ``mesh``, which it has to be part of."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not part of {mesh}")
    return tuple(coordinate)


@lru_cache(maxsize=64)
def coordinates_of_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """Return every emulated rank's coordinate on ``mesh``, or on its slice of the root mesh.

    Raises:
        NotImplementedError: If some ranks of the world are on no slice of the mesh.
    """
    root = mesh._get_root_mesh()
    if root.size() != _world().size:
        raise NotImplementedError("an emulated mesh must span all ranks of the world")
    axes = _axes_in_root(mesh, root)
    ranks = map(int, root.mesh.flatten())
    places = dict(zip(ranks, product(*map(range, root.shape)), strict=True))
    return tuple(tuple(places[rank][axis] for axis in axes) for rank in range(_world().size))


@lru_cache(maxsize=256)
def peers_of_ranks(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return, for every emulated rank, the ranks it meets along ``axes``, row-major."""
    root = mesh._get_root_mesh()
    own = _axes_in_root(mesh, root)
    free = [own[axis] for axis in axes]
    fixed = [axis for axis in range(root.ndim) if axis not in free]
    groups = root.mesh.permute(*fixed, *free).reshape(-1, math.prod(root.shape[a] for a in free))
    members = {int(rank): tuple(map(int, group)) for group in groups for rank in group}
    return tuple(members[rank] for rank in range(_world().size))


forget_with_world(coordinates_of_ranks.cache_clear)
forget_with_world(peers_of_ranks.cache_clear)


def _axes_in_root(mesh: DeviceMesh, root: DeviceMesh) -> list[int]:
    if mesh is root or mesh == root:
        return list(range(root.ndim))
    names, own = root.mesh_dim_names, mesh.mesh_dim_names
    if names is None or own is None or not set(own) <= set(names):
        raise NotImplementedError(f"an emulated mesh must be a slice of its root, got {mesh}")
    return [names.index(name) for name in own]


def _world() -> EmulatedWorld:
    assert _current is not None
    return _current


_generators: list[torch.Generator] = []


@contextmanager
def drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let every emulated rank find ``generator`` as the first one found it."""
    if generator is None or _current is None:
        yield
        return
    _generators.append(generator)
    try:
        yield
    finally:
        _generators.pop()


def _each_rank(run: Callable[[int], Any]) -> Iterator[Any]:
    """Call ``run`` for every rank, each with the generators as the first one found them."""
    generators = [torch.default_generator, *_generators]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = [generator.get_state() for generator in generators]
    for rank in range(_world().size):
        if rank:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
        yield run(rank)


def _join(results: list[Any]) -> Any:
    """Put the results of all ranks together, leaf by leaf."""
    leaves, specs = zip(*(pytree.tree_flatten(result) for result in results), strict=True)
    return pytree.tree_unflatten(
        [_join_leaf(leaf) for leaf in zip(*leaves, strict=True)], specs[0]
    )


def _join_leaf(values: tuple[Any, ...]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return RankTensor(values)
    if any(not _same_value(value, first) for value in values):
        raise RuntimeError(
            f"emulated ranks disagree on a value that Python would see: {values}; "
            "ask one of them, to_local().of_rank(rank)"
        )
    return first


def _same_value(value: Any, first: Any) -> bool:
    """Whether values are equal, or both not a number, which equals nothing."""
    return value == first or (value != value and first != first)
