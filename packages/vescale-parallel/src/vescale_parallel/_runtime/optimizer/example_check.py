"""Compare what is said of an optimizer with its steps on a small example.

Ranks are imitated one after the other: each has a copy of the optimizer with what that rank
would have. Nothing is communicated, and neither parameters nor generators change.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vescale_dtensor import DTensor
from vescale_parallel._torch_private import pytree

from .kinds import Updates
from .parallel_optimizer import step_without_hooks

_SHAPES = ((6, 4, 3, 2), (4, 5, 2, 2))
_STEPS = 3


class _Differs(Exception):
    """Says what is not as declared."""


def check_updates(optimizer: Optimizer, updates: Updates, block_numel: int = 1) -> frozenset[str]:
    """Raise unless an optimizer updates as it is said to; return what state is that of blocks.

    Raises:
        ValueError: With what differs, or what the example raised.
    """
    name = type(optimizer).__name__
    _refuse_other_parameters(optimizer)
    try:
        with torch.random.fork_rng(devices=[]):
            if updates == "elements":
                return _check_elements(optimizer, block_numel)
            _check_parameters(optimizer)
            return frozenset()
    except _Differs as differs:
        raise ValueError(
            f"{name} is declared to update {updates}, but on a small example {differs}; declare "
            "it otherwise (vescale.declare_optimizer), or make it after parallelize, of "
            "model.parameters(), as on one device"
        ) from None
    except Exception as error:
        raise ValueError(
            f"{name} is declared to update {updates}, but could not be run on a small example to "
            f"see that it does: {type(error).__name__}: {error}"
        ) from error


def _check_elements(optimizer: Optimizer, block_numel: int) -> frozenset[str]:
    whole = _Example(optimizer, block_numel=block_numel)
    whole.run(optimizer)
    of_blocks: set[str] = set()
    # Blocks are rows of the example, which are cut between them.
    for dim in (0, 1) if block_numel == 1 else (0,):
        ranks = [
            _Example(optimizer, cut=(dim, start), block_numel=block_numel) for start in (0, 2)
        ]
        for rank in ranks:
            rank.run(optimizer)
            _expect_same_options(whole, rank, "depends on how parameters are cut")
        for index, parameter in enumerate(whole.params):
            if parameter.dim() <= dim:
                continue
            parts = [rank.params[index].detach() for rank in ranks]
            what = f"a tensor of shape {tuple(parameter.shape)} that is cut along dim {dim}"
            _expect_equal(whole, torch.cat(parts, dim), parameter, f"{what} gets other values")
            for key, value in whole.state_of(index).items():
                others = [rank.state_of(index).get(key) for rank in ranks]
                like = parameter
                if block_numel > 1 and _is_by_block(value, parameter, block_numel):
                    of_blocks.add(key)
                    like = value
                _compare_state(whole, key, value, others, like, dim)
    return frozenset(of_blocks)


def _is_by_block(value: Any, like: Tensor, numel: int) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == (-(-like.numel() // numel),)


def _compare_state(
    whole: _Example, key: str, value: Any, parts: Sequence[Any], like: Tensor, dim: int
) -> None:
    if not isinstance(value, Tensor):
        if any(part != value for part in parts):
            raise _Differs(f"its state {key!r} depends on how a parameter is cut")
    elif value.shape == like.shape:
        _expect_equal(whole, torch.cat(list(parts), dim), value, f"its state {key!r} differs")
    elif value.numel() == 1:
        for part in parts:
            _expect_equal(whole, part, value, f"its state {key!r} differs between ranks")
    else:
        raise _Differs(
            f"its state {key!r} of shape {tuple(value.shape)} belongs to a whole parameter of "
            f"shape {tuple(like.shape)}"
        )


def _check_parameters(optimizer: Optimizer) -> None:
    together = _Example(optimizer, without_gradient=True)
    before = [parameter.detach().clone() for parameter in together.params]
    together.run(optimizer)
    for index in together.idle:
        if not torch.equal(together.params[index], before[index]) or together.state_of(index):
            raise _Differs("it updates a parameter that has no gradient")
    for parity in (0, 1):
        alone = _Example(optimizer, only=parity, without_gradient=True)
        alone.run(optimizer)
        _expect_same_options(together, alone, "is made of several parameters")
        for index in range(parity, len(together.params), 2):
            if index in together.idle:
                continue
            what = "a parameter gets other values without the others beside it"
            _expect_equal(together, alone.params[index], together.params[index], what)
            one, other = alone.state_of(index), together.state_of(index)
            if one.keys() != other.keys():
                raise _Differs("the state of a parameter depends on others")
            for key, value in other.items():
                for mine, theirs in zip(
                    pytree.tree_leaves(one[key]), pytree.tree_leaves(value), strict=True
                ):
                    same = (
                        torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
                    )
                    if not same:
                        raise _Differs(f"the state {key!r} of a parameter depends on others")


def _expect_same_options(one: _Example, other: _Example, why: str) -> None:
    """Compare what steps have made of options: estimates of step sizes, sums of norms.

    These would be a rank's own, and change its updates now or much later (Prodigy, D-Adaptation).
    """
    for mine, theirs in zip(one.options, other.options, strict=True):
        for key, value in mine.items():
            found = theirs.get(key)
            if isinstance(value, Tensor) and value.numel() == 1 and isinstance(found, Tensor):
                is_same = torch.equal(found, value)
            else:
                is_same = not isinstance(value, int | float) or found == value
            if not is_same:
                raise _Differs(f"its option {key!r} {why}")


class _Example:
    """Small parameters in the groups of an optimizer, and a copy of it that steps on them.

    Args:
        optimizer: What is looked at; is not changed.
        cut: Keep two indices of a dim, or the rest, of every parameter that has the dim: (dim,
            where to begin).
        only: 0 or 1: keep every other parameter.
        without_gradient: Whether every fifth parameter has no gradient.
        block_numel: Elements of a row; parameters of one dim are such rows behind each other.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        cut: tuple[int, int] | None = None,
        only: int | None = None,
        without_gradient: bool = False,
        block_numel: int = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params: list[nn.Parameter] = []
        self.grads: list[list[Tensor]] = []
        self.idle: set[int] = set()
        groups: list[list[nn.Parameter]] = []
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            kept: list[nn.Parameter] = []
            for like, shape in _examples_of(group["params"], block_numel):
                values, *grads = (
                    _cut(_drawn(shape, generator), cut, block_numel).to(like.device, like.dtype)
                    for _ in range(_STEPS + 1)
                )
                index = len(self.params)
                if without_gradient and index % 5 == 4:
                    self.idle.add(index)
                made = nn.Parameter(values)
                self.params.append(made)
                self.grads.append(grads)
                # As ranks have it, which get no parameters without gradient from their owners.
                if only is None or (index % 2 == only and index not in self.idle):
                    kept.append(made)
                    states[made] = _first_state(optimizer.state.get(like, {}), like, made)
            groups.append(kept)
        self._stepped = _copy_of(optimizer, groups, states)
        self.is_fused = any(group.get("fused") for group in optimizer.param_groups)

    def run(self, optimizer: Optimizer) -> None:
        """Take a few steps."""
        step = step_without_hooks(type(optimizer).__mro__)
        for number in range(_STEPS):
            given: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
            for index, parameter in enumerate(self.params):
                if index not in self.idle:
                    grad = self.grads[index][number].clone()
                    parameter.grad = grad
                    given[parameter] = grad, grad.clone()
            step(self._stepped)
            self._check_gradients(given)

    def _check_gradients(self, given: dict[nn.Parameter, tuple[Tensor, Tensor]]) -> None:
        """Raise if owners of whole parameters would see other gradients than all ranks."""
        for parameter, (grad, before) in given.items() if self.idle else ():
            if parameter.grad is not grad or not torch.equal(grad, before):
                raise _Differs("a step changes gradients")

    @property
    def options(self) -> list[dict[str, Any]]:
        """What groups have besides parameters."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._stepped.param_groups
        ]

    def state_of(self, index: int) -> dict[str, Any]:
        """Return the state of a parameter, empty without one."""
        return self._stepped.state.get(self.params[index], {})


def _examples_of(
    params: Sequence[nn.Parameter], block_numel: int
) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """Return a parameter of each number of dims twice, and shapes of small ones like it."""
    by_dims: dict[int, nn.Parameter] = {}
    for parameter in params:
        by_dims.setdefault(parameter.dim(), parameter)
    found = [
        (like, _of_blocks((*shape, *((2,) * dims))[:dims], block_numel))
        for dims, like in by_dims.items()
        for shape in (*_SHAPES, _SHAPES[0])
    ]
    return [*found, *found] if len(found) < 5 else found


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw numbers of one dtype: threads share the default, which a trial of one of them sets."""
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _of_blocks(shape: tuple[int, ...], block_numel: int) -> tuple[int, ...]:
    if block_numel == 1 or not shape:
        return shape
    if len(shape) == 1:  # the last block is shorter
        return (shape[0] * block_numel - block_numel // 2,)
    return (shape[0], block_numel, *(1 for _ in shape[2:]))


def _cut(whole: Tensor, cut: tuple[int, int] | None, block_numel: int) -> Tensor:
    if cut is None or whole.dim() <= cut[0]:
        return whole
    dim, start = cut
    # Behind one block: behind two, those of twice the length would pass.
    of_blocks = block_numel if whole.dim() == 1 else 1
    first = 2 if block_numel == 1 else of_blocks
    start, length = (first, whole.shape[dim] - first) if start else (0, first)
    return whole.narrow(dim, start, length).contiguous()


def _first_state(state: Any, like: nn.Parameter, made: nn.Parameter) -> dict[str, Any]:
    """Return what a constructor has put into a parameter's state, for a smaller parameter."""

    def small(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if value.shape != like.shape or not value.dim():
            return value.detach().clone()
        held = value._local_tensor if isinstance(value, DTensor) else value
        first = held.reshape(-1)[0].item() if held.numel() else 0.0
        return torch.full_like(made.detach(), first, dtype=value.dtype)

    return {name: pytree.tree_map(small, value) for name, value in state.items()}


def _copy_of(
    optimizer: Optimizer,
    groups: Sequence[list[nn.Parameter]],
    states: dict[nn.Parameter, dict[str, Any]],
) -> Optimizer:
    made: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            made.__dict__[name] = OrderedDict()
        elif name not in ("param_groups", "state"):
            made.__dict__[name] = copy.deepcopy(value)
    made.state = defaultdict(dict, {p: state for p, state in states.items() if state})
    made.param_groups = [
        {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": kept}
        for group, kept in zip(optimizer.param_groups, groups, strict=True)
    ]
    return cast(Optimizer, made)


def _refuse_other_parameters(optimizer: Optimizer) -> None:
    """Raise if attributes hold parameters: a step would not find plain ones there."""
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, DTensor | Optimizer | nn.Module):
                raise ValueError(
                    f"{type(optimizer).__name__} holds a {type(leaf).__name__} in its attribute "
                    f"{name!r}, where a step on shards would not find plain parameters; keep "
                    "them in param_groups alone. An optimizer made of several is returned from "
                    "optimizer_fn as a list of them"
                )


def _expect_equal(example: _Example, found: Tensor, expected: Tensor, what: str) -> None:
    # A fused kernel rounds the elements at the end of a tensor in another way.
    tolerance = 1e-5 if example.is_fused else 0.0
    if found.shape != expected.shape or not torch.allclose(
        found, expected, rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        raise _Differs(what)
