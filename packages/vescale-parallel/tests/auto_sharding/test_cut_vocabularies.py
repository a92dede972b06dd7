from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from .candidate_checks import features, found, reasons, x
from .candidate_models import Attention, GroupedQueries, Mlp
from .families import build
from .permutation import permutation

functional = nn.functional


class LookedUpAndContracted(nn.Module):
    """Reads the rows of a table, and multiplies with all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.table(ids))
        return self.last(functional.relu(h @ self.table.weight.T) @ self.table.weight)


def test_rows_that_are_looked_up_are_not_hidden_features() -> None:
    result = found(LookedUpAndContracted(), torch.arange(10).reshape(2, 5))
    assert not result.chosen
    assert any("looked up" in r or "used by a function" in r for _, r in result.rejected)


class NormedEmbedding(nn.Embedding):
    """Returns a function of the rows that is not linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(super().forward(input), (8,))


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 8**0.5


def test_rows_must_leave_their_module_as_a_linear_function() -> None:
    ids = torch.arange(10).reshape(2, 5)
    assert len(found(nn.Sequential(ScaledEmbedding(40, 8), nn.LayerNorm(8)), ids).chosen) == 1
    result = found(nn.Sequential(NormedEmbedding(40, 8), nn.LayerNorm(8)), ids)
    assert not result.chosen
    why = "native_layer_norm in '0' is not linear and comes before that module returns"
    assert any(reason.startswith(why) for reason in reasons(result, "*"))


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight).log_softmax(-1)


def test_scores_that_their_own_module_normalises_are_whole() -> None:
    model = nn.Sequential()
    model.add_module("norm", nn.LayerNorm(8))
    model.add_module("head", Scores())
    result = found(model.double(), x())
    assert not result.chosen
    assert "log_softmax needs all of it in 'head'" in reasons(result, "head.weight")


def test_a_loss_inside_the_model_leaves_its_scores_to_be_cut() -> None:
    model, batch = build("llama")
    result = found(model, batch | {"labels": batch["input_ids"]})
    assert "lm_head.weight" in {name for cut in result.chosen for name in cut.parameters}


def test_what_no_cut_has_may_be_cut_by_columns_and_gathered() -> None:
    result = found(Attention(heads=3, key_heads=3).double(), x(18))
    assert [cut.parameters["qkv.weight"] for cut in result.gathered[:1]] == [Shard(0)]
    assert not any(cut.exits for cut in result.gathered)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.mlp = Mlp()
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.embed(ids)))


def test_a_tied_embedding_is_one_vocabulary_cut_under_both_names() -> None:
    ids = torch.arange(10).reshape(2, 5)
    [cut] = [c for c in found(Tied(), ids).chosen if c.kind == "vocabulary"]
    assert cut.parameters == {"embed.weight": Shard(0), "head.weight": Shard(0)}
    assert (cut.entries, cut.exits) == (("head",), ("embed",))
    assert cut.sharded_numel == 40 * 8


def test_the_rows_of_a_tied_embedding_may_change_places_if_the_ids_do() -> None:
    ids = torch.arange(10).reshape(2, 5)
    model = Tied().double()
    before = model(ids)
    order = permutation(40)
    with torch.no_grad():
        model.embed.weight.copy_(model.embed.weight[order])
    after = model(order.argsort()[ids])
    torch.testing.assert_close(after, before[..., order])


def test_blocks_are_cut_one_by_one() -> None:
    result = found(nn.Sequential(Mlp(), Mlp()).double(), x())
    assert [sorted(cut.parameters)[0] for cut in features(result)] == [
        "0.down.weight",
        "1.down.weight",
    ]


def test_no_parameter_is_cut_twice() -> None:
    result = found(GroupedQueries().double(), x(48))
    names = [name for cut in result.chosen for name in cut.parameters]
    assert len(names) == len(set(names))
    assert result.alternatives


class ReadsRows(nn.Module):
    """Puts a row, or a number of all rows, where a token is that no example has."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor], *, tied: bool) -> None:
        super().__init__()
        self.read = read
        self.table, self.norm = nn.Embedding(40, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 40, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = torch.where((ids == 39)[..., None], self.read(self.table.weight), self.table(ids))
        return self.head(self.norm(h))


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    "read",
    [lambda w: w[3], lambda w: w.mean(0), lambda w: w[:4].sum(0), lambda w: w.norm(dim=0)],
    ids=["row", "mean", "slice", "norm"],
)
def test_a_table_is_whole_of_which_code_reads_rows(
    read: Callable[[torch.Tensor], torch.Tensor], tied: bool
) -> None:
    result = found(ReadsRows(read, tied=tied).double(), torch.arange(10).reshape(2, 5))
    tables = [each for each in result.chosen if each.kind == "vocabulary"]
    cut = {name for candidate in tables for name in candidate.parameters}
    assert cut == (set() if tied else {"head.weight"})
