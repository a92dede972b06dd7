"""A few numbers that tell whether two ranks were called with the same arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Odd numbers that spread what they are multiplied with over all bits.
_MIX = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are looked at at once. An accelerator is to start few operators.
_PART, _PART_OF_CPU = 2**20, 2**16
_PLAIN = (type(None), bool, int, float, str, torch.dtype)

# Floats that differ by less, relative to the norm, may be results of kernels that add in any
# order; rows that differ are apart by the inverse root of their number at least.
_ROUNDING = {
    **dict.fromkeys((torch.float64, torch.complex128), 1e-9),
    **dict.fromkeys((torch.float32, torch.complex64), 1e-5),
}
_ROUNDING_OF_HALF = 1e-2


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One value among the arguments of a call.

    Attributes:
        name: As the user would write it.
        kind: Dtype and shape of a tensor, the value of a number or text, else the type.
        numbers: Of a tensor with values: a hash; of floats a projection and a norm as well.
        tolerance: How far apart projections of the same floats may be, relative to the norm.
    """

    name: str
    kind: str
    numbers: tuple[int, float, float] | None = None
    tolerance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Digest:
    """The arguments of one call.

    Attributes:
        leaves: Without numbers.
        numbers: (tensors, 3) int64: hash, bits of the projection, bits of the norm; on the
            device where they were made.
        row: (2,) int64: what the leaves are, and what their tensors hold.
    """

    leaves: Sequence[Leaf]
    numbers: Tensor
    row: Tensor

    def with_numbers(self) -> list[Leaf]:
        """Return the leaves with their numbers. Waits for the device."""
        bits = self.numbers.cpu()
        floats = bits[:, 1:].contiguous().view(torch.float64).tolist()
        found = iter(zip(bits[:, 0].tolist(), floats, strict=True))
        leaves: list[Leaf] = []
        for leaf in self.leaves:
            numbers = None
            if leaf.numbers is not None:
                hashed, (projection, norm) = next(found)
                numbers = (hashed, projection, norm)
            leaves.append(
                Leaf(name=leaf.name, kind=leaf.kind, numbers=numbers, tolerance=leaf.tolerance)
            )
        return leaves


def digest_of(named: Mapping[str, Any], device: torch.device) -> Digest:
    """Return the digest of a call's arguments by name, its numbers on a device."""
    found = [leaf for name, value in named.items() for leaf in _opened(name, value)]
    leaves = [_leaf(name, value) for name, value in found]
    with torch.no_grad():
        rows = [
            _numbers(value).to(device)
            for leaf, (_, value) in zip(leaves, found, strict=True)
            if leaf.numbers is not None
        ]
        numbers = torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.int64).to(device)
        total = _mixed(numbers[:, 0], torch.arange(len(numbers), device=device))
    text = hashlib.sha256(repr(leaves).encode()).digest()
    structure = torch.full((), int.from_bytes(text[:7], "little"), device=device)
    return Digest(leaves=leaves, numbers=numbers, row=torch.stack([structure, total]))


