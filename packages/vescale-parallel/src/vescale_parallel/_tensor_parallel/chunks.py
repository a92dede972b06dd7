"""The chunks of a dim that torch.chunk gives to ranks."""

from __future__ import annotations


def part_sizes(length: int, num_parts: int) -> list[int]:
    """Return the lengths of the chunks that ``torch.chunk`` makes, empty ones included."""
    step = -(-length // num_parts)
    return [max(0, min(step, length - rank * step)) for rank in range(num_parts)]
