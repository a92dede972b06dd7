"""Modules that stack experts, and one call of some of them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import DTensor, all_to_all
from vescale_parallel._torch_private import pytree

Combination = Literal["slots", "ascending"]
_NUM_ARGUMENTS = 3  # rows, the experts of each, their weights
_RELATIVE = 1e-9  # far above rounding in float64, far below any difference in what is computed


@dataclass(frozen=True)
class Experts:
    """A module whose parameters stack experts on their first dim.

    Attributes:
        fqn: Its name.
        num_experts: How many.
        attributes: Its integers that count experts, and so count this rank's in a call of those.
        combination: How it adds up the experts of a row: all of its slots at once, or one after
            the other in the order of experts.
        num_dims: Of its one input, if it takes as many rows for each expert, flat if 2; None if it
            takes rows, the experts of each and their weights.
        draws: Whether it draws random numbers in training.
        weighs_all: Whether its weights are of all experts, (tokens, experts), rather than of those
            of each row; its rows, (batch, tokens, hidden), are given back in that shape.
    """

    fqn: str
    num_experts: int
    attributes: tuple[str, ...]
    combination: Combination
    num_dims: int | None = None
    draws: bool = False
    weighs_all: bool = False

    def rows_of_each(self, tensor: Tensor) -> Tensor:
        """Return (experts, rows, features) of what the module takes or returns.

        With one in the place of experts where a row goes to those that are given with it.

        Raises:
            ValueError: If it does not have as many rows of each expert.
        """
        if self.num_dims is None:
            return by_expert(tensor, 1)
        self.check(tensor)
        return by_expert(tensor, self.num_experts)

    def as_taken(self, rows_ENH: Tensor, num_dims: int) -> Tensor:
        """Return rows as the module takes them, in ``num_dims`` if it may."""
        return laid_out(rows_ENH, self.num_dims or max(num_dims, 2))

    def check(self, rows: Tensor) -> None:
        """Raise if what takes as many rows of each expert is called with something else."""
        count, num_dims = self.num_experts, self.num_dims
        first = rows.shape[0] % count if rows.dim() == 2 else rows.shape[0] - count
        if rows.dim() == num_dims and not first:
            return
        wanted = "(experts * rows, features)" if num_dims == 2 else "(experts, ..., features)"
        raise ValueError(
            f"{self.fqn!r} was called with a tensor of shape {tuple(rows.shape)}; with "
            f"expert_parallel it takes the rows of its {count} experts in {num_dims} dims, "
            f"{wanted}: where all experts have the same rows, give it x.expand({count}, -1, -1), "
            "or use expert_parallel.size 1"
        )


def by_expert(rows: Tensor, num_experts: int) -> Tensor:
    """Return (experts, rows, features) of what has the experts on its first dim, or flat there."""
    return rows.reshape(num_experts, -1, rows.shape[-1])


def laid_out(rows_ENH: Tensor, num_dims: int) -> Tensor:
    """Return rows as a module takes them: flat if it takes two dims."""
    if num_dims == 2:
        return rows_ENH.flatten(0, 1)
    experts, num_rows, hidden = rows_ENH.shape
    return rows_ENH.reshape(experts, *[1] * (num_dims - 3), num_rows, hidden)


def num_stacked(module: nn.Module) -> int:
    """Return how many experts a module stacks, 0 if it is none that stacks some.

    Its forward has three arguments: rows, the experts of each, and their weights.
    """
    return num_alike(module) if takes_rows(module) else 0


def num_alike(module: nn.Module) -> int:
    """Return the one first dim of a module's parameters, which are its own; 0 if there is none.

    One of them has to be a stack of matrices.
    """
    own = [parameter.shape for parameter in module.parameters(recurse=False)]
    if len(own) != len(list(module.parameters())) or not own:
        return 0
    if min(map(len, own)) < 2 or max(map(len, own)) < 3:
        return 0
    lengths = {shape[0] for shape in own}
    return lengths.pop() if len(lengths) == 1 else 0


def takes_rows(module: nn.Module) -> bool:
    """Whether forward can be called with three arguments, and needs no more."""
    parameters, places = _arguments(module)
    more = [p for p in parameters if p not in places[:_NUM_ARGUMENTS]]
    is_needed = [p for p in more if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return len(places) >= _NUM_ARGUMENTS and not is_needed


def needs_rows(module: nn.Module) -> bool:
    """Whether forward cannot be called with fewer: a codebook, too, may take a mask and more."""
    _, places = _arguments(module)
    return all(p.default is p.empty for p in places[:_NUM_ARGUMENTS])


def _arguments(
    module: nn.Module,
) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Return the parameters of a forward, and those that are given by position."""
    try:
        parameters = [*inspect.signature(module.forward).parameters.values()]
    except (TypeError, ValueError):
        return [], []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return parameters, [p for p in parameters if p.kind in kinds]


