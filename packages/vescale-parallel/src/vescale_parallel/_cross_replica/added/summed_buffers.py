"""Sum over ranks what rows added to buffers; see [Note: buffers that rows add to]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.borders import RowCoupling
from vescale_parallel._mesh.data_ranks import DataRanks


class SummedBuffers:
    """The buffers of a model on one rank that rows of the batch add to.

    Args:
        ranks: Those that share a batch.
        is_whole: Tells whether a module that is called with something runs on rows of all ranks.
    """

    def __init__(self, ranks: DataRanks, is_whole: Callable[[Any], bool]) -> None:
        self._ranks, self._is_whole = ranks, is_whole
        self._found: dict[tuple[frozenset[str], bool], tuple[str, ...]] = {}
        self._watched = set[str]()
        self._of_all_rows = set[str]()
        self._names: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Return the buffers that the call that runs sums up."""
        return self._names

    @contextmanager
    def of_call(self, model: nn.Module, coupling: RowCoupling) -> Iterator[None]:
        """Sum up what is added within this. Every rank that shares the batch must call it."""
        if not coupling.added:
            yield
            return
        key = coupling.added, coupling.of_patterns
        if key not in self._found:
            names = [name for name, _ in model.named_buffers() if coupling.is_added(name)]
            self._found[key] = tuple(sorted(names))
        self._names = self._found[key]
        self._watch(model)
        self._of_all_rows = {n for n in map(_owner, self._names) if coupling.is_region(n)}
        before = _values(model, self._names)
        try:
            yield
            self._add_up(model, before)
        finally:
            self._names = ()

    def _watch(self, model: nn.Module) -> None:
        """See which modules that have the buffers are called with rows of all ranks."""
        for owner in sorted({_owner(name) for name in self._names} - self._watched):
            self._watched.add(owner)

            def look(_: nn.Module, args: Any, kwargs: Any, owner: str = owner) -> None:
                if self._is_whole((args, kwargs)):
                    self._of_all_rows.add(owner)

            model.get_submodule(owner).register_forward_pre_hook(look, with_kwargs=True)

    def _add_up(self, model: nn.Module, before: Mapping[str, Tensor]) -> None:
        if self._ranks.num_parts == 1:
            return
        # Ranks that share sequences added the same.
        is_first = self._ranks.rank % (self._ranks.size // self._ranks.num_parts) == 0
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, x in before.items():
            if _owner(name) not in self._of_all_rows:
                by_dtype.setdefault(x.dtype, []).append(name)
        for names in by_dtype.values():
            after = _values(model, names)
            added = torch.cat([(after[name] - before[name]).flatten() for name in names])
            total = self._ranks.total(added if is_first else torch.zeros_like(added))
            parts = total.split([before[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                buffer = model.get_buffer(name)
                # Not counted as a write: what backward kept of it is what one device has there.
                buffer.data.copy_(before[name] + part.view(buffer.shape))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _values(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    return {name: model.get_buffer(name).detach().clone() for name in names}
