"""A step of ZeRO 1, 2 and 3: what hangs on the modules, what is in memory, what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor

from .zero_model import (
    ROWS,
    WIDTH,
    WORLD,
    OwnCounter,
    assert_close,
    net,
    parallel,
    rows_of,
    wholes,
)

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]


def _of_linear(model: Any, index: int) -> nn.Parameter:
    return model.blocks[index].linear._parameters["weight"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_hangs_on_the_modules_at_each_moment(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> list[tuple[str, bool, bool, bool]]:
        model = parallel(models[rank], stage)
        seen: list[tuple[str, bool, bool, bool]] = []

        def look(when: str) -> None:
            held = [_of_linear(model, 0), _of_linear(model, 1), model.first._parameters["weight"]]
            seen.append((when, *(isinstance(each, DTensor) for each in held)))  # pyright: ignore[reportArgumentType]

        look("before")
        for index, block in enumerate(model.blocks):
            block.seen = lambda when, index=index: look(f"{when} {index}")
        loss = model(rows_of(rank))
        look("between")
        loss.backward()
        look("after")
        return seen

    whole = stage > 1  # a block that does not run shows what everybody sees
    for seen in in_threads(WORLD, step):
        assert seen == [
            ("before", True, True, True),
            ("forward 0", False, whole, False),
            ("forward 1", whole, False, False),
            ("between", True, True, True),
            ("backward 1", whole, False, False),
            ("backward 0", False, whole, False),
            ("after", True, True, True),
        ]


def _bytes_of(model: Any) -> int:
    """Return the memory of the parameters that compute, without what is the public one's own."""
    params = model._vescale_engine.parameters.params
    storages = [p.unsharded.untyped_storage() for p in params if not p.shares_storage]
    return sum({each._cdata: each.size() for each in storages}.values())


def _whole(nbytes: int) -> int:
    """Return the bytes of a flat buffer of parameters, whose ranges are multiples of 128."""
    return WORLD * _aligned(nbytes // WORLD)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_of_gathered_parameters_at_each_moment(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]
    of_root, of_block = _whole(8 * WIDTH * WIDTH), _whole(8 * (WIDTH * WIDTH + WIDTH))

    def step(rank: int) -> list[int]:
        model, seen = parallel(models[rank], stage), list[int]()
        for block in model.blocks:
            block.seen = lambda _: seen.append(_bytes_of(model))
        loss = model(rows_of(rank))
        seen.append(_bytes_of(model))
        loss.backward()
        seen.append(_bytes_of(model))
        with torch.no_grad():
            model(rows_of(rank))
        return [*seen[:6], _bytes_of(model)]

    # forward of both blocks, between, backward of both, after, and after one without gradients
    # and the first block is gathered while the backward pass of the second runs
    everything, one = of_root + 2 * of_block, of_root + of_block
    # What forward ended with stays, for backward begins with it.
    expected = [one, one, one, everything, one, 0, 0] if stage == 3 else [everything] * 7
    for seen in in_threads(WORLD, step):
        assert seen == expected


def test_parallelize_itself_takes_no_memory_for_gathered_parameters(
    in_threads: InThreads,
) -> None:
    models = [net() for _ in range(WORLD)]
    assert in_threads(WORLD, lambda rank: _bytes_of(parallel(models[rank], 3))) == [0, 0]


# All-gathers in forward, of blocks again in backward at ZeRO 3, and of flags of what was used;
# reduce-scatters, which are all-to-alls summed in rank order.
# Backward of ZeRO 3 begins with what forward ended with, which is there still.
GATHERED = {1: 3, 2: 3, 3: 3 + 1}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_step_sends(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> tuple[Counter[str], int, int]:
        model = parallel(models[rank], stage)
        model(rows_of(rank)).backward()  # calls are proven in their first one
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)  # a step; what did not change is not gathered again
        counter = OwnCounter()
        with counter:
            loss = model(rows_of(rank))
            at = len(counter.events)
            loss.backward()
        sent = [event for event in counter.events if event.dtype == torch.float64]
        gathers = [event for event in sent if event.kind == "all_gather"]
        nbytes = sum(event.nbytes for event in gathers)
        return Counter(event.kind for event in sent), nbytes, at

    # Of a gather one rank sends its range, a multiple of 128 bytes; the loss and its rows besides.
    root, block = _aligned(8 * WIDTH * WIDTH // WORLD), _aligned(8 * (WIDTH + 1) * WIDTH // WORLD)
    gathered = root + block * (3 if stage == 3 else 2)
    for kinds, nbytes, _ in in_threads(WORLD, step):
        assert kinds["all_to_all"] == 3
        assert kinds["all_reduce"] == 0
        assert kinds["all_gather"] == GATHERED[stage] + 1
        assert nbytes == gathered + 2 * 8


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_that_raised_leaves_the_model_as_it_was(
    in_threads: InThreads, stage: int
) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    expected(ROWS).backward()

    def fail(when: str) -> None:
        raise KeyError("in forward")

    def steps(rank: int) -> tuple[bool, int, dict[str, Tensor | None]]:
        model = parallel(models[rank], stage)
        model.blocks[1].seen = fail
        with pytest.raises(KeyError, match="in forward"):
            model(rows_of(rank))
        shown = all(isinstance(p, DTensor) for p in model.parameters())
        nbytes = _bytes_of(model)
        model.blocks[1].seen = None
        model(rows_of(rank)).backward()
        return shown, nbytes, wholes(model)

    for shown, nbytes, got in in_threads(WORLD, steps):
        assert shown
        if stage == 3:  # what is outside of blocks, which backward would need
            assert nbytes == _whole(8 * WIDTH * WIDTH)
        assert_close(got, expected)


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise KeyError("in backward")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_call_after_a_backward_that_raised_has_the_right_gradients(
    in_threads: InThreads, stage: int
) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    expected(ROWS).backward()

    def steps(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        # Between the blocks, so that the second one has gradients when it raises.
        hook = model.blocks[0].register_forward_hook(lambda _m, _a, out: Failing.apply(out))
        with pytest.raises(KeyError, match="in backward"):
            model(rows_of(rank)).backward()
        hook.remove()
        model(rows_of(rank)).backward()
        return wholes(model)

    for got in in_threads(WORLD, steps):
        assert_close(got, expected)
