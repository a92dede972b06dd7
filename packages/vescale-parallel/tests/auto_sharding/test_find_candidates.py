from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._auto_sharding.find_candidates import Candidate, Candidates, find_candidates

from .families import build, output
from .masked_ranks import worst_error
from .permutation import change, matrices, permutation, randomize

functional = nn.functional


class Mlp(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class GatedMlp(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Attention(nn.Module):
    """Fused projection of q, k and v, with fewer key heads if asked."""

    def __init__(self, heads: int = 4, key_heads: int = 4, features: int = 6) -> None:
        super().__init__()
        self.heads, self.key_heads, self.features = heads, key_heads, features
        width = heads * features
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, width + 2 * key_heads * features)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = (self.heads, self.key_heads, self.key_heads)
        parts = self.qkv(self.norm(x)).split([n * self.features for n in counts], dim=-1)
        q, k, v = (
            part.unflatten(-1, (n, self.features)).transpose(1, 2)
            for part, n in zip(parts, counts, strict=True)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class OneKeyHead(nn.Module):
    """Fused projection of several queries, one key and one value, chosen by slices or lists."""

    def __init__(self, *, by_list: bool = False) -> None:
        super().__init__()
        self.chosen: list[Any] = [[-2], [-1]] if by_list else [slice(-2, -1), slice(-1, None)]
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 36), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 6))
        kv = [heads[:, :, each] for each in self.chosen]
        q, k, v = (each.transpose(1, 2) for each in (heads[:, :, :-2], *kv))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class GroupedQueries(nn.Module):
    """Separate projections, fewer key heads, norms of each head, and scores by hand."""

    def __init__(self, heads: int = 8, key_heads: int = 4, features: int = 6) -> None:
        super().__init__()
        self.key_heads, self.features = key_heads, features
        width, self.groups = heads * features, heads // key_heads
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, key_heads * features)
        self.v = nn.Linear(width, key_heads * features)
        self.q_norm = nn.LayerNorm(features)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (m(h).unflatten(-1, (-1, self.features)) for m in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.groups, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", self.q_norm(q), k).softmax(-1)
        return x + self.out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2))


