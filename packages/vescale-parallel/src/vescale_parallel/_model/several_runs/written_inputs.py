"""What forward writes to what it is given, where it runs more often than on one device.

[Note: inputs of several runs] A forward may write to its inputs: ``x.mul_(2)``, or labels whose
padding it fills (FSMT). Micro-batches share the memory of their batch, and forward runs for every
stage, and once more to count targets, so each run begins with them as they were before. Runs that
are differentiated are given copies, which their graphs keep; after one that counts targets, which
has no graph, they are put back. Runs of the first call of a form copy all tensors, later ones
those that were seen to be written to. What the latest run left is in the program's tensors behind
the call, as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree, unseen_functions

_Given = tuple[tuple[Any, ...], dict[str, Any]]


class WrittenInputs:
    """What calls of each form of a model were seen to write to."""

    def __init__(self) -> None:
        self._known: dict[Hashable, set[int]] = {}

    def of_call(self, form: Hashable) -> InputsOfCall:
        """Begin a call; ``form`` is what else than its arguments may decide what is written to."""
        return InputsOfCall(self._known, form)


class InputsOfCall:
    """The inputs of the runs of one call, by their places among the leaves of arguments."""

    def __init__(self, known: dict[Hashable, set[int]], form: Hashable) -> None:
        self._known, self._form = known, form
        self._seen: dict[Hashable, set[int]] = {}
        self._left: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._missed = False

    @contextlib.contextmanager
    def run(self, given: _Given, *, counts: bool) -> Iterator[_Given]:
        """Run forward within this, on what it yields; ``counts`` says that it has no graph."""
        leaves, spec = pytree.tree_flatten(given)
        form = self._form, spec
        known = self._known.get(form)
        # Modes that see what forward computes are not to see this.
        with unseen_functions():
            writable = [index for index, leaf in enumerate(leaves) if _is_writable(leaf)]
            may_write = writable if known is None else known.intersection(writable)
            copies = _copies(leaves, may_write)
            used: list[Any] = (
                leaves if counts else [copies.get(i, x) for i, x in enumerate(leaves)]
            )
            versions = {index: used[index]._version for index in writable}
        try:
            yield given if counts or not copies else pytree.tree_unflatten(used, spec)
        finally:
            with unseen_functions():
                # What a block is to write to is a placeholder where blocks do not run.
                plain = (index for index in writable if type(used[index]) is Tensor)
                written = {index for index in plain if used[index]._version != versions[index]}
                self._seen.setdefault(form, set()).update(written)
                self._missed |= not written <= copies.keys()
                for index in written & copies.keys():
                    if counts:
                        _put(leaves[index], copies[index])
                    else:
                        self._left[_memory(leaves[index])] = leaves[index], copies[index]

    def end(self) -> None:
        """Have the program's tensors hold what the runs left.

        Raises:
            ValueError: If a run wrote to what none of an earlier call of its form did.
        """
        for form, written in self._seen.items():
            self._known.setdefault(form, set()).update(written)
        for tensor, left in self._left.values():
            _put(tensor, left)
        if self._missed:
            raise ValueError(
                "forward wrote to a tensor that it was given, and did not in its first call. With "
                "batch.gradient_accumulation or pipeline_parallel.size > 1 it runs several times "
                "a step, each time from the same inputs; write to it in the first call as well, "
                "or to a copy"
            )


def _is_writable(leaf: object) -> bool:
    """Whether a leaf is a plain tensor that code without gradients for it may write to."""
    if type(leaf) is not Tensor or leaf.layout is not torch.strided:
        return False
    if leaf.is_inference() or leaf.requires_grad:
        return False
    # torch refuses writes to what is expanded.
    return all(stride or size < 2 for size, stride in zip(leaf.shape, leaf.stride(), strict=True))


def _copies(leaves: Sequence[Any], places: Collection[int]) -> dict[int, Tensor]:
    """Return copies with the strides of their originals; of what is given twice, one."""
    made: dict[Hashable, Tensor] = {}
    for index in places:
        if (memory := _memory(leaves[index])) not in made:
            made[memory] = _copy(leaves[index])
    return {index: made[_memory(leaves[index])] for index in places}


def _copy(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return empty.copy_(tensor)


def _put(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values)


def _memory(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
