"""Where in a pass of a stage buffers are used and changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_parallel._model.shape_questions import SHAPE_QUESTIONS
from vescale_parallel._torch_private import pytree, unseen_functions, version_of


@dataclass(frozen=True)
class Use:
    """Where a pass of a stage uses a buffer, in numbers of blocks that were called before.

    Attributes:
        first: Its first use.
        last: Its last one.
        changed: Its last change, -1 if there is none.
        changed_by_own: Its first change by a module of the stage; None if code that all stages
            run, between these modules, makes all of them.
    """

    first: int
    last: int
    changed: int = -1
    changed_by_own: int | None = None

    def also(self, other: Use) -> Use:
        """Return the uses of two passes of a stage."""
        own = [x for x in (self.changed_by_own, other.changed_by_own) if x is not None]
        return Use(
            min(self.first, other.first),
            max(self.last, other.last),
            max(self.changed, other.changed),
            min(own, default=None),
        )


class SeenUses(TorchFunctionMode):
    """Sees which buffers functions are given in one pass of a stage.

    Every function costs a look at every buffer, so it is entered in the first call of a form.

    Args:
        position: Returns how many blocks have been called.

    Attributes:
        uses: By the names of buffers.
    """

    def __init__(self, position: Callable[[], int]) -> None:
        super().__init__()
        self._position, self._own_running = position, 0
        self._held: dict[str, tuple[nn.Module, str, Tensor, int]] = {}
        self._names: dict[int, list[str]] = {}
        self._tensors: list[Tensor] = []  # so that ids stay theirs
        self.uses: dict[str, Use] = {}

    def begin(self, hung: Mapping[str, tuple[nn.Module, str, Tensor]]) -> None:
        """Take the modules and names of buffers, and the tensors that now hang there."""
        for fqn, (module, name, tensor) in hung.items():
            self._hold(fqn, module, name, tensor)

    def _hold(self, fqn: str, module: nn.Module, name: str, tensor: Tensor) -> None:
        self._held[fqn] = (module, name, tensor, version_of(tensor))
        self._tensors.append(tensor)
        self._names.setdefault(id(tensor), []).append(fqn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if func not in SHAPE_QUESTIONS:
            leaves = pytree.tree_leaves((args, given))
            for fqn in {fqn for leaf in leaves for fqn in self._names.get(id(leaf), ())}:
                self._used(fqn)
            self.look()
        return result

    @contextlib.contextmanager
    def own_module(self) -> Iterator[None]:
        """Run a module of the stage, and note what is changed as changed by it."""
        self.look()
        self._own_running += 1
        try:
            yield
            self.look()
        finally:
            self._own_running -= 1

    def look(self) -> None:
        """Note what has been changed since the last look."""
        with unseen_functions():
            for fqn, (module, name, tensor, version) in [*self._held.items()]:
                present = module._buffers.get(name)
                if present is tensor and version_of(tensor) == version:
                    continue
                self._changed(fqn)
                if present is tensor:
                    self._held[fqn] = (module, name, tensor, version_of(tensor))
                elif present is not None:
                    self._hold(fqn, module, name, present)
                else:
                    del self._held[fqn]

    def _changed(self, fqn: str) -> None:
        self._used(fqn)
        use, now = self.uses[fqn], self._position()
        own = use.changed_by_own
        if own is None and self._own_running:
            own = now
        self.uses[fqn] = replace(use, changed=now, changed_by_own=own)

    def changed_unseen(self, fqn: str) -> None:
        """Note that a buffer was changed where that cannot be seen, as batch norms do."""
        use = self.uses.get(fqn) or Use(self._position(), self._position())
        if use.changed < 0:
            self.uses[fqn] = replace(use, changed=use.last, changed_by_own=use.first)

    def _used(self, fqn: str) -> None:
        now = self._position()
        use = self.uses.get(fqn)
        self.uses[fqn] = Use(now, now) if use is None else replace(use, last=now)