def structure(module: nn.Module) -> tuple[type, tuple[tuple[str, torch.Size], ...]]:
    """Return what modules of one class and of the same shapes have in common."""
    return type(module), tuple((name, p.shape) for name, p in module.named_parameters())


def has_router(owner: nn.Module, experts: Iterable[nn.Module], count: int = 0) -> bool:
    """Whether a module has a parameter beside experts with a dim of ``count``, or as many."""
    held = [*experts]
    own = {id(p) for each in held for p in each.parameters()}
    count = count or len(held)
    return any(count in p.shape for p in owner.parameters() if id(p) not in own)


def refuse_whole_batch(fqn: str, given: Any) -> None:
    """Raise if a module with experts is called with tensors of the batch of all ranks.

    Every rank would send all rows, and experts get them once a rank.
    """
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, DTensor) and leaf.device_mesh.mesh_dim_names != ("tp",):
            raise ValueError(
                f"rows of the batch depend on each other around the experts of {fqn!r} (a "
                "capacity, experts that choose tokens, or a loss that the module makes of all "
                "rows), so it is called with the rows of all ranks, which do not send them; stack "
                "the experts in one module that takes rows, the experts of each and their "
                "weights, or have the module return its router's scores and make the loss of "
                "them in the model, or use expert_parallel.size 1"
            )