class Experts(nn.Module):
    """Experts as two tensors of three dimensions, each token to all of them, weighted."""

    def __init__(self, experts: int = 4, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = x.expand(self.up.shape[0], *x.shape)
        return (torch.bmm(functional.silu(torch.bmm(tokens, self.up)), self.down)
                * weights.T.unsqueeze(-1)).sum(0)  # fmt: skip


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        return self.experts(tokens, self.router(tokens).softmax(-1)).view_as(x)


def found(model: nn.Module, batch: Any, size: int = 2) -> Candidates:
    return find_candidates(model, batch, size)


def features(result: Candidates) -> list[Candidate]:
    return [cut for cut in result.chosen if cut.kind == "features"]


def only(result: Candidates) -> Candidate:
    [cut] = features(result)
    return cut


def reasons(result: Candidates, parameter: str) -> list[str]:
    return [reason for axis, reason in result.rejected if axis.startswith(parameter)]


def assert_certified(model: nn.Module, batch: Any, result: Candidates) -> None:
    """Permuting a cut axis in all its parameters changes nothing; in one alone it does."""
    randomize(model)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return output(model, batch) if isinstance(batch, dict) else model(batch)

    before = run()
    for cut in features(result):
        assert change(model, run, cut, cut.parameters, before) < 1e-9
        assert change(model, run, cut, matrices(model, cut)[:1], before) > 1e-3


def wrong(model: nn.Module, batch: torch.Tensor, cut: Candidate) -> float:
    """Return how far masked ranks are from one device."""
    randomize(model)
    return worst_error(model, lambda called: called(batch), cut)


def x(width: int = 8) -> torch.Tensor:
    return torch.randn(2, 5, width, generator=torch.Generator().manual_seed(1)).double()


def test_an_mlp_is_cut_along_its_hidden_features() -> None:
    model = Mlp().double()
    cut = only(found(model, x()))
    assert cut.parameters == {
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
    }
    assert (cut.length, cut.entries, cut.exits) == (12, ("up",), ("down",))
    assert (cut.replicated, cut.biases) == ((), ("down.bias",))


def test_flops_and_bytes_of_an_mlp_are_those_of_its_two_products() -> None:
    cut = only(found(Mlp().double(), x()))
    assert cut.flops == 2 * (2 * 10 * 8 * 12)
    assert cut.communicated_bytes == 10 * 8 * 8
    assert cut.sharded_numel == 12 * 8 + 12 + 8 * 12


def test_a_gate_packed_with_what_it_gates_is_two_interleaved_parts() -> None:
    cut = only(found(GatedMlp().double(), x()))
    assert cut.parameters == {
        "gate_up.weight": InterleavedShard(0, 2),
        "down.weight": Shard(1),
    }


def test_fused_attention_is_cut_by_heads_in_three_parts() -> None:
    cut = only(found(Attention().double(), x(24)))
    assert cut.length == 4
    assert cut.parameters == {
        "qkv.weight": InterleavedShard(0, 3),
        "qkv.bias": InterleavedShard(0, 3),
        "out.weight": Shard(1),
    }


def test_attention_packed_in_parts_of_unequal_length_is_cut_in_each() -> None:
    cut = only(found(Attention(heads=4, key_heads=2).double(), x(24)))
    assert cut.length == 2
    assert cut.parameters == {
        "qkv.weight": InterleavedShard(0, (24, 12, 12)),
        "qkv.bias": InterleavedShard(0, (24, 12, 12)),
        "out.weight": Shard(1),
    }


def test_grouped_queries_are_cut_by_key_heads() -> None:
    cut = only(found(GroupedQueries().double(), x(48)))
    assert cut.length == 4
    assert set(cut.parameters) >= {"q.weight", "k.weight", "v.weight", "out.weight"}
    assert set(cut.parameters.values()) == {Shard(0), Shard(1)}
    assert cut.entries == ("k", "q", "v")


def test_a_norm_of_each_head_is_whole_and_its_gradient_an_addend() -> None:
    cut = only(found(GroupedQueries().double(), x(48)))
    assert cut.replicated == ("q_norm.bias", "q_norm.weight")


def test_a_size_that_does_not_divide_the_key_heads_names_their_number() -> None:
    result = found(GroupedQueries(key_heads=2).double(), x(48), size=4)
    assert "its length 2 is not divisible by 4" in reasons(result, "q.weight")


def test_with_too_few_key_heads_the_query_heads_of_a_group_are_cut() -> None:
    cut = only(found(GroupedQueries(key_heads=2).double(), x(48), size=4))
    assert cut.parameters["q.weight"] == InterleavedShard(0, 2)
    assert "k.weight" not in cut.parameters
    assert set(cut.replicated) >= {"k.weight", "v.weight"}


def test_the_hidden_features_of_experts_are_cut() -> None:
    cut = only(found(MixtureOfExperts().double(), x()))
    assert cut.parameters == {"experts.up": Shard(2), "experts.down": Shard(1)}
    assert cut.entries == cut.exits == ("experts",)


def test_the_experts_themselves_are_an_alternative() -> None:
    result = found(MixtureOfExperts().double(), x())
    [cut] = [cut for cut in result.alternatives if cut.kind == "experts"]
    assert cut.parameters == {"experts.up": Shard(0), "experts.down": Shard(0)}
    assert cut.length == 4


class ChosenExperts(nn.Module):
    """The weights of an expert for each row, chosen by an index, and a bias of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, 8, 12)),
            nn.Parameter(torch.randn(4, 12, 8)),
        )
        self.bias = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        chosen = self.router(rows).argmax(-1)
        hidden = torch.relu(torch.bmm(rows[:, None], self.up[chosen]))
        return (torch.bmm(hidden, self.down[chosen])[:, 0] + self.bias[chosen]).view_as(x)


def test_weights_that_are_chosen_by_the_batch_are_cut_and_their_bias_is_added_once() -> None:
    cut = only(found(ChosenExperts().double(), x()))
    assert cut.parameters == {"up": Shard(2), "down": Shard(1)}
    assert cut.biases == ("bias",)


@pytest.mark.parametrize("model", [Mlp, GatedMlp, MixtureOfExperts])
def test_blocks_are_certified(model: type[nn.Module]) -> None:
    block = model().double()
    assert_certified(block, x(), found(block, x()))


def test_keys_and_values_of_one_head_are_read_whole() -> None:
    cut = only(found(OneKeyHead().double(), x(24)))
    assert cut.length == 4
    assert cut.parameters == {
        "qkv.weight": InterleavedShard(0, (24, 12)),
        "qkv.bias": InterleavedShard(0, (24, 12)),
        "out.weight": Shard(1),
    }
    assert set(cut.reads) == {("qkv", "weight"), ("qkv", "bias")}
    assert set(cut.reads.values()) == {(Shard(0), Replicate())}


def test_parts_that_are_read_whole_are_stored_by_ranks_and_have_to_divide() -> None:
    result = found(Attention(heads=4, key_heads=1, features=3).double(), x(12), size=4)
    assert not any("qkv.weight" in cut.parameters for cut in result.chosen)
    why = "is in some segments only of qkv.weight, and another has a length that is not divisible"
    assert f"{why} by 4" in reasons(result, "qkv.weight")


def test_elements_that_a_constant_list_chooses_are_a_slice() -> None:
    cut = only(found(OneKeyHead(by_list=True).double(), x(24)))
    assert cut.parameters == only(found(OneKeyHead().double(), x(24))).parameters


@pytest.mark.parametrize(
    ("make", "width"),
    [(Attention, 24), (OneKeyHead, 24), (GroupedQueries, 48)],
    ids=["fused", "one key head", "grouped"],
)
def test_attention_is_certified(make: type[nn.Module], width: int) -> None:
    block = make().double()
    assert_certified(block, x(width), found(block, x(width)))


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (Mlp, 8),
        (GatedMlp, 8),
        (MixtureOfExperts, 8),
        (ChosenExperts, 8),
        (Attention, 24),
        (OneKeyHead, 24),
        (GroupedQueries, 48),
    ],
)
def test_masked_ranks_have_the_outputs_and_gradients_of_one_device(
    make: type[nn.Module], width: int
) -> None:
    model = make().double()
    for cut in (result := found(model, x(width))).chosen + result.alternatives:
        # Some gradients, of a bias of all keys for one, are zero but for rounding.
        assert wrong(model, x(width), cut) < 1e-7


def test_masked_ranks_notice_a_missing_entry_exit_or_replicated_parameter() -> None:
    model = GroupedQueries().double()
    cut = only(found(model, x(48)))
    assert wrong(model, x(48), dataclasses.replace(cut, replicated=())) > 1e-3
    assert wrong(model, x(48), dataclasses.replace(cut, entries=cut.entries[1:])) > 1e-3
    assert wrong(model, x(48), dataclasses.replace(cut, parameters={"q.weight": Shard(0),
                                                   "out.weight": Shard(0)})) > 1e-3  # fmt: skip


class Between(nn.Module):
    """An MLP with something between its two linears."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.norm, self.between = nn.LayerNorm(8), between
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.arange(12.0).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_buffer("slopes")


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.LayerNorm(12), "native_layer_norm needs all of it in 'between'"),
        (nn.Softmax(-1), "softmax needs all of it in 'between'"),
        (nn.RMSNorm(12), "in 'between' reduces over this dimension|rms_norm needs all of it"),
        (Positions(), "buffer 'between.slopes' has an element for each"),
    ],
)
def test_what_needs_all_features_is_rejected(between: nn.Module, reason: str) -> None:
    result = found(Between(between).double(), x())
    assert not features(result)
    assert any(r in given for r in reason.split("|") for given in reasons(result, "up.weight"))


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(torch.renorm(x, 2, 0, 1.0))


