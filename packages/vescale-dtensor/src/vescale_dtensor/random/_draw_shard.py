"""Fill the local tensor of a rank with what one device would have drawn there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from vescale_dtensor._layout.boxes import Box, LocalBox

from ._cpu_shard import PairedNormals, RandomTensor
from ._cuda_kernels import cuda_kernels
from ._draw_rules import Fill, draws
from ._mkl_seeded import SeededTensor, seed_rule
from ._mt19937_stream import Point
from ._philox_shard import philox_draws
from ._strided_view import Window, memory_order

# Up to here all is drawn and the part is copied: cheaper than moving the generator.
_WHOLE_NUMEL = 1 << 14


@dataclass(frozen=True, slots=True)
class _Drawing:
    """How one call draws the elements of a tensor.

    Attributes:
        draw: Puts the elements at a window, in drawing order, into a tensor.
        strides: How far apart in drawing order neighbours along each dim are.
        end: Returns the state in which the call leaves the generator; cheapest once all is
            drawn.
    """

    draw: Callable[[Window, Tensor], None]
    strides: tuple[int, ...]
    end: Callable[[], Tensor]


def draw_part(
    fill: Fill,
    *,
    window: Window,
    boxes: Sequence[LocalBox],
    out: Tensor,
    generator: Generator | None = None,
) -> None:
    """Fill ``out`` with the elements of ``boxes`` that one device draws for the whole tensor.

    Bit for bit, and the generator is left where drawing the whole leaves it. Nobody communicates;
    ranks that begin with the same generator state agree. Memory beyond ``out`` is a few MiB. Ranks
    may hold the same boxes.

    Args:
        fill: What is drawn.
        window: Geometry of the global tensor: torch draws contiguous normals in another way
            than transposed ones, for one.
        boxes: What the rank holds, from ``local_boxes``; may be empty.
        out: The local tensor, of the dtype of ``window``, with any strides. On the meta device
            nothing is drawn.
        generator: Where the numbers come from; None for the default one of the device.

    Raises:
        ValueError: If ``out`` has another dtype than ``window``.
        NotImplementedError: If the part cannot be drawn without the whole, before anything
            is drawn.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> from vescale_dtensor import local_boxes
        >>> whole = torch.empty(4, 6).uniform_(generator=torch.Generator().manual_seed(7))
        >>> part = torch.empty(4, 3)
        >>> draw_part(
        ...     Fill("uniform_", (0.0, 1.0)),
        ...     window=Window.of(whole),
        ...     boxes=local_boxes((4, 6), (2,), (1,), (Shard(1),)),
        ...     out=part,
        ...     generator=torch.Generator().manual_seed(7),
        ... )
        >>> torch.equal(part, whole[:, 3:])
        True
    """
    if out.dtype != window.dtype:
        raise ValueError(f"expected a local tensor of {window.dtype}, got one of {out.dtype}")
    if out.device.type == "meta":
        return  # as on one device
    if out.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"drawing a part is not known for {out.device.type!r}")
    if generator is None:
        generator = _default_generator(out.device)
    parts = [(held.box, held.of(out)) for held in boxes]
    if window.span <= _WHOLE_NUMEL:
        _draw_whole(fill, window, parts, generator)
    elif fill.method == "normal_" and window.dtype.is_complex:
        _draw_complex(fill, window, parts, generator)
    else:
        draw_boxes(fill, window, parts, generator)


def draw_boxes(
    fill: Fill, window: Window, parts: Sequence[tuple[Box, Tensor]], generator: Generator
) -> None:
    """Draw boxes of a tensor of at least one element, and not the rest."""
    on_device = _on_cuda if generator.device.type == "cuda" else _on_cpu
    drawing = on_device(fill, window, generator)
    for box, out in parts:
        offset = sum(o * s for o, s in zip(box.offset, drawing.strides, strict=True))
        drawing.draw(Window(box.shape, drawing.strides, offset, window.dtype), out)
    generator.set_state(drawing.end())


def _draw_whole(
    fill: Fill, window: Window, parts: Sequence[tuple[Box, Tensor]], generator: Generator
) -> None:
    whole = torch.empty_strided(
        window.shape, window.stride, dtype=window.dtype, device=generator.device
    )
    fill(whole, generator)
    for box, out in parts:
        out.copy_(whole[box.slices])


def _draw_complex(
    fill: Fill, window: Window, parts: Sequence[tuple[Box, Tensor]], generator: Generator
) -> None:
    """Draw complex normals as torch does: as real ones, of half the variance."""
    mean, std = fill.parameters
    assert std is not None
    draw_boxes(
        Fill("normal_", (mean, std / math.sqrt(2.0))),
        Window(
            (*window.shape, 2),
            (*(2 * stride for stride in window.stride), 1),
            0,
            window.dtype.to_real(),
        ),
        [(Box((*box.offset, 0), (*box.shape, 2)), torch.view_as_real(out)) for box, out in parts],
        generator,
    )


def _on_cpu(fill: Fill, window: Window, generator: Generator) -> _Drawing:
    point = Point.of(generator.get_state())
    found = draws(fill, window, point)
    if found is not None:
        known, end = found
        if known is None:
            draw = PairedNormals(fill, point).draw
        else:
            draw = RandomTensor(window.numel, known, point).draw
        return _Drawing(draw, memory_order(window), end.state)
    rule = seed_rule(fill, window.dtype)
    if rule is None:
        raise NotImplementedError(
            f"this version of torch draws {fill.method}{fill.parameters} for {window.dtype} on "
            "the CPU in a way of which no part can be drawn alone; draw the whole tensor"
        )
    draw = SeededTensor(fill, rule, point).draw
    return _Drawing(draw, _row_major(window.shape), point.after(rule.num_draws).state)


def point_after(fill: Fill, window: Window, point: Point) -> Point | None:
    """Return where drawing on the CPU leaves a generator; None if only drawing tells."""
    found = draws(fill, window, point)
    if found is not None:
        return found[1]
    rule = seed_rule(fill, window.dtype)
    return None if rule is None else point.after(rule.num_draws)


def _on_cuda(fill: Fill, window: Window, generator: Generator) -> _Drawing:
    kernels = cuda_kernels(generator.device)
    assert kernels is not None
    found = philox_draws(fill, window, kernels.state(generator), kernels)
    if found is None:
        raise NotImplementedError(
            f"this version of torch draws {fill.method}{fill.parameters} for {window} on "
            f"{generator.device} in a way of which no part can be drawn alone; draw the whole "
            "tensor"
        )
    return _Drawing(found.draw, found.strides, lambda: found.end)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _default_generator(device: torch.device) -> Generator:
    kernels = cuda_kernels(device)
    return torch.default_generator if kernels is None else kernels.default_generator()
