"""Tests of what the plugin marks, and of what it ends."""

from __future__ import annotations

import pytest

pytest_plugins = "pytester"

TESTS = """
import pytest

@pytest.mark.by_day("small", "large-*")
@pytest.mark.parametrize("size", ["small", "middle", "large-1", "large-2"])
def test_sizes(size):
    pass

def test_without():
    pass
"""


@pytest.fixture
def tests(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with tests of which some run with every change."""
    pytester.makeini("[pytest]\nmarkers =\n  by_day: one\n  nightly: two")
    pytester.makepyfile(test_sizes=TESTS)
    return pytester


def test_variants_that_are_not_named_are_of_the_night(tests: pytest.Pytester) -> None:
    by_day = tests.runpytest_inprocess("-m", "not nightly")
    by_day.assert_outcomes(passed=4, deselected=1)
    at_night = tests.runpytest_inprocess("-m", "nightly")
    at_night.assert_outcomes(passed=1, deselected=4)


def test_a_variant_can_be_run_alone(tests: pytest.Pytester) -> None:
    alone = tests.runpytest_inprocess("test_sizes.py::test_sizes[small]")
    alone.assert_outcomes(passed=1)


def test_a_name_that_no_variant_has_is_an_error(tests: pytest.Pytester) -> None:
    tests.makepyfile(test_sizes=TESTS.replace('"small", "large-*"', '"smal"'))
    failed = tests.runpytest_inprocess()
    assert failed.ret == pytest.ExitCode.USAGE_ERROR
    failed.stderr.fnmatch_lines(["*by_day: test_sizes.py::test_sizes has no variant 'smal'*"])


LEAVING = """
import torch.distributed as dist
from torch.distributed import HashStore

def start():
    \"""Start a group, as an example does that runs alone.

    >>> start()
    \"""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

def test_of_a_start():
    start()

def test_that_fails_after_a_start():
    start()
    raise ValueError

def test_of_what_is_left():
    assert not dist.is_initialized()
"""


def test_a_process_group_ends_with_its_example_and_fails_its_test(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_leaving=LEAVING)
    found = pytester.runpytest_inprocess("--doctest-modules")
    found.assert_outcomes(passed=2, failed=2)
    found.stdout.fnmatch_lines(["*the test left a default process group behind*", "*ValueError*"])


def test_examples_of_hypothesis_are_not_timed() -> None:
    # The packages' own tests have it; these need nothing but pytest and torch.
    hypothesis = pytest.importorskip("hypothesis")
    assert hypothesis.settings.default.deadline is None