def _opened(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return what is in containers, each with how to write it."""
    inside: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        inside = [(f"{name}[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(f"{name}[{index}]", each) for index, each in enumerate(value)]
    elif isinstance(value, Tensor) and value.is_nested:
        # Every one has a length of its own, which is a number of this process alone.
        rows = value.detach().unbind()
        inside = [(f"{name}[{index}]", each) for index, each in enumerate(rows)]
    elif is_dataclass(value):
        inside = [(f"{name}.{f.name}", getattr(value, f.name, None)) for f in fields(value)]
    else:
        return [(name, value)]
    return [leaf for path, each in inside for leaf in _opened(path, each)]


def _leaf(name: str, value: Any) -> Leaf:
    if not isinstance(value, Tensor):
        kind = repr(value) if isinstance(value, _PLAIN) else type(value).__name__
        return Leaf(name=name, kind=kind)
    kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    if not plain or value.device.type not in ("cpu", "cuda") or value.is_quantized:
        return Leaf(name=name, kind=f"{type(value).__name__} {kind}")
    tolerance = 0.0
    if value.is_floating_point() or value.is_complex():
        tolerance = _ROUNDING.get(value.dtype, _ROUNDING_OF_HALF)
    return Leaf(name=name, kind=kind, numbers=(0, 0.0, 0.0), tolerance=tolerance)


def _numbers(tensor: Tensor) -> Tensor:
    """Return (3,) int64: a hash, and the bits of a projection and a norm.

    What is computed of an element takes ten times its memory, so of a part at a time.
    """
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = tensor.detach().contiguous().view(-1)
    is_floating = flat.is_floating_point()
    hashed = torch.zeros((), dtype=torch.int64, device=flat.device)
    pair = torch.zeros(2, dtype=torch.float64, device=flat.device)  # projection, squared norm
    first = 0
    for part in flat.split(_PART_OF_CPU if flat.device.type == "cpu" else _PART):
        places = torch.arange(first, first + part.numel(), device=flat.device)
        hashed += _mixed(part.view(_INTEGERS[part.element_size()]), places)
        if is_floating:
            values = part.to(torch.float64)
            direction = _spread(places).to(torch.float64).mul_(2.0**-63)
            pair += torch.stack([values.dot(direction), values.dot(values)])
        first += part.numel()
    pair[1].sqrt_()
    return torch.cat([hashed.unsqueeze(0), pair.view(torch.int64)])


def _mixed(integers: Tensor, places: Tensor) -> Tensor:
    """Return one int64 that depends on every element and its place."""
    return _spread(integers.to(torch.int64) * _MIX[2] + places).sum()


def _spread(integers: Tensor) -> Tensor:
    """Map integers to ones that look random, equal ones to equal ones."""
    integers = (integers + 1).mul_(_MIX[0])
    integers = (integers ^ (integers >> 32)).mul_(_MIX[1])
    return integers.bitwise_xor_(integers >> 29)


def difference(ranks: Mapping[int, Sequence[Leaf]]) -> str:
    """Say which argument differs between ranks, nothing if it is rounding alone."""
    (first, of_first), *others = ranks.items()
    for rank, leaves in others:
        missing = _missing(first, of_first, rank, leaves) or _missing(
            rank, leaves, first, of_first
        )
        if missing:
            return missing
    for index, leaf in enumerate(of_first):
        classes: list[tuple[Leaf, list[int]]] = []
        for rank, leaves in ranks.items():
            same = next((c for c in classes if _agree(c[0], leaves[index])), None)
            if same is None:
                classes.append((leaves[index], [rank]))
            else:
                same[1].append(rank)
        if len(classes) > 1:
            return _told_apart(leaf.name, classes)
    return ""


def _missing(first: int, has: Sequence[Leaf], rank: int, lacks: Sequence[Leaf]) -> str:
    known = {leaf.name for leaf in lacks}
    extra = next((leaf for leaf in has if leaf.name not in known), None)
    if extra is not None:
        return f"{extra.name} was given on rank {first} and not on rank {rank}"
    if len(has) == len(lacks) and [a.name for a in has] != [b.name for b in lacks]:
        return f"ranks {first} and {rank} have their keys in another order"
    return ""


def _agree(one: Leaf, other: Leaf) -> bool:
    if one.kind != other.kind:
        return False
    if one.numbers is None or other.numbers is None:
        return True
    (hashed, projection, norm), (same, theirs, _) = one.numbers, other.numbers
    return hashed == same or abs(projection - theirs) < one.tolerance * norm


def _told_apart(name: str, classes: Sequence[tuple[Leaf, list[int]]]) -> str:
    if len({leaf.kind for leaf, _ in classes}) > 1:
        each = [f"{leaf.kind} on {_ranks(ranks)}" for leaf, ranks in classes]
        return f"{name} is " + ", ".join(each)
    each = [f"on {_ranks(ranks)}" for _, ranks in classes]
    return f"{name} ({classes[0][0].kind}) has one value " + ", another ".join(each)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
