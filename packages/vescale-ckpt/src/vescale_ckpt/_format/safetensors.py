"""The header of a safetensors file: which tensors lie where."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from .dtypes import DTYPES
from .file_layout import MAX_HEADER_NBYTES, StoredTensor
from .strict_json import strict_json


def read_header(
    file: str, nbytes: int, read: Callable[[int, int], bytes]
) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, checked against the file's length.

    ``read`` returns bytes of it, given the first and how many.

    Raises:
        ValueError: If it is no whole safetensors file.
    """
    try:
        start = header_stop(read(0, 8))
        if start > min(nbytes, 8 + MAX_HEADER_NBYTES):
            raise ValueError(f"a header of {start - 8} bytes in a file of {nbytes}")
        header = strict_json(read(8, start - 8))
        header.pop("__metadata__", None)
        tensors = {
            name: _stored_tensor(file, name, entry, start, nbytes)
            for name, entry in header.items()
        }
    except (struct.error, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    _check_side_by_side(tensors, start, nbytes)
    return tensors


def header_stop(first: bytes) -> int:
    """Return where the header ends of a file that begins with these eight bytes."""
    (nbytes,) = struct.unpack("<Q", first)
    return 8 + nbytes


def _check_side_by_side(tensors: Mapping[str, StoredTensor], start: int, nbytes: int) -> None:
    """Refuse tensors that lie over one another, or leave holes; the format allows neither."""
    stop = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != stop:
            what = "lies over the one before" if tensor.offset < stop else "leaves a hole"
            raise ValueError(
                f"tensor {name!r} {what}: it begins at byte {tensor.offset}, expected {stop}"
            )
        stop += tensor.nbytes
    if stop != nbytes:
        raise ValueError(f"{nbytes - stop} bytes at the end belong to no tensor")


def _stored_tensor(
    file: str, name: str, entry: Mapping[str, Any], start: int, nbytes: int
) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has unknown dtype {entry['dtype']!r}")
    shape: tuple[Any, ...] = tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"tensor {name!r} has shape {shape} at {first} to {last}")
    tensor = StoredTensor(
        file=file, name=name, dtype=entry["dtype"], shape=shape, offset=start + first
    )
    if tensor.nbytes != last - first or start + last > nbytes:
        raise ValueError(f"tensor {name!r} of shape {shape} does not fit into {first} to {last}")
    return tensor
