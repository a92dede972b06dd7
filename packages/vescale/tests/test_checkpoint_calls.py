"""A checkpoint call that is wrong on one rank alone keeps no other waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testing import World

PROMPTLY_SECONDS = 20.0


class Unready(nn.Linear):
    """A module that cannot say what it holds."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise LookupError("it is not ready")


class Case(NamedTuple):
    """A call that is right but for what rank 1 gives it."""

    call: Callable[..., object]
    wrong: Callable[[], dict[str, Any]]
    own: type[Exception]
    text: str


def export(path: str, model: Any = None, **options: Any) -> None:
    vescale.export(model or nn.Linear(4, 2), options.pop("directory", path), **options)


def load_pretrained(path: str, model: Any = None, **options: Any) -> None:
    vescale.load_pretrained(model or nn.Linear(4, 2), options.pop("directory", path), **options)


def save(path: str, state: Any = None, **options: Any) -> None:
    vescale.save(options.pop("directory", f"{path}/step-1"), state or {"step": 1}, **options)


def load(path: str, state: Any = None, **options: Any) -> None:
    vescale.load(options.pop("directory", f"{path}/step-1"), state or {"step": 1}, **options)


def deferred() -> nn.Module:
    return vescale.deferred_init(nn.Linear, 4, 2)


TOLD = vescale.CheckpointError
CASES = {
    "export-no-module": Case(export, lambda: {"model": {"w": 1}}, TypeError, "expected a module"),
    "export-deferred": Case(export, lambda: {"model": deferred()}, TypeError, "a deferred one"),
    "export-size": Case(
        export, lambda: {"max_shard_size": "5 apples"}, ValueError, "expected max_shard_size"
    ),
    "export-state": Case(export, lambda: {"model": Unready(4, 2)}, LookupError, "not ready"),
    "export-path": Case(export, lambda: {"directory": 3}, TOLD, "on rank 1"),
    "load-no-module": Case(
        load_pretrained, lambda: {"model": {"w": 1}}, TypeError, "expected a module"
    ),
    "load-deferred": Case(
        load_pretrained, lambda: {"model": deferred()}, TypeError, "a deferred one"
    ),
    "load-only": Case(load_pretrained, lambda: {"only": "weight"}, TOLD, "expected a list"),
    "load-state": Case(load_pretrained, lambda: {"model": Unready(4, 2)}, TOLD, "not ready"),
    "load-path": Case(load_pretrained, lambda: {"directory": 3}, TOLD, "on rank 1"),
    "save-state": Case(save, lambda: {"state": nn.Linear(1, 1)}, TOLD, "to be a dict"),
    "save-path": Case(save, lambda: {"directory": 3}, TOLD, "expected path to be a path"),
    "save-keep-last": Case(save, lambda: {"keep_last": 1}, TOLD, "the same keep_last"),
    "restore-state": Case(load, lambda: {"state": nn.Linear(1, 1)}, TOLD, "to be a dict"),
    "restore-rename": Case(load, lambda: {"rename": {"(": "x"}}, TOLD, "on rank 1"),
}


def outcome(name: str, path: str) -> tuple[type[Exception] | None, str, float]:
    case, start = CASES[name], time.monotonic()
    try:
        case.call(path, **(case.wrong() if dist.get_rank() == 1 else {}))
    except Exception as error:
        return type(error), str(error), time.monotonic() - start
    return None, "", 0.0


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_on_one_rank_is_told_to_all(
    world2: World, tmp_path: Path, name: str
) -> None:
    vescale.export(nn.Linear(4, 2), tmp_path)
    vescale.save(tmp_path / "step-1", {"step": 1})
    other, own = world2.run(outcome, name, str(tmp_path))
    assert own[0] is not None
    assert issubclass(own[0], CASES[name].own), own
    assert other[0] is not None
    assert issubclass(other[0], vescale.CheckpointError), other
    for _, text, seconds in (other, own):
        assert CASES[name].text in text
        assert seconds < PROMPTLY_SECONDS
    assert "rank 1" in other[1]


def right_after_wrong(path: str) -> torch.Tensor:
    for call in (export, load_pretrained):
        with pytest.raises((TypeError, vescale.CheckpointError)):
            call(path, {"w": 1} if dist.get_rank() == 1 else None)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    vescale.export(model, path)
    other = nn.Linear(4, 2)
    vescale.load_pretrained(other, path)
    return other.weight.detach() - model.weight.detach()


def test_ranks_export_and_load_after_one_was_wrong(world2: World, tmp_path: Path) -> None:
    for difference in world2.run(right_after_wrong, str(tmp_path)):
        assert not difference.any()