def bound(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, experts and weights of a call, however they were given.

    Raises:
        TypeError: If the call has other arguments.
    """
    given = [*inspect.signature(forward).bind(*args, **kwargs).arguments.values()]
    if len(given) != _NUM_ARGUMENTS or not all(isinstance(each, Tensor) for each in given):
        kinds = [type(each).__name__ for each in given]
        raise TypeError(f"expected rows, experts and weights as tensors, got {kinds}")
    rows, index, weights = given
    if rows.shape[:-1].numel() != index.shape[:-1].numel():
        raise TypeError(
            f"expected experts for each row, got shapes {tuple(rows.shape)} of rows and "
            f"{tuple(index.shape)} of experts"
        )
    return rows, index, weights


def call_some(
    module: nn.Module,
    forward: Callable[..., Any],
    attributes: tuple[str, ...],
    num_experts: int,
    rows_NH: Tensor,
    expert_N: Tensor,
    *,
    weighs_all: bool,
) -> Tensor:
    """Run a module on rows that each go to one of ``num_experts``, those that it has now.

    With weights of one, which multiply to the same bits.
    """
    given = rows_NH, expert_N[:, None], rows_NH.new_ones(len(rows_NH), 1)
    if weighs_all:
        given = weighing_all(*given, num_experts)
    made = call_counting(module, forward, attributes, num_experts, *given)
    return made[0] if weighs_all else made


def weighing_all(
    rows_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of what takes a batch of rows, and a weight of each expert."""
    weights_TE = weights_TK.new_zeros(len(weights_TK), num_experts)
    return rows_TH[None], index_TK, weights_TE.scatter(1, index_TK, weights_TK)


def call_counting(
    module: nn.Module,
    forward: Callable[..., Any],
    attributes: Sequence[str],
    num_experts: int,
    *given: Tensor,
) -> Tensor:
    """Run a module whose integers that count experts are ``num_experts`` now."""
    with _counting(module, attributes, num_experts):
        return forward(*given)


def counts_of(module: nn.Module, count: int) -> Iterator[str]:
    """Yield a module's integers that may count its experts."""
    for name, value in vars(module).items():
        if type(value) is int and value == count:
            yield name


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield sets of names, all of them first."""
    for length in range(len(names), -1, -1):
        yield from itertools.combinations(names, length)


def close(made: Tensor, expected: Tensor) -> bool:
    """Whether two runs in float64 made the same but for rounding."""
    if made.shape != expected.shape:
        return False
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return not made.numel() or bool((made - expected).abs().max() <= _RELATIVE * max(scale, 1e-6))


@contextlib.contextmanager
def _counting(module: nn.Module, attributes: Sequence[str], value: int) -> Iterator[None]:
    held = {name: getattr(module, name) for name in attributes}
    try:
        for name in attributes:
            setattr(module, name, value)
        yield
    finally:
        for name, before in held.items():
            setattr(module, name, before)


def combined(
    rows_TKH: Tensor, index_TK: Tensor, weights_TK: Tensor, combination: Combination
) -> Tensor:
    """Sum what experts made of each row, by weight, in the order in which the module does."""
    dtype = rows_TKH.dtype
    weighted = rows_TKH * weights_TK[..., None]
    if combination == "slots":
        return weighted.sum(1).to(dtype)
    order = index_TK.argsort(stable=True, dim=1)[..., None].expand_as(weighted)
    first, *others = weighted.to(dtype).gather(1, order).unbind(1)
    total = first
    for each in others:
        total = total + each
    return total


def sorted_by_expert(index_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order of (token, slot) pairs by expert, and how many each expert has.

    What is no expert's index is in no count.
    """
    experts, order = index_TK.reshape(-1).sort(stable=True)
    borders = torch.arange(num_experts + 1, device=index_TK.device, dtype=experts.dtype)
    return order, torch.searchsorted(experts, borders).diff()


class MadeDtypes:
    """The dtype of what experts of one module make of rows, on ranks without a row, too.

    It is that of rows, or another one under autocast, of which ranks tell each other once.
    """

    def __init__(self, fqn: str, group: dist.ProcessGroup) -> None:
        self._fqn, self._group = fqn, group
        self._known: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {}

    def of(self, made: Sequence[Tensor], rows: Tensor) -> torch.dtype:
        """Return it, given all that was made on this rank. Every rank must call this.

        Raises:
            ValueError: If experts make rows of several dtypes.
        """
        dtype = rows.dtype
        if torch.is_autocast_enabled(rows.device.type):
            dtype = self._agreed(made, rows, torch.get_autocast_dtype(rows.device.type))
        other = next((each.dtype for each in made if each.dtype != dtype), None)
        if other is not None:  # ranks without a row would send others
            raise ValueError(
                f"an expert of {self._fqn!r} makes rows of {other}, and {dtype} was expected of "
                f"rows of {rows.dtype}; expert_parallel needs one dtype, so cast what it returns"
            )
        return dtype

    def _agreed(self, made: Sequence[Tensor], rows: Tensor, cast: torch.dtype) -> torch.dtype:
        key = rows.dtype, cast
        if key not in self._known:
            codes = [1 + key.index(each.dtype) for each in made[:1] if each.dtype in key]
            ranks = self._group.size()
            own = torch.tensor(codes or [0], device=rows.device).repeat(ranks)
            code = int(all_to_all(own, self._group).max())
            if not code:  # no rank had a row
                return rows.dtype
            self._known[key] = key[code - 1]
        return self._known[key]
