"""What tensor parallelism cuts, and the proof that it may."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import propose_sharding, tensor_parallel_plan
from vescale_parallel._auto_sharding import subject
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._verify.dry_runs import DryRuns
from vescale_parallel._verify.equivalence import CheckResult, check_plan


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x_BSF: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSF)) * self.up(x_BSF))


class Attention(nn.Module):
    """Fused QKV; the number of heads and the width are written into the code."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.width = heads, 8
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x_BSF: Tensor) -> Tensor:
        shape = (*x_BSF.shape[:-1], self.num_heads, -1)
        parts = self.qkv(x_BSF).split(self.width, dim=-1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Normalised(Gated):
    """A norm over the hidden features needs all of them."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        hidden = F.layer_norm(self.gate(x_BSF), (self.gate.out_features,))
        return self.down(hidden * self.up(x_BSF))


class Softmaxed(Gated):
    """So does a softmax, and no shape shows it."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return self.down(self.gate(x_BSF).softmax(-1) * self.up(x_BSF))


class Shifted(Gated):
    """Mixes neighbouring hidden features."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return self.down(self.gate(x_BSF).roll(1, -1) * self.up(x_BSF))


class ReadTwice(Gated):
    """Uses its input within the region, past the layer that enters it."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return self.down(self.up(x_BSF).relu() * x_BSF.mean(-1, keepdim=True))


class AfterTheSum(Gated):
    """Is not linear after the row-wise layer, whose output is summed before."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return super().forward(x_BSF).relu()


def stack_of(*layers: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


def test_gated_linears_become_columns_and_rows() -> None:
    assert tensor_parallel_plan(stack_of(Gated(), Gated()), "auto", 2) == {
        "layers.*.gate.weight": "Shard(0)",
        "layers.*.up.weight": "Shard(0)",
        "layers.*.down.weight": "Shard(1)",
    }


def test_what_comes_after_the_sum_may_be_anything() -> None:
    assert tensor_parallel_plan(stack_of(AfterTheSum(), AfterTheSum()), "auto", 2) == {
        "layers.*.gate.weight": "Shard(0)",
        "layers.*.up.weight": "Shard(0)",
        "layers.*.down.weight": "Shard(1)",
    }


def test_fused_attention_is_cut_part_by_part_with_its_integers() -> None:
    assert tensor_parallel_plan(stack_of(Attention(), Attention()), "megatron", 2) == {
        "layers.*.qkv.weight": "InterleavedShard(0, 3)",
        "layers.*.out.weight": "Shard(1)",
        "layers.*.<attr:num_heads>": "Shard(0)",
        "layers.*.<attr:width>": "Shard(0)",
    }


@pytest.mark.parametrize("wrong", [Normalised, Softmaxed, Shifted, ReadTwice])
def test_what_sharding_would_change_stays_whole(wrong: type[nn.Module]) -> None:
    assert tensor_parallel_plan(stack_of(wrong(), wrong()), "auto", 2) == {}


def test_sizes_that_do_not_divide_stay_whole() -> None:
    assert tensor_parallel_plan(stack_of(Gated(), Gated()), "auto", 5) == {}


def test_a_pattern_must_fit_all_modules_it_matches() -> None:
    assert tensor_parallel_plan(stack_of(Gated(), Softmaxed()), "auto", 2) == {}


def test_the_generator_is_left_alone() -> None:
    model = stack_of(Gated(), Attention())
    state = torch.get_rng_state()
    tensor_parallel_plan(model, "auto", 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_rank_and_fsdp_only_shard_nothing() -> None:
    assert tensor_parallel_plan(stack_of(Gated(), Gated()), "auto", 1) == {}
    assert tensor_parallel_plan(stack_of(Gated(), Gated()), "fsdp-only", 2) == {}


def test_a_plan_of_transformers_may_name_layers_that_the_first_block_lacks() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict(), nn.ModuleDict({"mlp": Gated()})])
            self.config = None
            ways = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
            self.tp_plan = {f"layers.*.mlp.{name}": way for name, way in ways.items()}

    plan = tensor_parallel_plan(Later(), "huggingface", 2)
    assert plan["layers.*.mlp.gate.weight"] == "Shard(0)"


def test_transformers_plans_are_taken_over() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes))
    plan = tensor_parallel_plan(nn.ModuleDict({"lm": model}), "huggingface", 2)
    assert plan["lm.model.layers.*.self_attn.k_proj.weight"] == "Shard(0)"
    assert plan["lm.model.layers.*.self_attn.o_proj.weight"] == "Shard(1)"
    assert plan["lm.model.layers.*.self_attn.q_norm.weight.<grad>"] == "Partial()"
    assert plan["lm.lm_head.<out>"] == "Shard(-1)"
    found = propose_sharding(nn.ModuleDict({"lm": model}), "auto", 4)
    assert "lm.model.layers.*.mlp.up_proj.weight" in found.plan
    assert found.left_whole["lm.model.layers.*.self_attn.q_proj.weight"] == (
        "num_key_value_heads (2) of lm is not divisible by 4"
    )


def test_a_model_without_its_own_plan_cannot_use_it() -> None:
    with pytest.raises(ValueError, match="has no tensor-parallel plan of its own"):
        tensor_parallel_plan(stack_of(Gated(), Gated()), "huggingface", 2)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="expected sharding_policy 'auto'"):
        tensor_parallel_plan(Gated(), "best", 2)


def test_blocks_too_large_to_run_are_proven_on_a_small_model_of_their_class() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=6, num_key_value_heads=8)
        model = LlamaForCausalLM(config)
    plan = tensor_parallel_plan(model, "auto", 4, sequence=True)
    assert plan["lm_head.<out>"] == "Shard(-1)"
    assert plan["model.embed_tokens.weight"] == "Shard(0)"
    assert plan["model.layers.*.self_attn.o_proj.weight"] == "Shard(1)"
    assert plan["model.layers.5.<out>"] == "Shard(1) -> Replicate()"


@pytest.mark.parametrize("sequence", [False, True])
def test_a_plan_whose_likeliest_places_are_right_is_proven_once(
    sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    proven: list[TensorSharding] = []

    def counted(runs: DryRuns, sharding: TensorSharding, **how: Any) -> CheckResult:
        proven.append(sharding)
        return check_plan(runs, sharding, **how)

    monkeypatch.setattr(subject, "check_plan", counted)
    model, ids_BS = LlamaForCausalLM(config), torch.zeros(2, 8, dtype=torch.long)
    batch = {"input_ids": ids_BS, "labels": ids_BS}
    plan = tensor_parallel_plan(model, "auto", 2, sequence=sequence, example_batch=batch)
    assert ("model.layers.2.<out>" in plan) is sequence
    assert len(proven) == 1
