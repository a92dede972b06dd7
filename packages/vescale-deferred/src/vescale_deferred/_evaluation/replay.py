"""What is in a storage after its recorded writes? All of it, by running them.

Only the writes run on which the result depends, in the order of their recording, each on arguments
with the geometry they had, and each random one with a generator put to its place. So every kernel
does what it would have done, to the bit, whatever else is or is not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_deferred._tape.deferred_tensor import DeferredTensor
from vescale_deferred._tape.op_schema import op_schema
from vescale_deferred._tape.tape import Snapshot, Tape, Write
from vescale_deferred._torch_private import plainly, tree_leaves, tree_map
from vescale_deferred.exceptions import DeferredError
from vescale_dtensor.random import Draws, PhiloxDraws, Point

# A sentence in the place of a storage says why its content is not known.
_Storages = dict[Tape, torch.UntypedStorage | str]


def replay(snapshots: Sequence[Snapshot]) -> list[Tensor]:
    """Return the tensors that ``snapshots`` stand for; those of one tape share a storage.

    The default generator is left as it is. Memory is that of the results and of the temporaries
    of one write at a time.
    """
    writes = needed_writes(snapshots)
    last_use = {tape: write.index for write in writes for tape in write.tapes()}
    kept = {snapshot.tape for snapshot in snapshots}
    storages: _Storages = {}
    state = torch.default_generator.get_state()
    try:
        with plainly():
            for write in writes:
                _run(write, storages)
                for tape in write.tapes():
                    if tape not in kept and last_use[tape] == write.index:
                        storages.pop(tape, None)
            return [
                snapshot.window.on(_storage(snapshot.tape, storages)) for snapshot in snapshots
            ]
    finally:
        torch.default_generator.set_state(state)


def values(tensor: DeferredTensor) -> Tensor:
    """Return the values of ``tensor``, in memory of their own."""
    return replay([tensor.deferral.snapshot()])[0]


def needed_writes(snapshots: Iterable[Snapshot]) -> list[Write]:
    """Return the writes that the content of ``snapshots`` depends on, in order.

    In order of recording, so that a write finds its arguments as they were: every write to them
    that came later, and is needed for something else, has not run yet.
    """
    writes: dict[int, Write] = {}
    expanded: dict[Tape, tuple[int, int]] = {}
    pending = list(snapshots)
    while pending:
        snapshot = pending.pop()
        tape, end = snapshot.tape, snapshot.version
        begin = tape.last_cover(end)
        # A later version with the same last cover only adds entries, so one range a tape is
        # enough to know what has been looked at; another range is looked at again, harmlessly.
        done = expanded.get(tape, (0, 0))
        if done[0] <= begin and end <= done[1]:
            continue
        expanded[tape] = (begin, end)
        for entry in tape.entries[begin:end]:
            write = entry.write
            if write.index not in writes:
                writes[write.index] = write
                pending.extend(write.reads())
    return [writes[index] for index in sorted(writes)]


def _storage(tape: Tape, storages: _Storages) -> torch.UntypedStorage:
    if tape not in storages:
        memory = torch.empty(tape.nbytes, dtype=torch.uint8, device=tape.device)
        storages[tape] = memory.untyped_storage()
    found = storages[tape]
    if isinstance(found, str):
        raise DeferredError(f"{tape.fqn or 'a tensor'!r} cannot be made: {found}")
    return found


def _run(write: Write, storages: _Storages) -> None:
    def real(leaf: Any) -> Any:
        if isinstance(leaf, Snapshot):
            return leaf.window.on(_storage(leaf.tape, storages))
        return leaf

    args, kwargs = tree_map(real, (write.args, write.kwargs))
    results = args if write.func is None else tree_leaves(run_op(write, args, kwargs))
    if not write.outputs:
        return
    for out, result in zip(write.outputs, results, strict=True):
        if out is not None:
            _keep(out, result, storages, is_constant=write.func is None)


def run_op(write: Write, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operator of ``write`` on real arguments, under the conditions of its recording."""
    assert write.func is not None
    default_dtype = torch.get_default_dtype()
    if write.default_dtype is not default_dtype:
        torch.set_default_dtype(write.default_dtype)
    try:
        if write.point is None:
            return write.func(*args, **kwargs)
        if isinstance(write.draws, PhiloxDraws):
            return _draw_on_cuda(write, write.draws, args)
        assert isinstance(write.point, Point)
        return _draw(write, write.point, args, kwargs)
    finally:
        if write.default_dtype is not default_dtype:
            torch.set_default_dtype(default_dtype)


def _draw(write: Write, point: Point, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert write.func is not None
    generator = torch.default_generator
    if op_schema(write.func).has_generator:
        generator = torch.Generator()
        kwargs = {**kwargs, "generator": generator}
    generator.set_state(point.state())
    result = write.func(*args, **kwargs)
    if isinstance(write.draws, Draws):
        point.stream.arrived(point.num_draws + write.draws.num_draws, generator.get_state())
    return result


def _draw_on_cuda(write: Write, draws: PhiloxDraws, args: tuple[Any, ...]) -> Tensor:
    if write.mutated:
        out: Tensor = args[0]
    else:
        (snapshot,) = filter(None, write.outputs)
        window, device = snapshot.window, snapshot.tape.device
        out = torch.empty_strided(window.shape, window.stride, dtype=window.dtype, device=device)
    draws.draw_whole(out)
    return out


def _keep(out: Snapshot, result: Tensor, storages: _Storages, *, is_constant: bool) -> None:
    """Make ``result`` the content of a tape that begins with it.

    Some meta kernels tell another shape than the kernel of the device returns, most of all for
    results that nobody uses, such as the saved statistics of batch norm in evaluation.
    """
    if tuple(result.shape) != out.window.shape or result.dtype != out.window.dtype:
        storages[out.tape] = (
            f"expected an operator to return shape {out.window.shape} and {out.window.dtype} as "
            f"on the meta device, got {tuple(result.shape)} and {result.dtype}; construct it "
            "outside of deferred_init"
        )
        return
    storage = result.untyped_storage()
    is_same = (
        storage.nbytes() == out.tape.nbytes
        and tuple(result.stride()) == out.window.stride
        and result.storage_offset() == out.window.offset
        and result.device == out.tape.device
    )
    if is_same and not is_constant:
        storages[out.tape] = storage
    else:
        out.window.on(_storage(out.tape, storages)).copy_(result)
