"""How the ranks' local tensors make up one device's: sharded, replicated, or partial sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vescale_parallel import PackedDim

Place = tuple[int, int]  # on the axes of ranks that share a batch: cp, tp
Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """The way of putting local tensors together that comes closest to one device's tensor.

    Attributes:
        error: Largest absolute difference.
        placements: How they were put together, as text.
        place: Of the rank that differs most.
        index: Of the element that differs most, in the tensors compared.
        found: What is there.
        expected: What one device has there.
    """

    error: float
    placements: str
    place: Place
    index: tuple[int, ...]
    found: float
    expected: float


def best_match(
    whole: Tensor,
    locals_: Mapping[Place, Tensor],
    bound: float,
    parts: Collection[PackedDim] = (),
) -> Match | None:
    """Compare one device's tensor with those of the ranks that share its rows.

    A rank may hold all of it, a part of it along one dim for each axis, or a term of a sum.
    Which of these, is found from the shapes, and among equal shapes from the values.

    Args:
        whole: One device's tensor.
        locals_: The ranks' tensors.
        bound: A difference that needs no better match.
        parts: That a dim may be made of, where they are not all sharded and of one length.

    Returns:
        The first match within the bound, else the closest; None if the shapes fit in no way.
    """
    best: Match | None = None
    for placements, pairs in _candidates(whole, locals_, parts):
        match = _furthest(placements, pairs)
        if best is None or match.error < best.error:
            best = match
        if match.error <= bound:
            return match
    return best


Pairs = Sequence[tuple[Place, Tensor, Tensor]]  # found on ranks, expected there


def _candidates(
    whole: Tensor, locals_: Mapping[Place, Tensor], parts: Collection[PackedDim]
) -> Iterator[tuple[str, Pairs]]:
    shapes = {x.shape for x in locals_.values()}
    if shapes == {whole.shape}:
        yield "replicated", [(place, x, whole) for place, x in locals_.items()]
        if len(locals_) > 1:
            first = min(locals_)
            yield "partial", [(first, _sum([*locals_.values()]), whole)]
            for axis, name in enumerate(("cp", "tp")):
                yield (
                    f"partial over {name}",
                    [
                        (min(group), _sum([locals_[p] for p in group]), whole)
                        for group in _along(axis, locals_)
                    ],
                )
        return
    if len(locals_) == 1 or len({len(shape) for shape in shapes} | {whole.dim()}) > 1:
        return
    dims = [d for d in range(whole.dim()) if {shape[d] for shape in shapes} != {whole.shape[d]}]
    for axis, name in enumerate(("cp", "tp")):
        groups = _along(axis, locals_)
        if len(dims) == 1 and len(groups[0]) > 1:
            size = whole.shape[dims[0]]
            text = f"sharded over {name} along dim {dims[0]}"
            for order, joined in _joined(groups, locals_, dims[0], size):
                if any(x.shape != whole.shape for x in joined):
                    continue
                pairs = [(min(group), x, whole) for group, x in zip(groups, joined, strict=True)]
                yield f"{text}{order}", pairs
            for order, pairs in _packed(groups, locals_, whole, dims[0], parts):
                yield f"{text}{order}", pairs
    if dims == [0]:
        yield from _in_any_order(whole, locals_)
    if len(dims) == 2:
        yield from _two_dims(whole, locals_, dims)
    if len(dims) == 1:
        yield from _slices(whole, locals_, dims[0])


def _in_any_order(whole: Tensor, locals_: Mapping[Place, Tensor]) -> Iterator[tuple[str, Pairs]]:
    """Yield the tokens of all ranks beside those of one device: an expert's, say.

    Whose expert chose which tokens decides on their order, and on how many a rank has of them.
    """
    groups = _along(0, locals_)
    found = [torch.cat([locals_[place] for place in group]) for group in groups]
    if whole.dim() != 2 or any(x.shape != whole.shape for x in found):
        return
    text = "sharded over cp along dim 0 in another order"
    for pairs in zip(*(_paired(x, whole) for x in found), strict=False):
        yield text, [(min(g), *pair) for g, pair in zip(groups, pairs, strict=True)]


def match_in_any_order(
    whole: Tensor, by_shard: Mapping[int, Mapping[Place, Tensor]], bound: float
) -> Match | None:
    """Compare tokens of one device with those that ranks have of all shards of a batch.

    An expert's are in the order of the choices of which they are, the first one's first: they are
    those of no shard after those of another one.

    Args:
        whole: One device's tokens.
        by_shard: The ranks' tensors, by shard.
        bound: A difference that needs no better match.

    Returns:
        The first match within the bound, else the closest; None if these are no such tokens.
    """
    every = [x for of in by_shard.values() for x in of.values()]
    if whole.dim() not in (1, 2) or any(x.dim() != whole.dim() for x in every):
        return None
    if whole.dim() == 1:  # a router's weights, sorted by experts
        whole = whole.unsqueeze(1)
        by_shard = {at: {p: x.unsqueeze(1) for p, x in of.items()} for at, of in by_shard.items()}
    rows = [[of[place] for place in group] for of in by_shard.values() for group in _along(1, of)]
    if any(len({len(x) for x in of}) > 1 for of in rows):
        return None
    # Features may be sharded over tensor-parallel ranks.
    is_whole = all(x.shape[1] == whole.shape[1] for of in rows for x in of)
    found = torch.cat([of[0] if is_whole else torch.cat(of, 1) for of in rows])
    if found.shape != whole.shape:
        return None
    best: Match | None = None
    place = min(min(of) for of in by_shard.values())
    for pair in _paired(found, whole):
        match = _furthest("sharded along dim 0 in another order", [(place, *pair)])
        if best is None or match.error < best.error:
            best = match
        if match.error <= bound:
            break
    return best


def _paired(rows: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows beside those of one device that they may be: by order, then the nearest ones."""
    direction = torch.linspace(1.0, 2.0, whole.shape[1], dtype=torch.float64).cos()

    def by_value(rows: Tensor) -> Tensor:
        return rows[(rows.double() @ direction.to(rows.device)).argsort()]

    yield by_value(rows), by_value(whole)
    # Rounding may change the order of two.
    nearest = _distances(rows, whole).argmin(1) if len(whole) else whole.new_zeros(0).long()
    if len(whole) and len({*nearest.tolist()}) == len(whole):
        yield rows, whole[nearest]


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return the largest difference of each row and each other one."""
    return torch.cdist(rows.double(), others.double(), p=torch.inf)


def _two_dims(
    whole: Tensor, locals_: Mapping[Place, Tensor], dims: Sequence[int]
) -> Iterator[tuple[str, Pairs]]:
    for along_tp, along_cp in itertools.permutations(dims):
        rows = _along(1, locals_)
        for order, parts in _joined(rows, locals_, along_tp, whole.shape[along_tp]):
            by_cp = {(min(group)[0], 0): x for group, x in zip(rows, parts, strict=True)}
            text = f"sharded over tp along dim {along_tp}{order}, "
            for other, (joined,) in _joined([[*by_cp]], by_cp, along_cp, whole.shape[along_cp]):
                yield f"{text}over cp along dim {along_cp}{other}", [((0, 0), joined, whole)]
            if along_cp == 0:
                for other, pairs in _in_any_order(whole, by_cp):
                    yield text + other, pairs


def _along(axis: int, places: Mapping[Place, Tensor]) -> list[list[Place]]:
    """Return the groups of ranks that differ in one coordinate only, in its order."""
    groups: dict[int, list[Place]] = {}
    for place in sorted(places):
        groups.setdefault(place[1 - axis], []).append(place)
    return [*groups.values()]


def _joined(
    groups: Sequence[Sequence[Place]], locals_: Mapping[Place, Tensor], dim: int, size: int
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield ways of putting shards next to each other, for all groups alike."""
    parts = [[locals_[place] for place in group] for group in groups]
    if any(sum(x.shape[dim] for x in row) != size for row in parts):
        return
    if any(len({x.shape[:dim] + x.shape[dim + 1 :] for x in row}) > 1 for row in parts):
        return  # they are shards along another dim, too
    if any([x.shape[dim] for x in row] != [x.shape[dim] for x in parts[0]] for row in parts):
        return
    # Queries, keys and values in one matrix, gate and up projections; tokens of several rows.
    # Or heads, of as many tokens as the batch has.
    length = math.gcd(*(x.shape[dim] for row in parts for x in row))
    for blocks in (each for each in range(1, length + 1) if length % each == 0):
        inner = [[x.unflatten(dim, (blocks, -1)) for x in row] for row in parts]
        text = f" of each of {blocks} blocks" if blocks > 1 else ""
        yield text, [torch.cat(row, dim + 1).flatten(dim, dim + 1) for row in inner]
        if (ends := _ends(inner[0], dim + 1)) is not None:
            text = " from both ends" + text
            yield (
                text,
                [_from_both_ends(row, ends, dim + 1).flatten(dim, dim + 1) for row in inner],
            )


