"""Show which rank holds what of a distributed tensor. Arithmetic only: nothing is communicated."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from torch.distributed.tensor import DTensor, Partial, Placement

from vescale_dtensor._layout.boxes import Box, local_boxes
from vescale_dtensor._layout.placements import is_sharded

from .visualize_png import draw

T = TypeVar("T")

# What still fits a terminal; the middle of anything longer is left out.
_MAX_ROWS = 16
_MAX_COLUMNS = 8
_MAX_WIDTH = 99
_MAX_BOXES = 3
_MAX_RANK_TERMS = 4


def visualize(dtensor: DTensor, *, path: str | os.PathLike[str] | None = None) -> str:
    """Return a map of which rank holds what, as text, and draw it if asked to.

    A tensor of one or two dims is a grid of blocks, each with the ranks that hold it; one of
    more dims is a list of boxes. Needs no communication, so any one rank may call it.

    Args:
        dtensor: A distributed tensor of this package or of torch.
        path: Where to write a picture too, ending in ``.png``; for one or two dims. Every rank
            that calls this writes it.

    Raises:
        ValueError: If ``path`` ends otherwise, or the tensor has no picture.
        ImportError: If a picture is asked for without the extra ``vescale-dtensor[visualize]``.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from vescale_dtensor import distribute_tensor, emulate, visualize
        >>> with emulate(4):
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     x = distribute_tensor(torch.ones(4, 6), mesh, (Replicate(), Shard(1)))
        ...     print(visualize(x))
        shape (4, 6) on mesh (dp=2, tp=2): Replicate(), Shard(dim=1)
              0:3   3:6
            +-----+-----+
        0:4 | 0,2 | 1,3 |
            +-----+-----+
    """
    mesh = dtensor.device_mesh
    ranks: list[int] = mesh.mesh.flatten().tolist()
    shape, mesh_shape = tuple(dtensor.shape), tuple(mesh.shape)
    if path is not None:
        _check_picture(shape, path)
        blocks = _blocks(shape, _holders(shape, mesh_shape, dtensor.placements, ranks))
        draw(
            blocks.edges,
            {cell: ranks_text(held) for cell, held in blocks.ranks.items()},
            path,
            title=_title(shape, mesh_shape, dtensor.placements, mesh.mesh_dim_names),
        )
    return layout_text(
        shape, mesh_shape, dtensor.placements, axis_names=mesh.mesh_dim_names, ranks=ranks
    )


def layout_text(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    axis_names: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
) -> str:
    """Return a map of which rank would hold what, without a tensor or a process group.

    Args:
        shape: Global tensor shape.
        mesh_shape: Number of ranks along each mesh axis.
        placements: One placement per mesh axis, outermost first.
        axis_names: Of the mesh axes.
        ranks: The rank at each place of the mesh, row-major; None is 0, 1, 2 and so on.

    Raises:
        ValueError: If the arguments do not fit each other; see :func:`local_boxes`.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> print(layout_text((10,), (4,), (Shard(0),)))
        shape (10,) on mesh (4,): Shard(dim=0)
          0:3   3:6   6:9   9:10
        +-----+-----+-----+------+
        | 0   | 1   | 2   | 3    |
        +-----+-----+-----+------+
    """
    shape, mesh_shape = tuple(shape), tuple(mesh_shape)
    places = range(math.prod(mesh_shape)) if ranks is None else ranks
    if len(places) != math.prod(mesh_shape):
        raise ValueError(f"expected {math.prod(mesh_shape)} ranks for {mesh_shape}, got {places}")
    holders = _holders(shape, mesh_shape, placements, places)
    lines = [_title(shape, mesh_shape, placements, axis_names)]
    lines += _partial_lines(placements, axis_names)
    if 1 <= len(shape) <= 2:
        lines += _grid(shape, _blocks(shape, holders))
        lines += [_list_line(boxes, held) for boxes, held in holders if not boxes]
    else:
        lines += _shortened([_list_line(*entry) for entry in holders], _MAX_ROWS, "...")
    return "\n".join(lines)


# Boxes, and the ranks that hold just these.
_Holders = list[tuple[tuple[Box, ...], list[int]]]


def _holders(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    ranks: Sequence[int],
) -> _Holders:
    """Return who holds what, in the order of the lowest place on the mesh."""
    by_coordinate: dict[tuple[int, ...], tuple[Box, ...]] = {}
    found: dict[tuple[Box, ...], list[int]] = {}
    for rank, coordinate in zip(ranks, product(*map(range, mesh_shape)), strict=True):
        # Replicas hold the same; a large mesh has few ranks that do not.
        first = tuple(
            place if is_sharded(placement) else 0
            for place, placement in zip(coordinate, placements, strict=False)
        )
        if first not in by_coordinate:
            held = local_boxes(shape, mesh_shape, coordinate, placements)
            by_coordinate[first] = tuple(each.box for each in held if 0 not in each.box.shape)
        found.setdefault(by_coordinate[first], []).append(rank)
    return list(found.items())


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A tensor of one or two dims, cut wherever a rank's part begins or ends.

    Attributes:
        edges: Where it is cut, (rows, columns); a tensor of one dim has one row.
        ranks: Who holds each block, by the index of its row and column.
    """

    edges: tuple[tuple[int, ...], tuple[int, ...]]
    ranks: dict[tuple[int, int], list[int]]


