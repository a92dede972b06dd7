"""Find buffers that rows of a batch add to, as counts of the tokens that each expert got.

[Note: buffers that rows add to] What a call adds to such a buffer is the sum of what parts of its
rows add, and nothing in the call depends on it. So where the code that writes it cannot run on
distributed tensors of all rows, in blocks on slices of sequences and in micro-batches, it runs on
this rank's rows, and ranks exchange what they added when the call ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.parts import NUM_PARTS, equal, same_value
from vescale_parallel._cross_replica.runs import Call, Run, run_module
from vescale_parallel._model.random_copies import sharing_copy


def added_buffers(
    model: nn.Module,
    call: Call,
    whole: Run,
    parts: Sequence[Run],
    written: Mapping[str, Tensor],
) -> frozenset[str]:
    """Return the buffers to which rows add, given runs of all rows and of each part.

    A run that begins with other values tells a sum on top of what was there from one in its place,
    and whether anything that the model returns or keeps depends on them.
    """
    begin = dict(model.named_buffers())
    added = _added(whole, begin)
    parts_added = [_added(run, begin) for run in parts]
    found = {
        name: of_all
        for name, of_all in added.items()
        if all(name in of_part for of_part in parts_added)
        and bool(of_all.any())
        and equal(torch.stack([of_part[name] for of_part in parts_added]).sum(0), of_all)
    }
    if not found:
        return frozenset()
    other = sharing_copy(model)
    for name, buffer in other.named_buffers():
        if name in found:
            buffer.copy_(whole.buffers[name] + 1)
    begin = {name: buffer.clone() for name, buffer in other.named_buffers()}
    again = run_module(other, "", call, [], NUM_PARTS, written=written)
    if again.error is not None or not _is_alike(again, whole, {*found}):
        return frozenset()
    added = _added(again, begin)
    return frozenset(name for name, x in found.items() if name in added and equal(added[name], x))


def _added(run: Run, begin: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: after - begin[name]
        for name, after in run.buffers.items()
        if name in begin
        and after.dtype == begin[name].dtype != torch.bool
        and after.shape == begin[name].shape
    }


def _is_alike(again: Run, whole: Run, but: set[str]) -> bool:
    """Whether a run returned and kept the same, apart from some buffers."""
    found, expected = again.call.unfolded_outputs, whole.call.unfolded_outputs
    outputs = zip(found, expected, strict=False)
    return (
        len(found) == len(expected)
        and all(_is_same(x, y) for x, y in outputs)
        and all(
            equal(again.buffers[name], x) for name, x in whole.buffers.items() if name not in but
        )
        and again.kept.keys() == whole.kept.keys()
        and all(equal(again.kept[at], x) for at, x in whole.kept.items())
    )


def _is_same(x: object, y: object) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return equal(x, y)
    return same_value(x, y)
