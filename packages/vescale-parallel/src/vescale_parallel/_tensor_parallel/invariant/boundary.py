"""Where activations change hands in chunks; see [Note: invariant numerics]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from vescale_parallel._model.linear_layout import LinearKind
from vescale_parallel._tensor_parallel.chunks import parts_of
from vescale_parallel._tensor_parallel.communicators import Ranks
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._tensor_parallel.operators import Kind

from .entrance import for_chunks
from .placed import in_place_of_its_own
from .products import Columns, Cut, Rows
from .vector_ends import check_ends
from .whole_parameters import ChunkedCall, added_by_tokens, in_chunks

_COPIES = "_vescale_chunks"
_SEQUENCE_DIM = 1


class InvariantBoundary(Boundary):
    """The conversions of one group of ranks, whose bits do not depend on how many they are.

    Args:
        ranks: Who they are; sums are in a tree.
        chunks: Of all ranks, a power of two that their number divides.
        even: As for :class:`Boundary`.
    """

    def __init__(self, ranks: Ranks, chunks: int, *, even: bool = False) -> None:
        super().__init__(ranks, even=even)
        self._chunks, self.num_chunks = chunks, chunks // ranks.size

    def take_columns(
        self, module: nn.Module, fqn: str, kind: LinearKind, placement: Placement
    ) -> None:
        cut = Cut(kind.out_dim, True, self.num_chunks, parts_of(placement))
        own = module.forward

        @functools.wraps(own)
        def columns(*args: Any, **kwargs: Any) -> Tensor:
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            copies = getattr(x, _COPIES, None)
            if copies is None:
                raise ValueError(
                    f"numerics 'invariant': {fqn!r} reads something else than what enters its "
                    "region, whose gradient ranks would add up after chunks were; leave numerics "
                    "out of the plan"
                )
            _check_autocast(x, fqn)
            weight, bias = _held(module)
            y: Any = Columns.apply(cut, weight, bias, *copies)
            check_ends(y, self.num_chunks, cut.parts, fqn)
            return y

        module.forward = columns

    def take_rows(
        self, module: nn.Module, fqn: str, kind: LinearKind, placement: Placement
    ) -> None:
        cut = Cut(kind.in_dim, False, self.num_chunks, parts_of(placement))
        own = module.forward

        @functools.wraps(own)
        def rows(*args: Any, **kwargs: Any) -> Tensor:
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            _check_autocast(x, fqn)
            y: Any = Rows.apply(cut, _held(module)[0], x)
            return y

        module.forward = rows

    def take_chunks(
        self, module: nn.Module, fqn: str, names: tuple[str, ...], dim: int | None
    ) -> None:
        """Have a module whose parameters ranks apply to their own tokens or heads run in chunks.

        ``dim`` is that of heads or features, None for tokens.
        """
        is_sequence = dim is None
        call = ChunkedCall(_SEQUENCE_DIM if is_sequence else dim, self.num_chunks, is_sequence)
        in_chunks(module, fqn, names, call, self.ranks.all_reduce)

    def gather_around(self, x: Tensor, dim: int, key: str) -> Tensor:
        return in_place_of_its_own(super().gather_around(x, dim, key))

    def split_behind(self, x: Tensor, dim: int, key: str) -> Tensor:
        return super().split_behind(in_place_of_its_own(x), dim, key)

    def add_bias(self, output: Tensor, bias: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return output + bias
        return added_by_tokens(output, bias, dim, self.num_chunks, self.ranks.all_reduce)

    def leave_layer(
        self, compute: Callable[[Tensor], Tensor], x: Tensor, dim: int | None, stack: str
    ) -> Tensor:
        # Chunks were added in the dtype of accumulation, ranks are, too.
        return self.leave(compute(x), dim, stack).to(x.dtype)

    def split(self, x: Tensor, dim: int, stack: str) -> Tensor:
        is_sequence = dim >= 0  # or features, whose chunks were looked at before
        if is_sequence and torch.is_grad_enabled() and x.shape[dim] % self._chunks:
            length = x.shape[dim]
            raise ValueError(
                f"numerics 'invariant' with tensor_parallel.sequence needs sequences that "
                f"numerics_chunks ({self._chunks}) divides, got {length}; the nearest are "
                f"{length // self._chunks * self._chunks} and "
                f"{(length // self._chunks + 1) * self._chunks}"
            )
        return super().split(x, dim, stack)

    def _convert(
        self, x: Tensor, there: Kind, back: Kind, dim: int = 0, length: int = 0
    ) -> Tensor:
        return x if self.ranks.size == 1 else super()._convert(x, there, back, dim, length)

    def _bring_in(self, x: Tensor, dim: int | None, stack: str) -> Tensor:
        there, back = _as_it_is, self.ranks.all_reduce
        if dim is not None:
            length = self._length(x, dim, stack)
            there = functools.partial(self.ranks.all_gather, dim=dim, length=length)
            back = functools.partial(self.ranks.reduce_scatter, dim=dim)
        whole, copies = for_chunks(x, there, back, self.num_chunks, f"a region of {stack!r}")
        if whole is x:
            whole = x.view_as(x)  # what is noted is of this region alone
        setattr(whole, _COPIES, copies)
        return whole


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _held(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight, module._parameters.get("bias")


def _check_autocast(x: Tensor, fqn: str) -> None:
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"numerics 'invariant': {fqn!r} was called under torch.autocast, which casts products "
            "that are written as one; use precision.param for the dtype of compute"
        )
