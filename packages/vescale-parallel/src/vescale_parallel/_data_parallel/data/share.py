"""Which rows of every global batch a rank gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Share:
    """One data-parallel rank's part of global batches.

    Attributes:
        part: Which part, from 0.
        num_parts: Data-parallel ranks.
        num_microbatches: What a rank's part is cut into while it trains.
        is_pipelined: Whether a pipeline runs it, whose micro-batches need not be equal.
    """

    part: int
    num_parts: int
    num_microbatches: int = 1
    is_pipelined: bool = False

    def rows(self, num_rows: int) -> slice:
        """Return this rank's rows of a global batch: as many as others have, or one more."""
        start = self.part * num_rows // self.num_parts
        return slice(start, (self.part + 1) * num_rows // self.num_parts)

    def is_even(self, num_rows: int) -> bool:
        """Whether all ranks get as many rows of a global batch."""
        return num_rows % self.num_parts == 0

    def check_size(self, size: int) -> None:
        """Raise if full global batches do not divide.

        Raises:
            ValueError: With the nearest sizes that do.
        """
        shards = self.num_parts * self.num_microbatches
        if size % shards:
            raise ValueError(
                f"expected a global batch of a multiple of {self.num_parts} data-parallel ranks x "
                f"{self.num_microbatches} micro-batches, got {size} rows; the nearest sizes are "
                f"{size // shards * shards or shards} and {(size // shards + 1) * shards}"
            )

    def check_rows(self, num_rows: int, *, trains: bool) -> None:
        """Raise, on all ranks alike, if ranks cannot run a short global batch.

        Raises:
            ValueError: With both numbers and what to do.
        """
        if num_rows < self.num_parts:
            raise ValueError(
                f"a global batch has {num_rows} rows, fewer than the {self.num_parts} "
                f"data-parallel ranks, so some would have none; {_ADVICE}"
            )
        if (trains or self.is_pipelined) and not self.is_even(num_rows):
            raise ValueError(
                f"a global batch has {num_rows} rows, which do not divide over the "
                f"{self.num_parts} data-parallel ranks: their gradients would not be averaged as "
                f"on one device; {_ADVICE}"
            )
        cuts = self.num_microbatches if trains else 1
        if self.is_pipelined and num_rows < self.num_parts * cuts:
            raise ValueError(
                f"a global batch has {num_rows} rows, fewer than {self.num_parts} data-parallel "
                f"ranks x {cuts} micro-batches; {_ADVICE}"
            )
        if not self.is_pipelined and cuts > 1 and num_rows % (self.num_parts * cuts):
            raise ValueError(
                f"a global batch has {num_rows} rows, which do not divide into {self.num_parts} "
                f"data-parallel ranks x {cuts} micro-batches; {_ADVICE}"
            )


_ADVICE = (
    "leave such a batch out (drop_last=True), or choose a batch size or a number of samples "
    "that leaves no such rest"
)
