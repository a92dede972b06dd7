"""What a call returns, where it may be a loss that does not average to one device's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.user_line import user_line, warn_at_user_line
from vescale_parallel._torch_private import pytree

from .output import is_loss
from .token_mean import TokenMeans

_OUTSIDE = (
    "A loss computed from its outputs is this rank's; gradients are averaged over data-parallel "
    "ranks, which is one device's gradient only for a mean over equally many items on every "
    "rank. Return the loss from forward to have it exact."
)


class ReturnedLosses:
    """Warns of losses, once for each of the user's lines."""

    def __init__(self) -> None:
        self._checked_lines: set[tuple[str, int]] = set()
        self._has_warned = False

    def checked(self, output: Any, means: TokenMeans, *, knows_rows: bool) -> Any:
        """Return a module's output; warn if a loss may not average to one device's."""
        if not torch.is_grad_enabled():
            return output
        loss = next((leaf for leaf in pytree.tree_leaves(output) if is_loss(leaf)), None)
        if loss is None:
            self.warn_of_none()
            return output
        if not self._is_new_line():
            return output
        if not knows_rows:
            means.warn_of_sums(loss)
        # The scalar may be another one: a penalty, beside logits of which a loss is made.
        return pytree.tree_map_only(Tensor, self._watched, output)

    def warn_of_none(self) -> None:
        """Warn that the module returned no loss, once for each line that calls it."""
        if self._is_new_line():
            warn_at_user_line(f"the module returned no scalar loss. {_OUTSIDE}")

    def _is_new_line(self) -> bool:
        line = user_line()
        is_new = line not in self._checked_lines
        self._checked_lines.add(line)
        return is_new

    def _watched(self, leaf: Tensor) -> Tensor:
        """Return a tensor that warns if backward comes to it from outside of the module."""
        if is_loss(leaf) or not leaf.requires_grad:
            return leaf
        # The one that forward made may also be differentiated within the module.
        outside = leaf.view_as(leaf)
        outside.register_hook(self._warn)
        return outside

    def _warn(self, _: Tensor) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_at_user_line(
                "backward began outside of the module, at a tensor that it returned beside a "
                f"scalar. {_OUTSIDE}"
            )
