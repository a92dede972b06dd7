"""pytest plugin: worlds of ranks as fixtures, tests for GPUs and for the night."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from ._rank import DeviceType
from ._world import World


def pytest_configure() -> None:
    """Have tests compute with one thread, as ranks do: sums of several have other bits."""
    torch.set_num_threads(1)
    # A process group waits for its threads when it is freed, and a fork has none of them: a
    # worker of a DataLoader that came upon the garbage of an earlier test waited for ever.
    os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a background job of a script, where a test would wait for its interrupt for ever.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if find_spec("hypothesis") is not None:
        from hypothesis import settings

        # By default an example that takes 0.2 s fails: on a machine with other work any may.
        settings.register_profile("untimed", deadline=None)
        settings.load_profile("untimed")


@pytest.fixture(scope="session")
def world1(pytestconfig: pytest.Config) -> Iterator[World]:
    """One gloo rank: a world size of one still has a process group."""
    yield from _world(1, pytestconfig)


@pytest.fixture(scope="session")
def world2(pytestconfig: pytest.Config) -> Iterator[World]:
    """Two gloo ranks."""
    yield from _world(2, pytestconfig)


@pytest.fixture(scope="session")
def world3(pytestconfig: pytest.Config) -> Iterator[World]:
    """Three gloo ranks: most sizes do not divide."""
    yield from _world(3, pytestconfig)


@pytest.fixture(scope="session")
def world4(pytestconfig: pytest.Config) -> Iterator[World]:
    """Four gloo ranks."""
    yield from _world(4, pytestconfig)


@pytest.fixture(scope="session")
def gpu_worlds(pytestconfig: pytest.Config) -> Iterator[dict[int, World]]:
    """One, two and four ranks on GPUs, by their number; for tests marked ``gpu``."""
    with ExitStack() as stack:
        yield {
            ranks: stack.enter_context(contextmanager(_world)(ranks, pytestconfig, "cuda"))
            for ranks in (1, 2, 4)
        }


def _world(
    world_size: int, config: pytest.Config, device_type: DeviceType = "cpu"
) -> Iterator[World]:
    filters = config.getini("filterwarnings")
    world = World(world_size, warning_filters=filters, device_type=device_type)
    yield world
    world.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu``, or that is told to run on one, on a machine that has none."""
    wants_gpu = item.get_closest_marker("gpu") or os.environ.get("VESCALE_TEST_DEVICE") == "cuda"
    if wants_gpu and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End the process group that an example starts, and fail a test that leaves one.

    An example is a program of its own: ``parallelize`` ends its group with the process. Here the
    tests after it are in that process, and those that emulate ranks would find the group.
    """
    was_there = dist.is_initialized()
    try:
        yield
    finally:
        is_left = dist.is_initialized() and not was_there
        if is_left:
            dist.destroy_process_group()
    if is_left and not isinstance(item, pytest.DoctestItem):
        pytest.fail(
            "the test left a default process group behind, which would be that of the tests after "
            "it: end it, or start it in a fixture that does",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)  # before ``-m`` looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark ``nightly`` the variants of tests that their mark ``by_day`` does not name."""
    named: dict[tuple[str, str], bool] = {}
    for item in items:
        if (mark := item.get_closest_marker("by_day")) is None:
            continue
        test, _, variant = item.nodeid.removesuffix("]").partition("[")
        fits = {name: variant == name or fnmatchcase(variant, name) for name in mark.args}
        if not any(fits.values()):
            item.add_marker("nightly")
        for name, fit in fits.items():
            named[test, name] = fit or named.get((test, name), False)
    unknown = [f"{test} has no variant {name!r}" for (test, name), fit in named.items() if not fit]
    if unknown and not any("::" in arg for arg in config.args):  # a part of a test lacks some
        raise pytest.UsageError("by_day: " + "; ".join(unknown))