def _packed(
    groups: Sequence[Sequence[Place]],
    locals_: Mapping[Place, Tensor],
    whole: Tensor,
    dim: int,
    parts: Collection[PackedDim],
) -> Iterator[tuple[str, Pairs]]:
    """Yield ranks' tensors beside their shards of parts of several lengths, or all of parts."""
    for each in parts:
        unit, rest = divmod(whole.shape[dim], sum(each.lengths))
        if rest:
            continue
        lengths = [length * unit for length in each.lengths]
        wholes = whole.split(lengths, dim)
        pairs = [
            (place, locals_[place], _of_rank(wholes, each.is_whole, dim, rank, len(group)))
            for group in groups
            for rank, place in enumerate(group)
        ]
        if any(found.shape != expected.shape for _, found, expected in pairs):
            continue
        said = zip(lengths, each.is_whole, strict=True)
        shown = ", ".join(f"{length} (whole)" if kept else f"{length}" for length, kept in said)
        yield f" of each of parts that are {shown} long", pairs


def _of_rank(
    parts: Sequence[Tensor], is_whole: Sequence[bool], dim: int, rank: int, size: int
) -> Tensor:
    kept = zip(parts, is_whole, strict=True)
    return torch.cat([x if whole else x.chunk(size, dim)[rank] for x, whole in kept], dim)