def test_what_meets_an_operator_without_a_rule_is_rejected() -> None:
    result = found(Between(Unknown()).double(), x())
    assert not features(result)
    assert [(each.operator, each.module) for each in result.unknown] == [("renorm", "between")]
    assert not any(name in cut.parameters for cut in result.chosen for name in ("up.weight",))
    assert "comes whole out of renorm in 'between'" in reasons(result, "down.weight")


class ResidualInside(nn.Module):
    """Both products and the residual in one module, with no module to sum at."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(x @ self.up.T) @ self.down.T


def test_a_sum_that_is_used_before_its_module_returns_is_rejected() -> None:
    result = found(nn.Sequential(ResidualInside(), nn.LayerNorm(8)).double(), x())
    assert not features(result)
    assert any("in '0' adds a tensor that every rank has" in r for _, r in result.rejected)


class Product(ResidualInside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x @ self.up.T) @ self.down.T


def test_products_in_one_module_are_cut_with_the_module_as_entry_and_exit() -> None:
    cut = only(found(nn.Sequential(Product(), nn.LayerNorm(8)).double(), x()))
    assert cut.parameters == {"0.up": Shard(0), "0.down": Shard(1)}
    assert cut.entries == cut.exits == ("0",)


class Block(nn.Module):
    """Attention as torch has it, which calls none of its own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.last(x + self.attention(h, h, h)[0])


