"""An error on one rank is that error on all ranks, at once, wherever it happens."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import AsyncSaver, CheckpointError, MismatchError, PerRank
from vescale_dtensor import distribute_tensor
from vescale_testing import World

# Long enough for every test to fail if ranks wait for it.
TIMEOUT = timedelta(seconds=30)
PROMPTLY_SECONDS = 20.0

Action = Callable[[str], Any]


class _InjectedError(Exception):
    """What goes wrong on one rank."""


def tensor(placement: Placement, number: float = 1.0) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.full((1000, 600), float(number))
    return distribute_tensor(full, mesh, (placement,))


def state(number: float) -> dict[str, Any]:
    return {
        "model": {
            "columns": tensor(Shard(1), number),
            "rows": tensor(Shard(0), number),
            "copies": tensor(Replicate(), number),
        },
        "rank": PerRank({"x": dist.get_rank(), "t": torch.full((3,), float(dist.get_rank()))}),
        "plain": torch.full((700, 500), float(number)),
        "step": int(number),
    }


def save(path: str) -> None:
    vescale_ckpt.save(path, state(2), timeout=TIMEOUT)


def save_and_keep(path: str) -> None:
    vescale_ckpt.save(path, state(2), timeout=TIMEOUT, keep_last=1)


def save_per_rank(path: str) -> None:
    vescale_ckpt.save(path, state(2), timeout=TIMEOUT, layout="per_rank")


def save_aside(path: str, given: Any = None) -> None:
    with AsyncSaver(timeout=TIMEOUT) as saver:
        saver.save(path, state(2) if given is None else given)


def load_exchanging(path: str) -> None:
    transposed = {**state(0), "model": {"rows": tensor(Shard(1)), "copies": tensor(Replicate())}}
    vescale_ckpt.load(path, transposed, exchange=True, timeout=TIMEOUT, strict=True, only=ONLY)


def load_through_the_cache(path: str) -> None:
    vescale_ckpt.load(path, state(0), exchange=False, verify_first=True, timeout=TIMEOUT)


def load_hugging_face(path: str) -> None:
    module = torch.nn.Module()
    module.register_buffer("w", tensor(Shard(1)))
    vescale_ckpt.load_safetensors(Path(path).parent / "model.safetensors", module)


def save_hugging_face(path: str) -> None:
    tensors = {"columns": tensor(Shard(1)), "rows": tensor(Shard(0)), "plain": torch.ones(3)}
    vescale_ckpt.save_safetensors(Path(path).parent / "exported", tensors, timeout=TIMEOUT)


ONLY = [r"model\.(rows|copies)", "step", "plain", "rank"]
ACTIONS: list[Action] = [
    save, save_and_keep, save_per_rank, save_aside, load_exchanging, load_through_the_cache,
    load_hugging_face, save_hugging_face,
]  # fmt: skip
# Before these have begun, and after they have ended, there is no save and no load.
ENTRIES = (
    "save", "load", "load_safetensors", "save_safetensors", "write_checkpoint",
    "AsyncSaver.__init__",
    "HostStaging.__init__", "_Outcome.__init__",
    "AsyncSaver.save", "AsyncSaver._begin.<locals>.work", "AsyncSaver.wait",
    "AsyncSaver._start", "AsyncSaver._begin", "AsyncSaver._ended",
    "AsyncSaver.__exit__", "_Running._run", "_Running.wait",
    "Handle.close", "Handles.close", "CheckpointReader.close",
    "CheckpointReader.__exit__", "keep_buffer",
)  # fmt: skip


class Place(NamedTuple):
    """A function of the package."""

    file: str
    name: str


# What finds out who is there and what went wrong has nobody to tell of its own failures.
MACHINERY = (
    "control_group.py",
    "missing_ranks.py",
    "_torch_private.py",
    "thread_pool.py",
    "exceptions.py",
)


@contextmanager
def traced(on_call: Callable[[Place], None]) -> Iterator[None]:
    """Call a function whenever one of the package is called, in any thread."""

    def trace(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        name = file.rpartition("/")[2]
        if event == "call" and "/vescale_ckpt/" in file and name not in MACHINERY:
            on_call(Place(name, frame.f_code.co_qualname))

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)  # pyright: ignore[reportArgumentType]: undoes it


def places_of(number: int, path: str) -> list[Place]:
    """Return what functions an action calls on rank 1, in the order of their first calls."""
    found: dict[Place, None] = {}
    with traced(lambda place: found.setdefault(place)):
        ACTIONS[number](path)
    return [place for place in found if place.name not in ENTRIES]


def outcome_of(number: int, path: str, place: Place, call: int) -> tuple[str, float]:
    """Do something while a function fails on rank 1; return the error and how long it took."""
    calls = [0]

    def fail(called: Place) -> None:
        if called == place:
            calls[0] += 1
            if calls[0] == call:
                raise _InjectedError(f"in {place.name}")

    start = time.monotonic()
    message = "no error"
    try:
        if dist.get_rank() == 1:
            with traced(fail):
                ACTIONS[number](path)
        else:
            ACTIONS[number](path)
    except (CheckpointError, _InjectedError) as error:
        message = str(error)
    return message, time.monotonic() - start


def try_all(world: World, directory: Path, number: int, stride: int) -> None:
    path = str(directory / "step-1")
    save_file({"w": torch.ones(1000, 600)}, directory / "model.safetensors")
    world.run(save, path)
    # What is called only the first time in a process depends on the tests before.
    world.run(ACTIONS[number], path)
    places = world.run(places_of, number, path)[1]
    assert len(places) > 20
    for place in places[number % stride :: stride]:
        for call in (1, 2):
            answers = world.run(outcome_of, number, path, place, call)
            messages = [message for message, _ in answers]
            context = f"{ACTIONS[number].__name__}, call {call} of {place}: {messages}"
            assert max(seconds for _, seconds in answers) < PROMPTLY_SECONDS, context
            assert len(set(messages)) == 1, context
            assert messages[0] == "no error" or "_InjectedError: in " in messages[0], context
    world.run(save, path)
    world.run(load_through_the_cache, path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ACTIONS)), ids=lambda n: ACTIONS[n].__name__)
def test_an_error_in_any_function_is_raised_on_every_rank(
    world2: World, tmp_path: Path, number: int
) -> None:
    try_all(world2, tmp_path, number, stride=24)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(ACTIONS)), ids=lambda n: ACTIONS[n].__name__)
def test_an_error_in_each_function_is_raised_on_every_rank(
    world2: World, tmp_path: Path, number: int
) -> None:
    try_all(world2, tmp_path, number, stride=1)


def wrong_arguments_on_one_rank(number: int, path: str) -> tuple[str, float]:
    given: Any = torch.nn.Linear(1, 1) if dist.get_rank() == 1 else {"step": 1}
    calls: list[Callable[[], object]] = [
        lambda: vescale_ckpt.save(path, given, timeout=TIMEOUT),
        lambda: save_aside(path, given),
        lambda: vescale_ckpt.load(path, given, timeout=TIMEOUT),
    ]
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        calls[number]()
    return str(raised.value), time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3), ids=["save", "save_aside", "load"])
def test_a_wrong_argument_on_one_rank_is_told_to_all(
    world2: World, tmp_path: Path, number: int
) -> None:
    path = str(tmp_path / "step-1")
    world2.run(save, path)
    for message, seconds in world2.run(wrong_arguments_on_one_rank, number, path):
        assert "expected state to be a dict" in message
        assert "got Linear" in message
        assert "on rank 1" in message
        assert seconds < PROMPTLY_SECONDS


def wrong_patterns_on_one_rank(number: int, path: str) -> tuple[str, float]:
    only: Any = "w" if dist.get_rank() == 1 else ["w"]
    module = torch.nn.Module()
    module.register_buffer("w", torch.zeros(3))
    calls: list[Callable[[], object]] = [
        lambda: vescale_ckpt.load(path, {"w": torch.zeros(3)}, only=only, timeout=TIMEOUT),
        lambda: vescale_ckpt.load_safetensors(f"{path}/tensors.safetensors", module, only=only),
    ]
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        calls[number]()
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("number", range(2), ids=["load", "load_safetensors"])
def test_patterns_that_are_none_on_one_rank_are_told_to_all(
    world2: World, tmp_path: Path, number: int
) -> None:
    path = str(tmp_path / "step-1")
    vescale_ckpt.save(path, {"w": torch.ones(3)})
    for message, seconds in world2.run(wrong_patterns_on_one_rank, number, path):
        assert "expected a list of patterns as only, got the string 'w' (on rank 1)" in message
        assert seconds < PROMPTLY_SECONDS


def options_that_differ(number: int, path: str) -> tuple[str, float]:
    own = dist.get_rank() == 1
    calls: list[Callable[[], object]] = [
        lambda: vescale_ckpt.save(path, state(2), keep_last=1 if own else None, timeout=TIMEOUT),
        lambda: vescale_ckpt.save(
            path, state(2), layout="per_rank" if own else None, timeout=TIMEOUT
        ),
        lambda: vescale_ckpt.load(path, state(0), exchange=own, timeout=TIMEOUT),
        lambda: vescale_ckpt.load(path, state(0), verify_first=own, timeout=TIMEOUT),
    ]
    start = time.monotonic()
    with pytest.raises(MismatchError) as raised:
        calls[number]()
    return str(raised.value), time.monotonic() - start


OPTIONS = {
    "keep_last": "None on rank 0; 1 on rank 1",
    "layout": "'shared' on rank 0; 'per_rank' on rank 1",
    "exchange": "False on rank 0; True on rank 1",
    "verify_first": "False on rank 0; True on rank 1",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_differs_between_ranks_is_told_to_all(
    world2: World, tmp_path: Path, name: str
) -> None:
    path = str(tmp_path / "step-1")
    world2.run(save, path)
    for message, seconds in world2.run(options_that_differ, [*OPTIONS].index(name), path):
        assert f"expected the same {name} on every rank, got {name}={OPTIONS[name]}" in message
        assert seconds < PROMPTLY_SECONDS
