"""Find out in what two checkpoints differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from vescale_ckpt._format.dtypes import DTYPES
from vescale_ckpt._format.file_layout import StoredTensor
from vescale_ckpt._format.state_tree import is_reference, leaves_of
from vescale_ckpt._interop.streaming_copy import Source
from vescale_ckpt._io.sequential_writer import Progress, no_progress

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differences(a: Source, b: Source, progress: Progress = no_progress) -> Iterator[str]:
    """Yield a line for each key that is not the same in both, bit for bit."""
    values_a, values_b = _values(a), _values(b)
    for key in sorted(values_a.keys() | values_b.keys()):
        if values_a.get(key) != values_b.get(key):
            yield f"{key}: {values_a.get(key, 'nothing')} | {values_b.get(key, 'nothing')}"
    tensors_a, tensors_b = _tensors(a), _tensors(b)
    total = sum(tensor.nbytes for key, tensor in tensors_a.items() if key in tensors_b)
    done = 0
    for key in sorted(tensors_a.keys() | tensors_b.keys()):
        here, there = _kind(tensors_a.get(key)), _kind(tensors_b.get(key))
        if here != there:
            yield f"{key}: {here} | {there}"
            continue
        found = compared(a.content(key), b.content(key), DTYPES[tensors_a[key].dtype])
        if found.numel:
            yield f"{key}: {here}, {found.numel} elements differ{found.by}"
        done += tensors_a[key].nbytes
        progress(done, total)


@dataclass(slots=True)
class Difference:
    """In what two tensors of one dtype and shape differ.

    Attributes:
        numel: In how many elements.
        largest: The largest difference of two numbers.
    """

    numel: int = 0
    largest: float = 0.0

    @property
    def by(self) -> str:
        """What to say about the largest difference."""
        return f" by up to {self.largest:.3g}" if self.largest else ""


def compared(a: Iterable[memoryview], b: Iterable[memoryview], dtype: torch.dtype) -> Difference:
    """Compare the bytes of two tensors, whatever the pieces in which they come."""
    found = Difference()
    for one, other in _aligned(iter(a), iter(b)):
        if one == other:
            continue
        x = torch.frombuffer(bytearray(one), dtype=dtype)
        y = torch.frombuffer(bytearray(other), dtype=dtype)
        differs = _bits(x) != _bits(y)
        found.numel += int(differs.sum())
        if dtype.is_floating_point or not (dtype.is_complex or dtype == torch.bool):
            gaps = (x[differs].double() - y[differs].double()).abs().nan_to_num(nan=0.0)
            found.largest = max(found.largest, float(gaps.max()))
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(torch.int32).view(torch.int64)[..., 0]
    return tensor.view(_INTEGERS[tensor.itemsize])


def _aligned(
    a: Iterator[memoryview], b: Iterator[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    one, other = memoryview(b""), memoryview(b"")
    while True:
        one, other = one or next(a, one), other or next(b, other)
        length = min(len(one), len(other))
        if not length:
            return
        yield one[:length], other[:length]
        one, other = one[length:], other[length:]


def _values(source: Source) -> dict[str, str]:
    return {
        path: json.dumps(node)
        for key, root in source.tree.items()
        for path, node in leaves_of(root, key)
        if not is_reference(node)
    }


def _tensors(source: Source) -> dict[str, StoredTensor]:
    own = dict(source.tensors)
    return own | {alias: own[key] for alias, key in source.aliases.items()}


def _kind(tensor: StoredTensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
