"""What the search looks at, and what it does not have to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_planner import Cluster, generate_plan
from vescale_planner._search import sharding
from vescale_planner._search.search import Search
from vescale_planner._space.candidates import Candidate, Rows, candidates
from vescale_planner._space.layouts import Layout
from vescale_planner._workload import few_tokens, workload_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(6 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, vocabulary: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NormedBlock(Block):
    """Its norm is over all of what tensor-parallel ranks have parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


class GatedNorm(nn.Module):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return nn.functional.rms_norm(x * gate.sigmoid(), (6 * WIDTH,))


class GatedBlock(Block):
    """Its norm is called with features and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = GatedNorm(), nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x), self.gate(x)).relu())


@pytest.mark.parametrize(("block", "gathers"), [(NormedBlock, 2), (GatedBlock, 3)])
def test_what_is_gathered_around_norms_is_priced(block: type[nn.Module], gathers: int) -> None:
    model = Net()
    model.layers = nn.ModuleList(block() for _ in range(4))
    ids = torch.zeros(2, 5, dtype=torch.long)
    plan = propose_sharding(model, "auto", 2, example_batch=ids).plan
    assert plan["layers.*.norm.<whole>"] == "Shard(2)"

    def sent(sharding: dict[str, str]) -> float:
        cluster = replace(Cluster.preset("h200"), intra_latency_seconds=0.0)
        search = Search(model, workload_of(model, ids), cluster, {}, 2, "flops")
        search.shard(2, sharding)
        fastest = search.run(2).fits
        candidate = next(each.candidate for each in fastest if each.candidate.layout.tp == 2)
        return search.cost(candidate).tensor_parallel

    without = {pattern: text for pattern, text in plan.items() if "<whole" not in pattern}
    # Gathers are of 6 widths; all else that a block sends, with its part of the ends, is of 9.
    assert sent(plan) == pytest.approx((1 + gathers * 6 / 9) * sent(without))


def _virtual_stages(pp: int, num_blocks: int) -> set[int]:
    found = candidates(
        Layout(1, pp, 1),
        Rows(global_size=8 * pp, example=1),
        [f"blocks.{i}" for i in range(num_blocks)],
        {},
    )
    return {each.virtual_stages for each in found if isinstance(each, Candidate)}


@pytest.mark.parametrize(
    ("pp", "num_blocks", "expected"),
    [
        # Megatron-LM's 175B and 530B, NeMo's 405B: 3, 6, 12 and 7 are published.
        (8, 96, {1, 2, 3, 4, 6, 12}),
        (35, 105, {1, 2, 3}),
        (9, 126, {1, 2, 7, 14}),
        (4, 7, {1}),
        # Llama 3's 405B: two layers a stage, and one on the first and the last.
        (16, 126, {1, 2, 4}),
    ],
)
def test_a_rank_has_any_number_of_equal_stages(
    pp: int, num_blocks: int, expected: set[int]
) -> None:
    assert _virtual_stages(pp, num_blocks) == expected


def test_only_what_is_returned_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    find = propose_sharding

    def counted(model: nn.Module, policy: str, size: int, **options: Any) -> Any:
        asked.append(size)
        return find(model, policy, size, **options)  # pyright: ignore[reportArgumentType]: a policy

    monkeypatch.setattr(sharding, "propose_sharding", counted)
    ids = torch.zeros(4, 5, dtype=torch.long)
    only = {"pipeline_parallel.size": 1}
    cluster = Cluster.preset("h200")
    plan = generate_plan(Net(), only, world_size=64, cluster=cluster, example_batch=ids)
    # The first size shows what can be cut; the others are priced by it.
    assert set(asked) == {2, plan.tensor_parallel.size} - {1}
    assert len(asked) == len(set(asked))


def test_what_cannot_be_sharded_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refused(*given: Any, **options: Any) -> Any:
        asked.append(given[2])
        raise ValueError("no way")

    monkeypatch.setattr(sharding, "propose_sharding", refused)
    model, ids = Net(), torch.zeros(4, 5, dtype=torch.long)
    search = Search(model, workload_of(model, ids), Cluster.preset("h200"), {}, 2, "flops", ids)
    given = {"tensor_parallel.sequence": True}
    for each in (search, replace(search, accumulates=True)):
        assert each.under(given, keeps_sharding=False).sharding(2) == "no way"
    assert asked == [2]
    assert search.under({}, keeps_sharding=False).sharding(2) == "no way"
    assert asked == [2, 2]


def test_a_size_that_cannot_be_is_refused_though_it_was_priced() -> None:
    ids = torch.zeros(5, 5, dtype=torch.long)
    only = {"pipeline_parallel.size": 1, "tensor_parallel.size": 5}
    with pytest.raises(ValueError, match="no plan obeys the constraints"):
        generate_plan(Net(), only, world_size=5, cluster=Cluster.preset("h200"), example_batch=ids)


def test_a_small_example_is_run_as_it_is() -> None:
    ids = torch.zeros(2, 100, dtype=torch.long)
    assert few_tokens(ids, workload_of(Net(), ids)) is ids


def test_of_large_logits_only_the_first_tokens_are_run() -> None:
    ids = torch.zeros(2, 2048, dtype=torch.long)
    with torch.device("meta"):
        workload = workload_of(Net(2**16), ids)
    batch = {"ids": ids, "others": [ids, 3, ids.float()[None]]}
    found = few_tokens(batch, workload)
    assert found["ids"].shape == (2, 64)
    assert found["others"][0].shape == (2, 64)
    assert found["others"][1:] == [3, batch["others"][2]]


def _sharded(dp: int, **constraints: Any) -> set[tuple[int, int, bool, bool]]:
    given = {key.replace("__", "."): value for key, value in constraints.items()}
    found = candidates(Layout(1, 1, dp), Rows(global_size=2 * dp, example=1), [*"abcd"], given)
    return {
        (each.zero_stage, each.replicate, each.reshards, each.shares_state)
        for each in found
        if isinstance(each, Candidate)
    }


def test_copies_share_state_and_blocks_stay_gathered_under_stage_3_alone() -> None:
    of_3 = {
        (3, 1, True, False), (3, 1, False, False),
        (3, 2, True, False), (3, 2, True, True), (3, 2, False, False),
    }  # fmt: skip
    others = {(0, 1, True, False), *((z, c, True, False) for z in (1, 2) for c in (1, 2))}
    assert _sharded(4) == of_3 | others
    freed = {each for each in of_3 if each[2]}
    assert _sharded(4, data_parallel__reshard_after_forward=True) == freed | others
    offloaded = _sharded(4, data_parallel__zero_stage=3, data_parallel__offload="optimizer")
    assert offloaded == {(3, 1, True, False), (3, 2, True, False)}
    alone = _sharded(4, data_parallel__replicate_size=4, data_parallel__zero_stage=3)
    assert alone == {(3, 4, True, False)}