@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_attention_is_cut_by_heads(training: bool) -> None:
    model = Block().double().train(training)
    cut = only(found(model, x()))
    assert cut.parameters == {
        "attention.in_proj_weight": InterleavedShard(0, 3),
        "attention.in_proj_bias": InterleavedShard(0, 3),
        "attention.out_proj.weight": Shard(1),
    }
    assert cut.entries == cut.exits == ("attention",)
    assert torch.backends.mha.get_fastpath_enabled()


def test_dropout_does_not_change_what_is_cut() -> None:
    layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.5, batch_first=True).double()
    result = [found(layer.train(training), x()) for training in (True, False)]
    assert [sorted(cut.parameters) for cut in features(result[0])] == [
        sorted(cut.parameters) for cut in features(result[1])
    ]


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


@functools.cache
def family(name: str) -> Candidates:
    return found(*build(name))


def cut_of(name: str, parameter: str) -> Candidate:
    [cut] = [cut for cut in family(name).chosen if parameter in cut.parameters]
    return cut


def test_llama_is_cut_by_key_heads_features_and_vocabulary() -> None:
    attention = cut_of("llama", "model.layers.0.self_attn.k_proj.weight")
    assert attention.length == 2
    assert attention.exits == ("model.layers.0.self_attn.o_proj",)
    assert cut_of("llama", "model.layers.1.mlp.up_proj.weight").length == 96
    assert cut_of("llama", "lm_head.weight").kind == "vocabulary"
    assert cut_of("llama", "model.embed_tokens.weight").exits == ("model.embed_tokens",)


def test_gpt2_is_cut_through_its_transposed_linears() -> None:
    cut = cut_of("gpt2", "transformer.h.0.attn.c_attn.weight")
    assert cut.parameters == {
        "transformer.h.0.attn.c_attn.weight": InterleavedShard(1, 3),
        "transformer.h.0.attn.c_attn.bias": InterleavedShard(0, 3),
        "transformer.h.0.attn.c_proj.weight": Shard(0),
    }


def test_bert_has_a_cut_for_each_attention_and_each_mlp() -> None:
    assert len(features(family("bert"))) == 4


def test_the_relative_bias_of_t5_is_cut_by_the_heads_of_all_blocks() -> None:
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    cut = cut_of("t5", bias)
    assert cut.parameters[bias] == Shard(1)
    assert "encoder.block.1.layer.0.SelfAttention.q.weight" in cut.parameters
    assert not any(name.startswith("decoder") for name in cut.parameters)


def test_opt_is_cut_but_for_its_positions() -> None:
    assert cut_of("opt", "model.decoder.layers.0.fc1.weight").length == 96
    names = {name for cut in family("opt").chosen for name in cut.parameters}
    assert "model.decoder.embed_positions.weight" not in names


def test_latent_attention_sums_gradients_before_its_shared_key() -> None:
    cut = cut_of("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight")
    base = "model.layers.0.self_attn"
    assert cut.entries == (f"{base}.kv_a_proj_with_mqa", f"{base}.q_b_proj")
    assert cut.replicated == (
        f"{base}.kv_a_layernorm.weight",
        f"{base}.kv_a_proj_with_mqa.weight",
    )


def test_slopes_by_head_that_are_no_parameters_keep_bloom_from_being_cut_by_heads() -> None:
    name = "transformer.h.0.self_attention.query_key_value.weight"
    assert not any(name in cut.parameters for cut in family("bloom").chosen)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "opt", "mixtral"])
def test_families_are_certified(name: str) -> None:
    model, batch = build(name)
    if hasattr(model, "set_experts_implementation"):
        cast(Any, model).set_experts_implementation("eager")
    assert_certified(model, batch, family(name))
