"""Buffers that forward changes, where forward runs more often than on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vescale_parallel._torch_private import unseen_functions, version_of


@dataclass(frozen=True)
class Change:
    """What a run of forward left in a buffer.

    Attributes:
        value: The tensor.
        is_new: Whether forward hung another tensor in the place of the one before.
        has_form: Whether it has the dtype and shape of the one before.
    """

    value: Tensor
    is_new: bool
    has_form: bool = True


@dataclass(frozen=True)
class _Held:
    """A buffer as it was: where it hangs, the tensor, its version and, if needed, a copy."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    def put(self, tensor: Tensor) -> None:
        self.module._buffers[self.name] = tensor


def _is_changed(tensor: Tensor, version: int, before: Tensor | None) -> bool:
    if version_of(tensor) != version:
        return True
    # Batch norms write to their running statistics without a new version.
    return before is not None and not torch.equal(tensor, before)


def _copied(tensor: Tensor) -> Tensor:
    # Writes to tensors of inference mode leave no version.
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


class Buffers:
    """The buffers below a module, and which of them its forward changes.

    A first run copies all of them, the ones after it those that the first one changed: most
    modules pay for nothing but a comparison of versions.
    """

    def __init__(self, module: nn.Module, fqn: str) -> None:
        start = f"{fqn}." if fqn else ""
        self._modules = [
            (f"{start}{name}." if name else start, m) for name, m in module.named_modules()
        ]
        self._known: dict[object, Set[str]] = {}

    def form(self) -> object:
        """Return what tells runs apart that may change other buffers."""
        return tuple(m.training for _, m in self._modules if m._buffers)

    def is_known(self, form: object) -> bool:
        """Whether it is known which buffers a run of this form changes."""
        return form in self._known

    def known(self, form: object) -> Set[str]:
        """Return the buffers that runs of this form change."""
        return self._known[form]

    def learn(self, form: object, changed: Set[str]) -> None:
        """Note which buffers runs of this form change."""
        self._known[form] = changed

    def now(self, form: object) -> BuffersBefore:
        """Note the buffers as they are before a run."""
        known = self._known.get(form)
        held: dict[str, _Held] = {}
        for start, module in self._modules:
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    fqn = start + name
                    copy = _copied(tensor) if known is None or fqn in known else None
                    held[fqn] = _Held(module, name, tensor, version_of(tensor), copy)
        return BuffersBefore(held)

    def is_persistent(self, fqn: str) -> bool:
        """Whether a buffer is part of the state_dict."""
        start, _, name = fqn.rpartition(".")
        prefix = f"{start}." if start else ""
        owners = [module for each, module in self._modules if each == prefix]
        return not any(name in module._non_persistent_buffers_set for module in owners)


class BuffersBefore:
    """Buffers as they were before a run of forward."""

    def __init__(self, held: dict[str, _Held]) -> None:
        self._held = held

    def changed(self, *, by_value: bool) -> set[str]:
        """Return the names of the buffers that are not what they were.

        Args:
            by_value: Whether to compare those that were copied, which waits for the device.
        """
        return {
            fqn
            for fqn, held in self._held.items()
            if held.module._buffers.get(held.name) is not held.tensor
            or _is_changed(held.tensor, held.version, held.copy if by_value else None)
        }

    def keep_copies_of(self, names: Set[str]) -> None:
        """Forget the buffers that are not named, and their copies.

        Raises:
            ValueError: If one was changed of which there is no copy.
        """
        self._held = {fqn: held for fqn, held in self._held.items() if fqn in names}
        for fqn, held in self._held.items():
            if held.copy is None:
                raise ValueError(
                    f"the buffer {fqn!r} was changed by forward, and was not by the first call "
                    "of this kind. With recompute or pipeline_parallel.size > 1 forward "
                    "runs several times a step, each time from the same buffers; change the "
                    "buffer in the first call as well, or outside of forward"
                )

    def copied(self, fqn: str) -> Tensor:
        """Return a buffer as it was; of one that is known not to change, as it is."""
        held = self._held[fqn]
        return held.tensor if held.copy is None else held.copy

    @contextlib.contextmanager
    def back(self, changes: dict[str, list[Change]] | None = None) -> Iterator[None]:
        """Have forward find the buffers as they were, without a change to the present ones.

        Other tensors hang on the modules meanwhile, since autograd may need the present ones.

        Args:
            changes: Gets what forward changes.
        """
        own: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        with unseen_functions():
            self._hang_copies(own)
        try:
            yield
        finally:
            with unseen_functions():
                self._take_copies(own, changes)

    def _hang_copies(self, own: dict[str, tuple[Tensor, int, Tensor | None]]) -> None:
        copies: dict[int, Tensor] = {}  # shared buffers stay shared
        for fqn, held in self._held.items():
            if held.copy is not None:
                if id(held.tensor) not in copies:
                    copies[id(held.tensor)] = _copied(held.copy)
                copy = copies[id(held.tensor)]
                own[fqn] = (copy, version_of(copy), held.module._buffers.get(held.name))
                held.put(copy)

    def _take_copies(
        self,
        own: Mapping[str, tuple[Tensor, int, Tensor | None]],
        changes: dict[str, list[Change]] | None,
    ) -> None:
        for fqn, (copy, version, present) in own.items():
            held = self._held[fqn]
            found = held.module._buffers.get(held.name)
            is_new = found is not copy
            if (
                changes is not None
                and found is not None
                and (is_new or _is_changed(copy, version, held.copy))
            ):
                has_form = found.dtype == copy.dtype and found.shape == copy.shape
                changes.setdefault(fqn, []).append(Change(found, is_new, has_form))
            held.module._buffers[held.name] = present

    def hung(self) -> dict[str, tuple[nn.Module, str, Tensor]]:
        """Return the modules and names of buffers, and what hangs there now."""
        found = ((fqn, each.module, each.name) for fqn, each in self._held.items())
        held = ((fqn, module, name, module._buffers.get(name)) for fqn, module, name in found)
        return {fqn: (module, name, x) for fqn, module, name, x in held if x is not None}

    def set(self, fqn: str, change: Change) -> None:
        """Make a change that was found by :meth:`back` take effect."""
        held = self._held[fqn]
        if change.is_new:
            held.put(change.value)
        else:
            self.fill(fqn, change.value)

    def value(self, fqn: str) -> Tensor:
        """Return a buffer as it is now."""
        held = self._held[fqn]
        tensor = held.module._buffers[held.name]
        assert tensor is not None
        return tensor.detach()

    def fill(self, fqn: str, value: Tensor) -> None:
        """Write to a buffer."""
        with torch.no_grad():
            self.value(fqn).copy_(value)
