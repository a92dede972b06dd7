"""Means over ranks that have other numbers of rows of a batch are not one device's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vescale_parallel._mesh.data_ranks import DataRanks


class EqualRows:
    """Averages losses over ranks, and compares what they are means of in the same message.

    A mean over counted targets is of those of all ranks, see :mod:`.token_mean`. Of any
    other scalar it is taken that it is a mean over rows, of which every rank has as many.

    Args:
        ranks: Those that share a batch.
        is_delayed: Whether to look at the comparison in the next call, without waiting for a GPU.
    """

    def __init__(self, ranks: DataRanks, *, is_delayed: bool) -> None:
        self._ranks, self._is_delayed = ranks, is_delayed
        self._told: list[tuple[int, Tensor]] = []

    def mean_of(self, num_rows: int) -> Callable[[Tensor], Tensor]:
        """Return what averages a scalar of a batch of so many rows on this rank."""

        def mean(loss: Tensor) -> Tensor:
            value, are_equal = self._ranks.mean_beside(loss, num_rows)
            self._told.append((num_rows, are_equal))
            if not self._is_delayed:
                self.look()
            return value

        return mean

    def look(self) -> None:
        """Look at what was compared since the last look.

        Raises:
            ValueError: If ranks had other numbers of rows.
        """
        told, self._told = self._told, []
        for num_rows, are_equal in told:
            if not bool(are_equal):
                raise ValueError(
                    "expected as many rows of a batch on every data-parallel rank for a scalar "
                    "that is no mean over targets: its mean over ranks would not be one device's. "
                    f"This rank has {num_rows}, others have more or fewer. Leave out the rows "
                    "that do not divide (drop_last=True), return what F.cross_entropy or "
                    "F.nll_loss returns, or return tensors with rows and reduce them yourself"
                )
