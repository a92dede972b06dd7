"""Values of which every rank has its own, and random number generators."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale_ckpt
from vescale_ckpt import CheckpointError, MismatchError, PerRank, RngState
from vescale_testing import World


class Counter:
    """A loader that counts where its rank is."""

    def __init__(self, position: int) -> None:
        self.position = torch.tensor([position])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "name": "counter"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def own_state(rank: int) -> dict[str, Any]:
    return {
        "seed": PerRank({"words": torch.arange(3) + 10 * rank, "order": [rank, "x"]}),
        "loader": PerRank(Counter(100 + rank)),
        "same": PerRank((torch.ones(2), 7)),
        "model": {"w": torch.ones(2)},
    }


def empty_state() -> dict[str, Any]:
    return {
        "seed": PerRank({"words": torch.zeros(3, dtype=torch.int64), "order": None}),
        "loader": PerRank(Counter(-1)),
        "same": PerRank((torch.zeros(2), 0)),
        "model": {"w": torch.zeros(2)},
    }


def save_own(path: str, in_background: bool = False) -> None:
    state = own_state(dist.get_rank())
    if in_background:
        with vescale_ckpt.AsyncSaver() as saver:
            saver.save(path, state)
            state["seed"].value["words"].fill_(-1)
    else:
        vescale_ckpt.save(path, state)


def load_own(path: str) -> list[Any]:
    loaded = vescale_ckpt.load(path, empty_state())
    return summary(loaded)


def summary(loaded: dict[str, Any]) -> list[Any]:
    seed, same = loaded["seed"].value, loaded["same"].value
    position = loaded["loader"].value.position.tolist()
    return [seed["words"].tolist(), seed["order"], position, same[0].tolist(), same[1]]


def expected(rank: int) -> list[Any]:
    words = [10 * rank, 10 * rank + 1, 10 * rank + 2]
    return [words, [rank, "x"], [100 + rank], [1.0, 1.0], 7]


@pytest.mark.parametrize("in_background", [False, True])
def test_each_rank_gets_its_own_value_back(
    world2: World, tmp_path: Path, in_background: bool
) -> None:
    world2.run(save_own, str(tmp_path / "ckpt"), in_background)
    assert world2.run(load_own, str(tmp_path / "ckpt")) == [expected(0), expected(1)]


def test_another_number_of_ranks_gets_only_what_was_the_same_on_all(
    world2: World, tmp_path: Path
) -> None:
    world2.run(save_own, str(tmp_path / "ckpt"))
    with pytest.raises(MismatchError) as caught:
        vescale_ckpt.load(tmp_path / "ckpt", empty_state())
    lines = str(caught.value).splitlines()
    assert "missing in the checkpoint: seed for 1 ranks: each of 2 ranks has saved" in str(
        caught.value
    )
    assert not any("same" in line for line in lines)
    with pytest.warns(UserWarning, match="missing in the checkpoint, left as it is: seed"):
        loaded = vescale_ckpt.load(tmp_path / "ckpt", empty_state(), strict=False)
    assert summary(loaded) == [[0, 0, 0], None, [-1], [1.0, 1.0], 7]
    assert bool((loaded["model"]["w"] == 1).all())


def test_what_one_rank_has_saved_goes_to_every_rank(world2: World, tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", own_state(5))
    assert world2.run(load_own, str(tmp_path / "ckpt")) == [expected(5), expected(5)]


def test_a_value_per_rank_and_one_for_all_are_not_mistaken_for_each_other(
    tmp_path: Path,
) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"a": PerRank(1), "b": 1, "c": {"d": PerRank(2)}})
    for given in ({"a": 0}, {"b": PerRank(0)}):
        with pytest.raises(MismatchError, match="has a value per rank"):
            vescale_ckpt.load(tmp_path / "ckpt", given)
    with pytest.raises(MismatchError, match="was saved for each rank"):
        vescale_ckpt.load(tmp_path / "ckpt", {"c": None})


def test_a_value_per_rank_is_left_alone_if_not_asked_for(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", own_state(3))
    loaded = vescale_ckpt.load(tmp_path / "ckpt", empty_state(), only=["model", "same"])
    assert summary(loaded) == [[0, 0, 0], None, [-1], [1.0, 1.0], 7]


def test_a_value_per_rank_within_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'a' is a PerRank in a PerRank"):
        vescale_ckpt.save(tmp_path / "ckpt", {"a": PerRank([PerRank(1)])})


def different_shapes(path: str) -> str:
    state = {"x": PerRank(torch.zeros(dist.get_rank() + 1))}
    try:
        vescale_ckpt.save(path, state)
    except MismatchError as error:
        return str(error)
    return ""


def test_tensors_of_different_shapes_are_refused(world2: World, tmp_path: Path) -> None:
    messages = world2.run(different_shapes, str(tmp_path / "ckpt"))
    assert all("tensor 'x'" in message for message in messages)


def draws() -> list[float]:
    torch_values = [*torch.rand(2).tolist(), *torch.randn(3).tolist()]
    return [*torch_values, random.random(), random.gauss(0, 1), *np.random.standard_normal(3)]


def test_all_generators_go_on_where_they_were(tmp_path: Path) -> None:
    draws()
    vescale_ckpt.save(tmp_path / "ckpt", {"rng": RngState()})
    wanted = draws()
    draws()
    vescale_ckpt.load(tmp_path / "ckpt", {"rng": RngState()})
    assert draws() == wanted


def train(steps: int, path: str | None, *, resume: bool) -> list[float]:
    """Train with dropout and shuffled data, and save after two steps or go on from there."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "rng": RngState()}
    if resume:
        torch.manual_seed(99)
        vescale_ckpt.load(str(path), state)
    losses: list[float] = []
    for step in range(steps):
        loss = model(torch.rand(4, 8)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1 and path and not resume:
            vescale_ckpt.save(path, state)
    return losses


def losses_before_and_after(path: str) -> tuple[list[float], list[float]]:
    return train(5, path, resume=False), train(3, path, resume=True)


def test_training_with_dropout_goes_on_bit_for_bit(world2: World, tmp_path: Path) -> None:
    results = world2.run(losses_before_and_after, str(tmp_path / "ckpt"))
    assert all(whole[2:] == resumed for whole, resumed in results)
    assert results[0] != results[1]


def save_generators(path: str, torch_alike: bool) -> None:
    """Save generators as ordinary processes have them: Python's are seeded by each of them."""
    rank = torch.distributed.get_rank()
    random.seed(rank)
    torch.manual_seed(5 if torch_alike else rank)
    vescale_ckpt.save(path, {"rng": RngState()})


def test_generators_go_on_on_another_number_of_ranks_but_for_those_that_processes_seed(
    world2: World, tmp_path: Path
) -> None:
    world2.run(save_generators, str(tmp_path / "ckpt"), True)
    before = random.getstate()
    expected = r"not loaded: rng.python for 1 ranks: each of 2 ranks has saved a value of its own"
    with pytest.warns(UserWarning, match=expected):
        vescale_ckpt.load(tmp_path / "ckpt", {"rng": RngState()})
    assert random.getstate() == before
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_generators_of_torch_that_differ_are_refused_on_another_number_of_ranks(
    world2: World, tmp_path: Path
) -> None:
    world2.run(save_generators, str(tmp_path / "ckpt"), False)
    with pytest.raises(MismatchError, match=r"rng\.torch for 1 ranks"):
        vescale_ckpt.load(tmp_path / "ckpt", {"rng": RngState()})


@pytest.mark.gpu
def test_the_generator_of_the_gpu_goes_on_where_it_was(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"rng": RngState()})
    wanted = torch.rand(5, device="cuda")
    vescale_ckpt.load(tmp_path / "ckpt", {"rng": RngState()})
    assert torch.equal(torch.rand(5, device="cuda"), wanted)
