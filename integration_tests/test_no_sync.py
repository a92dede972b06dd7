"""``no_sync``: gradients are added on each rank, then over ranks, once."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale
from vescale_dtensor import CommCounter
from vescale_testing import World

from .plans import COPIES, DP, PARTS, PP, TP, ZERO, Constraints, make_plan

pytestmark = pytest.mark.slow

WIDTH = 5  # a width that does not divide
PASSES, ROWS = 3, 4
ACCUMULATION = "batch.gradient_accumulation"
HALF = {"precision.param": "bfloat16", "precision.reduce": "float32"}


class Net(nn.Module):
    """Blocks, one frozen in part, and a tied head; one module is used in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.get_parameter("blocks.1.0.bias").requires_grad_(False)

    def forward(self, x: Tensor, with_extra: bool = False) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if with_extra:
            x = self.extra(x)
        return self.last(x).pow(2).mean()


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _rows(step: int, each_pass: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * each_pass + rank)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


def _by_one_device(num_ranks: int, steps: int, half: bool) -> dict[str, Tensor]:
    """Return the parameters after steps that sum over a rank's passes, then over ranks."""
    model = _net()
    optimizer = _sgd(model)
    for step in range(steps):
        total: dict[str, Tensor] = {}
        for rank in range(num_ranks):
            own: dict[str, Tensor] = {}
            for each in range(PASSES):
                plain = _net().to(torch.bfloat16 if half else torch.float64)
                plain.load_state_dict(model.state_dict())
                rows = _rows(step, each, rank).to(plain.first.weight.dtype)
                (plain(rows, each == 1) / PASSES).backward()
                for name, parameter in plain.named_parameters():
                    if parameter.grad is not None:
                        grad = parameter.grad.float() if half else parameter.grad
                        own[name] = own[name] + grad if name in own else grad
            for name, grad in own.items():
                total[name] = total[name] + grad if name in total else grad
        for name, parameter in model.named_parameters():
            if name in total:
                parameter.grad = total[name].to(parameter.dtype) / num_ranks
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def _without_last(model: Any, each: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if each == PASSES - 1 else model.no_sync()


def _wholes(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def steps_under(constraints: Constraints) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Return the parameters after two steps, and how many reductions each pass had."""
    ranks = constraints[DP]
    model, optimizer = vescale.parallelize(make_plan(constraints), _net(), _sgd)
    data_rank = vescale.data_parallel_rank(model)
    counts: list[list[int]] = []
    for step in range(2):
        counts.append([])
        for each in range(PASSES):
            rows = _rows(step, each, data_rank % ranks)
            with _without_last(model, each):
                loss = model(rows, each == 1)
                with CommCounter() as counter:
                    (loss / PASSES).backward()
            counts[-1].append(
                sum(event.kind in ("all_to_all", "all_reduce") for event in counter.events)
            )
        optimizer.step()
        optimizer.zero_grad()
    return _wholes(model), counts


@pytest.mark.by_day("0-False")
@pytest.mark.parametrize(("stage", "half"), [(0, False), (1, True), (2, False), (3, True)])
def test_passes_are_summed_on_each_rank_then_over_ranks(
    world2: World, stage: int, half: bool
) -> None:
    expected = _by_one_device(2, 2, half)
    constraints = {DP: 2, ZERO: stage, **(HALF if half else {})}
    for found, counts in world2.run(steps_under, constraints):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert counts == [[0, 0, 4]] * 2  # one for each block, and one for the rest


@pytest.mark.by_day("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_passes_are_summed_on_three_ranks(world3: World, stage: int) -> None:
    expected = _by_one_device(3, 2, half=False)
    for found, counts in world3.run(steps_under, {DP: 3, ZERO: stage}):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert counts == [[0, 0, 4]] * 2


@pytest.mark.by_day("*'data_parallel.zero_stage': 1*")
@pytest.mark.parametrize(
    "others",
    [{TP: 2}, {PP: 2, PARTS: 2}, {TP: 2, ZERO: 3}, {ACCUMULATION: 2, ZERO: 1},
         {ACCUMULATION: 2, ZERO: 3}],
    ids=str,
)  # fmt: skip
def test_passes_are_summed_beside_other_parallelism(world4: World, others: Constraints) -> None:
    # Other kernels, so within rounding.
    ranks = 2 if {TP, PP} & {*others} else 4
    expected = _by_one_device(ranks, 2, half=False)
    for found, _ in world4.run(steps_under, {DP: ranks, **others}):
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-12, msg=name)


def test_passes_are_summed_over_copies_of_shards(world4: World) -> None:
    expected = _by_one_device(4, 2, half=False)
    for found, _ in world4.run(steps_under, {DP: 4, COPIES: 2, ZERO: 2}):
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-12, msg=name)


NOT_SUMMED = r"no_sync\(\).* run the last backward\(\) of a step outside of no_sync\(\)"


def _clip(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _clip_values(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def _read(model: Any, optimizer: Any) -> None:
    print(model.first.weight.grad.sum())


def _step(model: Any, optimizer: Any) -> None:
    optimizer.step()


def _by_hand(model: Any, optimizer: Any) -> None:
    torch.optim.AdamW(model.parameters()).step()


def _unscale(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _zero(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


READERS = [_clip, _clip_values, _read, _step, _by_hand, _unscale, _zero]


def _parallel(stage: int) -> tuple[Any, Any]:
    return vescale.parallelize(make_plan({DP: 2, ZERO: stage}), _net(), _sgd)


def _grads(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def refusals(stage: int) -> list[str]:
    model, optimizer = _parallel(stage)
    told: list[str] = []
    for is_inside in (True, False):
        with model.no_sync():
            model(_rows(0, 0, dist.get_rank()), True).backward()
            told += _refused(model, optimizer) if is_inside else []
        told += [] if is_inside else _refused(model, optimizer)
        assert model.unused.weight.grad is None
        optimizer.zero_grad()
        optimizer.step()
    return told


def _refused(model: Any, optimizer: Any) -> list[str]:
    told: list[str] = []
    for read in READERS:
        try:
            read(model, optimizer)
        except ValueError as error:
            told.append(str(error))
    return told


@pytest.mark.by_day("0")
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_were_not_summed_are_refused(world2: World, stage: int) -> None:
    for told in world2.run(refusals, stage):
        assert len(told) == 2 * len(READERS)
        assert all(re.search(NOT_SUMMED, text) for text in told)


def _micro(model: Any, *, step: int = 0, each: int = 0, scale: float = 1.0) -> None:
    (scale * model(_rows(step, each, dist.get_rank()), each == 1)).backward()


def orders_of_passes(stage: int, order: str) -> dict[str, Tensor]:
    """Return gradients of passes: s is summed over ranks, n is not, 0 drops."""
    model, optimizer = _parallel(stage)
    for each, kind in enumerate(order):
        if kind == "0":
            optimizer.zero_grad()
        elif kind == "o":  # between forward and backward, as some loops do
            model.set_requires_gradient_sync(True)
            loss = model(_rows(0, each, dist.get_rank()))
            optimizer.zero_grad()
            loss.backward()
        else:
            model.set_requires_gradient_sync(kind == "s")
            _micro(model, each=each)
    return _grads(model)


def _summed(order: str) -> dict[str, Tensor]:
    model = _net()
    for rank in range(2):
        start = max(order.rfind("0"), order.rfind("o"))
        for each, kind in enumerate(order):
            if each >= start and kind != "0":
                (model(_rows(0, each, rank), each == 1 and kind != "o") / 2).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.by_day("n0s-1")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("order", ["sns", "nsns", "nn0ns", "sn0s", "nno", "n0s", "nos"])
def test_gradients_are_those_since_they_were_dropped(
    world2: World, order: str, stage: int
) -> None:
    expected = _summed(order)
    for found in world2.run(orders_of_passes, stage, order):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-12, msg=name)


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise KeyError("in backward")


def failure_in_between() -> tuple[str, dict[str, Tensor]]:
    model, optimizer = _parallel(1)
    with model.no_sync():
        _micro(model)
        hook = model.blocks[1].register_forward_hook(lambda _m, _a, out: _Raising.apply(out))
        with pytest.raises(KeyError):
            _micro(model)
        hook.remove()
    with pytest.raises(RuntimeError, match="1 passes under no_sync") as error:
        _micro(model)
    optimizer.zero_grad()
    _micro(model)
    return str(error.value), _grads(model)


def test_a_backward_that_raises_says_that_passes_before_are_lost(world2: World) -> None:
    expected = _summed("s")
    for _, found in world2.run(failure_in_between):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-12, msg=name)


def gradients_with_a_penalty() -> dict[str, Tensor]:
    """A penalty of parameters outside of the call, whose gradients autograd adds itself."""
    model, _ = _parallel(1)
    for each in range(PASSES):
        with _without_last(model, each):
            loss = model(_rows(0, each, dist.get_rank()))
            (loss + model.first.weight.pow(2).sum().full_tensor()).backward()
    return _grads(model)


def test_what_autograd_adds_itself_is_kept(world2: World) -> None:
    model = _net()
    for each in range(PASSES):
        loss = sum(model(_rows(0, each, rank)) for rank in range(2)) / 2
        (loss + model.first.weight.pow(2).sum()).backward()
    for found in world2.run(gradients_with_a_penalty):
        grad = model.first.weight.grad
        torch.testing.assert_close(found["first.weight"], grad, rtol=0, atol=1e-12)
