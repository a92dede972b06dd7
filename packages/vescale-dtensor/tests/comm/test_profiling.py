"""Ranges in profiles, and what process groups are called there."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import CommCounter, all_gather, all_reduce, name_group, profiler_range
from vescale_dtensor._comm import profiling
from vescale_testing import World


def ranges_of(profile: torch.profiler.profile) -> set[str]:
    return {e.key for e in profile.key_averages() if e.key.startswith("vescale: ")}


def test_a_range_has_its_name_while_a_profiler_runs() -> None:
    with torch.profiler.profile() as profile, profiler_range("step", 3):
        torch.ones(2).add(1)
    assert ranges_of(profile) == {"vescale: step 3"}


class Unprintable:
    """A word that nobody may ask for its text."""

    def __str__(self) -> str:
        raise AssertionError("asked for")


def test_without_a_profiler_nothing_is_made_or_named() -> None:
    assert profiler_range(Unprintable()) is profiler_range(Unprintable())


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops such ranges")
def test_a_range_may_end_on_another_thread() -> None:
    with torch.profiler.profile() as profile:
        span = profiler_range("backward")
        span.__enter__()
        thread = threading.Thread(target=span.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
    assert ranges_of(profile) == {"vescale: backward"}


@pytest.mark.gpu
def test_nvtx_ranges_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.ones(1, device="cuda")
    monkeypatch.setattr(profiling, "_UNDER_NSYS", True)
    with profiler_range("step"):
        torch.ones(2, device="cuda").add(1)


def _named() -> tuple[set[str], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = dist.new_group([0, 1, 2, 3])
    assert isinstance(own, dist.ProcessGroup)
    with torch.profiler.profile() as profile, CommCounter() as counter:
        all_gather(torch.ones(2), mesh, axes="tp")
        all_gather(torch.ones(2), mesh.get_group("dp"))
        all_reduce(torch.ones(2), mesh, axes=("dp", "tp"), order="library")
        all_gather(torch.ones(2), own)
        name_group(own, "everyone")
        all_gather(torch.ones(2), own)
    return ranges_of(profile), [event.over for event in counter.events]


def test_collectives_are_called_by_their_axes(world4: World) -> None:
    for ranges, told in world4.run(_named):
        assert told == ["tp", "dp", "dp+tp", "group", "everyone"]
        assert ranges == {
            "vescale: all_gather over tp",
            "vescale: all_gather over dp",
            "vescale: all_reduce over dp+tp",
            "vescale: all_gather over group",
            "vescale: all_gather over everyone",
        }


def _named_in_a_second_job() -> list[str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    told: list[str] = []
    for job in ("first", "second"):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        mesh = init_device_mesh("cpu", (2,))
        name_group(world, job)
        all_gather(torch.ones(2), mesh)  # the first use of a mesh of the job
        with CommCounter() as counter:
            all_gather(torch.ones(2), world)
        told += [event.over for event in counter.events]
        dist.destroy_process_group()
    return told


def test_a_name_of_a_second_job_is_not_forgotten_with_the_first() -> None:
    assert _named_in_a_second_job() == ["first", "second"]
