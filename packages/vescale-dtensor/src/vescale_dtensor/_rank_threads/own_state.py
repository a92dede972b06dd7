"""What every process has of its own, and ranks in one process have to take turns with."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vescale_dtensor._caches import RANKS_OWN
from vescale_dtensor._torch_private import distributed_c10d

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")


class _Part(NamedTuple):
    """One thing of the process: how to take it and to put it back."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


class OwnState:
    """What one rank, or the program that started the ranks, has of the process."""

    def __init__(self) -> None:
        self._taken = [part.get() for part in _parts()]

    def take(self) -> None:
        """Remember how the process is now."""
        self._taken = [part.get() for part in _parts()]

    def put(self) -> None:
        """Make the process as it was."""
        for part, taken in zip(_parts(), self._taken, strict=True):
            part.put(taken)


def put_fresh(rank: int, local_rank: int) -> None:
    """Make the process as it is for a rank that begins, random generators as they are."""
    distributed_c10d._world = _no_groups()
    warnings.filters = list(warnings.filters)
    for own in RANKS_OWN:
        own.put(own.fresh())
    values = (rank, local_rank, 0, rank)
    os.environ.update({n: str(v) for n, v in zip(_RANK_VARIABLES, values, strict=True)})


def _no_groups() -> Any:
    """Return what torch.distributed knows of a process's groups, when there are none."""
    return SimpleNamespace(
        default_pg=None,
        pg_map={},
        pg_names={},
        pg_group_ranks={},
        pg_backend_config={},
        group_count=0,
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        pg_flight_recorder_hooks={},  # newer than torch 2.13
        pg_config_info=[],
        comms=[],
    )


def _parts() -> list[_Part]:
    return [*_PARTS, *(_Part(own.get, own.put) for own in RANKS_OWN)]


def _cuda_generators() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _put_cuda_generators(states: list[torch.Tensor]) -> None:
    if states:
        torch.cuda.set_rng_state_all(states)


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _put_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


def _deterministic() -> tuple[bool, bool]:
    is_on = torch.are_deterministic_algorithms_enabled()
    return is_on, torch.is_deterministic_algorithms_warn_only_enabled()


def _put_deterministic(flags: tuple[bool, bool]) -> None:
    if flags != _deterministic():
        torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])


def _put_dtype(dtype: torch.dtype) -> None:
    if dtype != torch.get_default_dtype():
        torch.set_default_dtype(dtype)


def _put_warning_filters(filters: Any) -> None:
    is_equal = filters == warnings.filters
    warnings.filters = filters
    if not is_equal:
        # What was shown once is remembered until filters change.
        warnings._filters_mutated()  # pyright: ignore[reportAttributeAccessIssue]: not in the stubs


def _environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _RANK_VARIABLES}


def _put_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _put_main(module: Any) -> None:
    sys.modules["__main__"] = module


def _put_world(world: Any) -> None:
    distributed_c10d._world = world


_PARTS = (
    _Part(torch.get_rng_state, torch.set_rng_state),
    _Part(_cuda_generators, _put_cuda_generators),
    _Part(random.getstate, random.setstate),
    _Part(_numpy_state, _put_numpy_state),
    _Part(torch.get_default_dtype, _put_dtype),
    _Part(_deterministic, _put_deterministic),
    _Part(lambda: warnings.filters, _put_warning_filters),
    _Part(_environment, _put_environment),
    _Part(lambda: sys.modules["__main__"], _put_main),
    _Part(lambda: distributed_c10d._world, _put_world),
)