def _blocks(shape: tuple[int, ...], holders: _Holders) -> _Blocks:
    whole = Box.whole((1, *shape) if len(shape) == 1 else shape)
    flat = [(_two_dims(box), held) for boxes, held in holders for box in boxes]
    edges = tuple(
        tuple(
            sorted(
                {edge for box in (whole, *(box for box, _ in flat)) for edge in _ends(box, dim)}
            )
        )
        for dim in range(2)
    )
    found: dict[tuple[int, int], list[int]] = {}
    for box, held in flat:
        for cell in product(*(_covered(edges[dim], *_ends(box, dim)) for dim in range(2))):
            found.setdefault((cell[0], cell[1]), []).extend(held)
    return _Blocks((edges[0], edges[1]), {cell: sorted(held) for cell, held in found.items()})


def _two_dims(box: Box) -> Box:
    return box if len(box.shape) == 2 else Box((0, *box.offset), (1, *box.shape))


def _ends(box: Box, dim: int) -> tuple[int, int]:
    return box.offset[dim], box.offset[dim] + box.shape[dim]


def _covered(edges: Sequence[int], start: int, end: int) -> range:
    return range(bisect_left(edges, start), bisect_left(edges, end))


def _grid(shape: tuple[int, ...], blocks: _Blocks) -> list[str]:
    """Return the blocks as a table whose headings say which indices they have."""
    if 0 in shape:
        return ["no elements"]
    row_edges, column_edges = blocks.edges
    rows = _shortened([*range(len(row_edges) - 1)], _MAX_ROWS, None)
    names = ["" if len(shape) == 1 else _span(row_edges, row) for row in rows]
    lines: list[str] = []
    for most in range(_MAX_COLUMNS, 0, -2):
        columns = _shortened([*range(len(column_edges) - 1)], most, None)
        spans = [_span(column_edges, column) for column in columns]
        cells = [[_cell(blocks, row, column) for column in columns] for row in rows]
        lines = _table(names, spans, cells)
        if max(map(len, lines)) <= _MAX_WIDTH:
            break
    return lines


def _cell(blocks: _Blocks, row: int | None, column: int | None) -> str:
    if row is None or column is None:
        return "..."
    return ranks_text(blocks.ranks.get((row, column), []))


def _table(names: list[str], spans: list[str], cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, texts)) for texts in zip(spans, *cells, strict=True)]
    margin = max(map(len, names))
    indent = " " * (margin + 1) if margin else ""
    rule = indent + "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    heading = "".join(f"  {span:<{w}} " for span, w in zip(spans, widths, strict=True))
    lines = [(indent + heading).rstrip(), rule]
    for name, texts in zip(names, cells, strict=True):
        start = f"{name:<{margin}} " if margin else ""
        row_text = "|".join(f" {text:<{w}} " for text, w in zip(texts, widths, strict=True))
        lines += [f"{start}|{row_text}|", rule]
    return lines


def _span(edges: Sequence[int], index: int | None) -> str:
    return "..." if index is None else f"{edges[index]}:{edges[index + 1]}"


def _list_line(boxes: tuple[Box, ...], ranks: Sequence[int]) -> str:
    texts = [_box_text(box) for box in boxes[:_MAX_BOXES]]
    if len(boxes) > _MAX_BOXES:
        texts.append(f"{len(boxes) - _MAX_BOXES} more")
    return f"{ranks_text(ranks)}: {' + '.join(texts) or 'nothing'}"


def _box_text(box: Box) -> str:
    spans = (
        f"{start}:{start + length}" for start, length in zip(box.offset, box.shape, strict=True)
    )
    return f"[{', '.join(spans)}]" if box.shape else "the scalar"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as ``0-3,8``, with the middle left out where there are many pieces."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    terms = [term for run in runs for term in _run_terms(run)]
    if len(terms) <= _MAX_RANK_TERMS:
        return ",".join(terms) or "-"
    return f"{terms[0]},{terms[1]},..,{terms[-1]} ({len(ranks)} ranks)"


def _run_terms(run: Sequence[int]) -> list[str]:
    return [*map(str, run)] if len(run) < 3 else [f"{run[0]}-{run[-1]}"]


def _title(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    axis_names: Sequence[str] | None,
) -> str:
    mesh = str(mesh_shape)
    if axis_names is not None:
        mesh = f"({', '.join(f'{n}={r}' for n, r in zip(axis_names, mesh_shape, strict=True))})"
    return f"shape {shape} on mesh {mesh}: {', '.join(map(repr, placements))}"


def _partial_lines(
    placements: Sequence[Placement], axis_names: Sequence[str] | None
) -> Iterable[str]:
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            name = f"mesh axis {axis}" if axis_names is None else axis_names[axis]
            yield (
                f"Partial over {name}: the value is the {placement.reduce_op} of what the "
                "ranks along it hold"
            )


def _check_picture(shape: tuple[int, ...], path: str | os.PathLike[str]) -> None:
    if not os.fspath(path).endswith(".png"):
        raise ValueError(f"expected a path that ends in .png, got {os.fspath(path)!r}")
    if not 1 <= len(shape) <= 2 or 0 in shape:
        raise ValueError(
            f"a picture shows a tensor of one or two dims with elements, got shape {shape}; "
            "leave out the path for a text"
        )


def _shortened(items: Sequence[T], most: int, gap: T) -> list[T]:
    if len(items) <= most:
        return [*items]
    return [*items[: most // 2], gap, *items[len(items) - most // 2 :]]
