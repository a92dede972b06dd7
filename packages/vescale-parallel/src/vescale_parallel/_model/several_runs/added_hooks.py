"""Hooks that forward adds to modules, where it runs more often than on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

_KINDS = ("_forward_hooks", "_forward_pre_hooks")
Hooks = Sequence[tuple[str, int, Any]]  # their kind, their number, and they themselves


class HooksBefore:
    """The hooks of modules as they are before a run of forward.

    Args:
        modules: The attributes of modules, by their names.
    """

    def __init__(self, modules: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self._modules = modules
        # torch numbers hooks as they are added, whatever they are added to.
        self._first_new = RemovableHandle.next_id

    def added(self) -> dict[str, Hooks]:
        """Return what was added since, by the modules' names."""
        if RemovableHandle.next_id == self._first_new:
            return {}
        found = {fqn: self._added_to(attributes) for fqn, attributes in self._modules}
        return {fqn: hooks for fqn, hooks in found.items() if hooks}

    def take_away(self) -> None:
        """Remove what was added since."""
        modules = dict(self._modules)
        for fqn, hooks in self.added().items():
            for kind, number, _ in hooks:
                del modules[fqn][kind][number]

    def add(self, hooks: Mapping[str, Hooks]) -> None:
        """Add what was taken away, under the numbers that it had."""
        modules = dict(self._modules)
        for fqn, held in hooks.items():
            for kind, number, hook in held:
                modules[fqn][kind][number] = hook

    def _added_to(self, attributes: Mapping[str, Any]) -> list[tuple[str, int, Any]]:
        return [
            (kind, number, hook)
            for kind in _KINDS
            for number, hook in attributes.get(kind, {}).items()
            if number >= self._first_new and not _is_own(hook)
        ]


def _is_own(hook: Any) -> bool:
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return where.startswith("vescale")
