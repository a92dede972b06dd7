"""What a call returns, where it may be a loss that does not average to one device's."""

from __future__ import annotations

from typing import Any

import torch

from vescale_parallel._model.user_line import user_line, warn_at_user_line
from vescale_parallel._torch_private import pytree

from .output import is_loss
from .token_mean import TokenMeans


class ReturnedLosses:
    """Warns of losses, once for each of the user's lines."""

    def __init__(self) -> None:
        self._checked_lines: set[tuple[str, int]] = set()

    def check(self, output: Any, means: TokenMeans, *, knows_rows: bool) -> None:
        """Warn if a loss may not average to one device's."""
        if not torch.is_grad_enabled() or (line := user_line()) in self._checked_lines:
            return
        self._checked_lines.add(line)
        loss = next((leaf for leaf in pytree.tree_leaves(output) if is_loss(leaf)), None)
        if loss is not None:
            if not knows_rows:
                means.warn_of_sums(loss)
            return
        warn_at_user_line(
            "the module returned no scalar loss. A loss computed from its outputs is this "
            "rank's; gradients are averaged over data-parallel ranks, which is one device's "
            "gradient only for a mean over equally many items on every rank. Return the loss "
            "from forward to have it exact.",
        )
