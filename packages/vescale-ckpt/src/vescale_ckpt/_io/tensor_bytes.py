"""The bytes of tensors, without copies where the memory already lies as wanted."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_NBYTES = 4 << 20


def flat_bytes(tensor: torch.Tensor) -> memoryview | None:
    """Return the memory of a contiguous CPU tensor, None if its bytes lie otherwise."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.numel():
        return memoryview(b"")
    # numpy arrays are buffers; their stubs say so from Python 3.12 on only.
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def packed_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements in row-major order: the memory itself if it lies so, else a copy."""
    view = flat_bytes(tensor)
    if view is None:
        view = flat_bytes(tensor.resolve_conj().resolve_neg().to("cpu").contiguous())
    assert view is not None
    return view


def packed_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the elements in row-major order, as views or as bounded copies."""
    view = flat_bytes(tensor)
    if view is not None:
        yield view
        return
    for part in parts_of(tensor):
        yield packed_bytes(part)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of at most CHUNK_NBYTES that make up a tensor in row-major order."""
    if not tensor.numel():
        return
    if tensor.nbytes <= CHUNK_NBYTES:
        yield tensor
        return
    rows = CHUNK_NBYTES // (tensor.nbytes // tensor.shape[0])
    if rows == 0:
        for row in tensor:
            yield from parts_of(row)
        return
    yield from torch.split(tensor, rows)
