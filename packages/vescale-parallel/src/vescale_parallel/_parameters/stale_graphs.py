"""Backward through a forward of before parameters changed raises, as on one device.

[Note: stale graphs] Autograd keeps the plain parameters that computed, and refuses them once
torch counts a write. What a step of the optimizer, or anybody, writes is the public parameter; the
plain one gets it uncounted, when it is gathered again. So writes to the public ones are counted
for the plain ones, too: otherwise a graph of before would be differentiated with other values than
those that computed it. An optimizer says which it has written; other writes are seen by the
versions of public parameters, before the next forward or backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from vescale_parallel._torch_private import version_of

from .sharded_parameter import ShardedParameter


class StaleGraphs:
    """Counts writes to public parameters for the plain ones; see [Note: stale graphs]."""

    def __init__(self, params: Sequence[ShardedParameter]) -> None:
        self._plain: dict[object, nn.Parameter] = {
            param.sharded: param.unsharded for param in params if param.unsharded is not None
        }
        self._publics = [p.sharded for p in params if p.sharded in self._plain]
        self._versions = self._versions_now()

    def tell_changed(self, publics: Iterable[object]) -> None:
        """Count a write to each of some public parameters."""
        written = [self._plain[public] for public in publics if public in self._plain]
        increment_version([plain for plain in written if not plain.is_inference()])
        self._versions = self._versions_now()

    def look(self) -> None:
        """Count the writes since the last look that nobody told of."""
        if torch.compiler.is_compiling():
            return
        versions = self._versions_now()
        if versions != self._versions:
            pairs = zip(self._publics, versions, self._versions, strict=True)
            self.tell_changed([public for public, now, before in pairs if now != before])

    def _versions_now(self) -> list[int]:
        return [*map(version_of, self._publics)]
