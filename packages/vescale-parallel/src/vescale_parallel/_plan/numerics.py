"""Sums whose bits do not depend on the number of tensor-parallel ranks, as a plan says it."""

from __future__ import annotations

from collections.abc import Mapping

from .config import DataParallel, TensorParallel

_DEFAULT_CHUNKS = 8


def check_numerics(
    numerics: str,
    chunks: int,
    tensor: TensorParallel,
    data: DataParallel,
    *,
    alone: Mapping[str, int],
    compiled: str,
) -> None:
    """Raise if chunks are none, or the plan has what is not computed in chunks.

    ``alone`` are sizes that must be 1 beside them.

    Raises:
        ValueError: With the field and what it may be.
    """
    if type(chunks) is not int or chunks < 2 or chunks & (chunks - 1):
        raise ValueError(f"expected numerics_chunks to be a power of two from 2, got {chunks!r}")
    if numerics != "invariant":
        if chunks != _DEFAULT_CHUNKS:
            raise ValueError(
                f"numerics_chunks is of numerics 'invariant': expected it to be left out with "
                f"{numerics!r}, got {chunks}"
            )
        return
    if chunks % tensor.size:
        raise ValueError(
            f"expected tensor_parallel.size to divide numerics_chunks ({chunks}) with numerics "
            f"'invariant', got {tensor.size}"
        )
    for name, size in alone.items():
        if size > 1:
            raise ValueError(
                f"numerics 'invariant' is not available with {name} {size} in this version, under "
                "which sums are cut otherwise; use 1, or leave numerics out of the plan"
            )
    if compiled != "none":
        raise ValueError(
            f"numerics 'invariant' fixes the order of sums, which a compiler chooses: expected "
            f"compile 'none', got {compiled!r}"
        )
    if tensor.sharding_policy == "manual":
        raise ValueError(
            "numerics 'invariant' cuts sums as the plan for numerics_chunks ranks says: expected "
            "a tensor_parallel.sharding_policy that finds it, got 'manual'"
        )
    if data.reduction != "ordered":
        raise ValueError(
            "numerics 'invariant' fixes the order of sums: expected data_parallel.reduction "
            f"'ordered', got {data.reduction!r}"
        )


def numerics_in_words(chunks: int) -> str:
    """Return what a plan says of its sums."""
    return (
        f"sums over features are cut into {chunks} chunks that are added in a tree (half "
        "precision in float32): every tensor_parallel.size has the same bits"
    )