def _ends(shards: Sequence[Tensor], dim: int) -> Sequence[tuple[int, int]] | None:
    """Return the lengths of balanced causal attention: a part from the front, one from the back.

    None if shards have other lengths.
    """
    size, num_parts = sum(x.shape[dim] for x in shards), 2 * len(shards)
    sizes = [size // num_parts + (part < size % num_parts) for part in range(num_parts)]
    ends = [*zip(sizes, reversed(sizes), strict=True)][: len(shards)]
    return ends if [x.shape[dim] for x in shards] == [*map(sum, ends)] else None


def _from_both_ends(shards: Sequence[Tensor], ends: Sequence[tuple[int, int]], dim: int) -> Tensor:
    halves = [shard.split(sizes, dim) for shard, sizes in zip(shards, ends, strict=True)]
    return torch.cat([row[0] for row in halves] + [row[1] for row in reversed(halves)], dim)


def _slices(
    whole: Tensor, locals_: Mapping[Place, Tensor], dim: int
) -> Iterator[tuple[str, Pairs]]:
    """Yield each rank's slice, for heads that several ranks hold; all of it must be held."""
    pairs: list[tuple[Place, Tensor, Tensor]] = []
    held = torch.zeros(whole.shape[dim], dtype=torch.bool)
    for place, x in locals_.items():
        length = x.shape[dim]
        if length > whole.shape[dim]:
            return
        starts = range(whole.shape[dim] - length + 1)
        at = min(starts, key=lambda at: _distance(whole.narrow(dim, at, length), x))
        held[at : at + length] = True
        pairs.append((place, x, whole.narrow(dim, at, length)))
    if bool(held.all()):
        yield f"slices along dim {dim}", pairs


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0


def _furthest(placements: str, pairs: Pairs) -> Match:
    def furthest_of(pair: tuple[Place, Tensor, Tensor]) -> Match:
        place, found, expected = pair
        if not found.numel():
            return Match(0.0, placements, place, (), 0.0, 0.0)
        found, expected = found.double(), expected.double()
        off = (found - expected).abs()
        # Equal infinities, and NaN on both sides, are no difference; NaN on one side is.
        off = off.where(~((found == expected) | (found.isnan() & expected.isnan())), 0.0)
        off = off.nan_to_num(nan=torch.inf)
        at = int(off.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), off.shape))
        return Match(
            float(off.flatten()[at]),
            placements,
            place,
            index,
            float(found.flatten()[at]),
            float(expected.flatten()[at]),
        )

    return max(map(furthest_of, pairs), key=lambda match: match.error)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors]).sum(0)
