"""Loads of a part of a checkpoint, under other names, and in other dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, MismatchError
from vescale_dtensor import distribute_tensor
from vescale_testing import World


def state(fill: float = 0.0) -> dict[str, Any]:
    return {
        "model": {
            "a.weight": torch.full((4, 3), fill),
            "a.bias": torch.full((3,), fill),
            "b.weight": torch.full((2,), fill),
        },
        "moments": {"a": {"m": torch.full((3,), fill)}},
        "progress": {"step": int(fill), "best": [fill, fill]},
        "name": f"run {fill}",
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    vescale_ckpt.save(tmp_path / "ckpt", state(7.0))
    return tmp_path / "ckpt"


def filled(loaded: dict[str, Any]) -> set[str]:
    """Return the keys of all leaves that were loaded."""
    tensors = {f"model.{key}": value for key, value in loaded["model"].items()}
    tensors["moments.a.m"] = loaded["moments"]["a"]["m"]
    keys = {key for key, value in tensors.items() if bool((value == 7).all())}
    values = {
        "step": loaded["progress"]["step"] == 7,
        "best": loaded["progress"]["best"] == [7, 7],
    }
    keys |= {f"progress.{key}" for key, yes in values.items() if yes}
    return keys | ({"name"} if loaded["name"] == "run 7.0" else set())


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["model"], {"model.a.weight", "model.a.bias", "model.b.weight"}),
        (["model.a"], {"model.a.weight", "model.a.bias"}),
        ([r".*\.weight", "name"], {"model.a.weight", "model.b.weight", "name"}),
        (["moments", r"progress\.step"], {"moments.a.m", "progress.step"}),
        (["progress"], {"progress.step", "progress.best"}),
        ([], set[str]()),
    ],
)
def test_only_what_is_asked_for_is_loaded(
    saved: Path, only: list[str], expected: set[str]
) -> None:
    assert filled(vescale_ckpt.load(saved, state(), only=only)) == expected


def test_objects_of_which_nothing_is_wanted_are_not_touched(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    saved = {"model": model, "optimizer": optimizer, "more": {"scheduler": scheduler, "n": 1}}
    vescale_ckpt.save(tmp_path / "ckpt", saved)
    other = nn.Linear(2, 2)
    fresh = torch.optim.SGD(other.parameters(), lr=9.0)
    later = torch.optim.lr_scheduler.StepLR(fresh, 5)
    given: dict[str, Any] = {
        "model": other,
        "optimizer": fresh,
        "more": {"scheduler": later, "n": 0},
    }
    loaded = vescale_ckpt.load(tmp_path / "ckpt", given, only=["model"])
    assert torch.equal(other.weight, model.weight)
    assert fresh.param_groups[0]["lr"] == 9.0
    assert (later.step_size, loaded["more"]["n"]) == (5, 0)
    vescale_ckpt.load(tmp_path / "ckpt", given, only=[r"more\.scheduler"])
    assert (later.step_size, given["more"]["n"]) == (3, 0)


def test_an_optimizer_gets_the_wanted_part_of_its_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    vescale_ckpt.save(tmp_path / "ckpt", {"optimizer": optimizer})
    fresh = torch.optim.Adam(model.parameters(), lr=9.0)
    vescale_ckpt.load(tmp_path / "ckpt", {"optimizer": fresh}, only=[r"optimizer\.state"])
    assert fresh.param_groups[0]["lr"] == 9.0
    for parameter in model.parameters():
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[parameter][name], value)


def test_a_pattern_that_matches_nothing_is_an_error_if_strict(saved: Path) -> None:
    patterns: dict[str, Any] = {"only": ["model", "modle"], "rename": {r"encoder\..*": "x"}}
    with pytest.raises(MismatchError, match=r"(?s)rename 'encoder.*only 'modle' matches nothing"):
        vescale_ckpt.load(saved, state(), **patterns)
    with pytest.warns(UserWarning, match=r"(?s)rename 'encoder.*only 'modle' matches nothing"):
        loaded = vescale_ckpt.load(saved, state(), strict=False, **patterns)
    assert len(filled(loaded)) == 3


def test_missing_and_unexpected_keys_outside_the_part_do_not_count(saved: Path) -> None:
    given: dict[str, Any] = {
        "model": {"a.weight": torch.zeros(4, 3), "new": torch.zeros(1)},
        "extra": 5,
    }
    vescale_ckpt.load(saved, given, only=[r"model\.a\.weight"])
    assert bool((given["model"]["a.weight"] == 7).all())
    with pytest.raises(MismatchError) as caught:
        vescale_ckpt.load(saved, given, only=["model"])
    for text in ("missing in the checkpoint: model.new", "unexpected in the checkpoint: model.b"):
        assert text in str(caught.value)
    assert "extra" not in str(caught.value)


@pytest.mark.parametrize("only", ["model", ["("]])
def test_patterns_that_are_none_are_refused(saved: Path, only: Any) -> None:
    with pytest.raises(ValueError, match=r"only|regular expression"):
        vescale_ckpt.load(saved, state(), only=only)


def test_keys_are_renamed_by_the_first_rule_that_matches(saved: Path) -> None:
    given: dict[str, Any] = {
        "net": {"first": {"weight": torch.zeros(4, 3)}, "last.bias": torch.zeros(3)},
        "moments": {"a": {"m": torch.zeros(3)}},
        "iteration": -1,
    }
    rules = {
        r"model\.a\.weight": r"net.first.weight",
        r"model\.a\.(.*)": r"net.last.\1",
        r"progress\.step": "iteration",
    }
    with pytest.raises(MismatchError) as caught:
        vescale_ckpt.load(saved, given, rename=rules)
    for key in ("model", "progress", "name"):
        assert f"unexpected in the checkpoint: {key}\n" in str(caught.value)
    only = ["net", "moments", "iteration"]
    loaded = vescale_ckpt.load(saved, given, rename=rules, only=only)
    assert bool((given["net"]["first"]["weight"] == 7).all())
    assert bool((given["net"]["last.bias"] == 7).all())
    assert bool((given["moments"]["a"]["m"] == 7).all())
    assert loaded["iteration"] == 7


def test_a_dict_of_which_all_was_renamed_is_not_unexpected(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "c", {"old": {"a": torch.ones(2), "b": {"c": 5}}})
    given: dict[str, Any] = {"new": {"a": torch.zeros(2), "b": {"c": 0}}}
    assert vescale_ckpt.load(tmp_path / "c", given, rename={r"old\.(.*)": r"new.\1"})["new"][
        "b"
    ] == {"c": 5}


def test_a_module_is_filled_under_other_names(tmp_path: Path) -> None:
    module = nn.ModuleDict({"body": nn.Linear(4, 3)})
    source = nn.ModuleDict({"trunk": nn.Linear(4, 3)})
    vescale_ckpt.save(tmp_path / "module", {"model": source})
    rules = {r"model\.trunk\.(.*)": r"model.body.\1"}
    vescale_ckpt.load(tmp_path / "module", {"model": module}, rename=rules)
    for name, value in module["body"].state_dict().items():
        assert torch.equal(value, source["trunk"].state_dict()[name])


def test_renamed_keys_that_do_not_fit_are_reported_together(saved: Path) -> None:
    given = {"model": {"a.weight": torch.zeros(4, 3)}}
    rules = {r"model\.a\.weight": "model.c", r"model\.b\.weight": "model.d"}
    with pytest.raises(MismatchError) as caught:
        vescale_ckpt.load(saved, given, rename=rules)
    lines = str(caught.value).splitlines()
    assert "missing in the checkpoint: model.a.weight" in lines
    assert "unexpected in the checkpoint: model.a.bias" in lines
    assert "unexpected in the checkpoint: model.c" in lines
    assert "unexpected in the checkpoint: model.d" in lines


@pytest.mark.parametrize("rules", [{r"model\.a\..*": "model.x"}, {r"model\.a\.bias": "name"}])
def test_two_keys_of_one_name_are_refused(saved: Path, rules: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="two items of the checkpoint are called"):
        vescale_ckpt.load(saved, state(), rename=rules)


def test_dtypes_are_converted_if_asked_for(tmp_path: Path) -> None:
    source = {"w": torch.randn(300, 70), "i": torch.arange(5), "flag": torch.tensor(True)}
    vescale_ckpt.save(tmp_path / "ckpt", source)
    given = {
        "w": torch.zeros(300, 70, dtype=torch.bfloat16),
        "i": torch.zeros(5, dtype=torch.float64),
        "flag": torch.tensor(0),
    }
    message = r"torch\.float32 of shape \(300, 70\).*; cast=True converts dtypes\n"
    with pytest.raises(MismatchError, match=message):
        vescale_ckpt.load(tmp_path / "ckpt", given)
    vescale_ckpt.load(tmp_path / "ckpt", given, cast=True)
    for key, tensor in source.items():
        assert torch.equal(given[key], tensor.to(given[key].dtype))


@pytest.mark.parametrize(
    ("stored", "here"),
    [(torch.float32, torch.int64), (torch.complex64, torch.float32), (torch.int64, torch.bool)],
)
def test_a_conversion_to_another_kind_is_refused(
    tmp_path: Path, stored: torch.dtype, here: torch.dtype
) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"w": torch.ones(2, dtype=stored)})
    with pytest.raises(MismatchError, match="holds"):
        vescale_ckpt.load(tmp_path / "ckpt", {"w": torch.ones(2, dtype=here)}, cast=True)


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (torch.tensor([300, -2]), torch.int8),
        (torch.tensor([3, -2]), torch.uint8),
        (torch.tensor([3, 1 << 40]), torch.int32),
        (torch.tensor([3, (1 << 64) - 1], dtype=torch.uint64), torch.int64),
    ],
)
def test_integers_are_not_wrapped_around(
    tmp_path: Path, stored: torch.Tensor, here: torch.dtype
) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"net": {"ids": stored}, "w": torch.ones(2)})
    given = {"net": {"ids": torch.zeros(2, dtype=here)}, "w": torch.zeros(2)}
    with pytest.raises(MismatchError, match=r"'net\.ids': the checkpoint holds -?\d+ of torch\."):
        vescale_ckpt.load(tmp_path / "ckpt", given, cast=True)


def test_integers_that_fit_become_narrower(tmp_path: Path) -> None:
    stored = torch.tensor([-128, 0, 127])
    vescale_ckpt.save(tmp_path / "ckpt", {"ids": stored})
    for dtype in (torch.int8, torch.int32, torch.float16, torch.complex64):
        given = torch.zeros(3, dtype=dtype)
        vescale_ckpt.load(tmp_path / "ckpt", {"ids": given}, cast=True)
        assert torch.equal(given, stored.to(dtype))


def load_part(path: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    zeros = torch.zeros(4, 3, dtype=torch.float64)
    given = {"net": {"w": distribute_tensor(zeros, mesh, (Shard(1),))}}
    rules = {r"model\.a\.weight": "net.w"}
    vescale_ckpt.load(path, given, only=["net"], rename=rules, cast=True)
    return bool((given["net"]["w"].to_local() == 7).all())


def test_ranks_load_their_shards_of_a_part_under_other_names(world2: World, saved: Path) -> None:
    assert world2.run(load_part, str(saved)) == [True, True]
