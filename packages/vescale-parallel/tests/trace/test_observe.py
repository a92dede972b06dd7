from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from vescale_parallel import ObservationError, observe
from vescale_parallel._trace.flops import flops_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed)


class NanoGPT(nn.Module):
    """Takes the batch as one dict, owns a position table itself, and never calls its head."""

    def __init__(self, vocabulary: int = 64, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(32, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"]
        x = self.wte(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = nn.functional.linear(self.norm(x), self.head.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(self.inner(x).sum() > 0) else -x


def _ids() -> torch.Tensor:
    return torch.arange(32).reshape(2, 16) % 50


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    )


def _bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )


def _t5() -> nn.Module:
    start: dict[str, Any] = {"decoder_start_token_id": 0}
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_ff=48,
            d_kv=8,
            num_layers=2,
            num_heads=4,
            **start,
        )
    )


def _mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


_FAMILIES = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "t5": _t5}


def _batch() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "labels": _ids()}


def _attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any
) -> int:
    return 2 * query.numel() * key[-2] + 2 * query[:-1].numel() * value[-2:].numel()


def _flop_counter() -> FlopCounterMode:
    """Count like torch, with attention on a CPU, which it leaves out, as on a GPU."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={kernel: _attention_flops})


def test_attention_is_counted_as_torch_counts_it() -> None:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    shapes = ((2, 4, 8, 16), (2, 4, 12, 16), (2, 4, 12, 24))
    given = tuple(torch.empty(shape, device="meta") for shape in shapes)
    assert flops_of(kernel.default, given, {}, None) == flop_registry[kernel](*given, out_val=None)


def _really(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Return flops and saved bytes of a real forward."""
    state = [*model.parameters(), *model.buffers()]
    ours = {tensor.untyped_storage() for tensor in state}
    saved: set[torch.UntypedStorage] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.untyped_storage())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with _flop_counter() as counter, hooks:
        model(*args, **kwargs)
    return counter.get_total_flops(), sum(storage.nbytes() for storage in saved - ours)


@pytest.mark.parametrize("family", _FAMILIES)
def test_flops_and_saved_bytes_are_those_of_a_real_run(family: str) -> None:
    model = _FAMILIES[family]().train()
    batch = _batch()
    found = observe(model, batch)
    assert (found.flops, found.saved_bytes) == _really(model, **batch)


def test_a_padding_mask_is_looked_at() -> None:
    model = _llama().train()
    batch = _batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    without = observe(model, batch).saved_bytes
    batch["attention_mask"][0, :3] = 0
    found = observe(model, batch)
    assert (found.flops, found.saved_bytes) == _really(model, **batch)
    assert found.saved_bytes > without


def test_blocks_and_what_is_around_them_add_up_to_the_whole() -> None:
    found = observe(_llama(), _batch())
    assert [block.fqn for block in found.blocks] == [f"model.layers.{i}" for i in range(3)]
    flops = sum(block.flops for block in found.blocks)
    assert found.before_flops + flops + found.after_flops == found.flops
    saved = sum(block.saved_bytes for block in found.blocks)
    assert found.before_saved_bytes + saved + found.after_saved_bytes == found.saved_bytes
    numel = sum(block.numel for block in found.blocks) + sum(o.numel for o in found.outside)
    assert numel == found.numel
    assert {block.output_bytes for block in found.blocks} == {2 * 16 * 32 * 4}
    assert (found.rows, found.tokens) == (2, 32)


def test_the_order_around_the_blocks_is_that_of_the_first_use() -> None:
    tied = {each.fqn: each.position for each in observe(_gpt2(), _batch()).outside}
    assert tied == {
        "transformer.wte": "before",
        "transformer.wpe": "before",
        "transformer.ln_f": "after",
        "lm_head": "after",
    }


def test_a_parameter_of_the_model_itself_and_one_that_no_call_reads_have_a_position() -> None:
    batch = {"tokens": _ids(), "targets": _ids()}
    found = {each.fqn: each.position for each in observe(NanoGPT(), batch).outside}
    assert found == {"": "before", "wte": "before", "norm": "after", "head": "after"}


def test_a_forward_that_takes_the_batch_as_one_argument_works() -> None:
    model, batch = NanoGPT(), {"tokens": _ids(), "targets": _ids()}
    found = observe(model, batch)
    assert (found.flops, found.saved_bytes) == _really(model, batch)
    assert found.output_bytes == 4


def test_tuples_are_arguments() -> None:
    model, query = nn.MultiheadAttention(8, 2), torch.zeros(3, 2, 8)
    triple = (query, query, query)
    assert observe(model, triple).flops == _really(model, *triple)[0] > 0


def test_two_stacks_are_blocks_one_after_the_other() -> None:
    found = observe(_t5(), _batch())
    stacks = [f"{stack}.block.{index}" for stack in ("encoder", "decoder") for index in (0, 1)]
    assert [block.fqn for block in found.blocks] == stacks
    positions = {each.fqn: each.position for each in found.outside}
    assert positions["encoder.final_layer_norm"] == "between"
    assert (positions["shared"], positions["lm_head"]) == ("before", "after")
    of_blocks = sum(block.flops for block in found.blocks)
    assert found.before_flops + of_blocks + found.after_flops == found.flops


def test_flops_of_grouped_experts_are_counted() -> None:
    dense = 2 * 32 * 2 * (3 * 32 * 48)  # tokens x experts of a token x three matrices
    with_experts = observe(_mixtral(), _batch())
    registry_alone = _really(_mixtral(), **_batch())[0]
    assert with_experts.flops == registry_alone + 2 * dense


@pytest.mark.parametrize("family", _FAMILIES)
def test_flops_of_every_module_are_those_of_a_real_run(family: str) -> None:
    model = _FAMILIES[family]().train()
    found: dict[str, int] = {}
    for call in observe(model, _batch()).modules:
        found[call.fqn] = found.get(call.fqn, 0) + call.flops
    with _flop_counter() as counter:
        model(**_batch())
    root = type(model).__name__
    for name, flops in counter.get_flop_counts().items():
        fqn = "" if name in ("Global", root) else name.removeprefix(f"{root}.")
        assert found[fqn] == sum(flops.values())
    assert found[""] == counter.get_total_flops()


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.idle = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x)[:1]) * scale


def test_modules_are_listed_call_by_call_with_what_was_called_inside() -> None:
    scale = torch.ones(4)
    root, first, *_ = calls = observe(
        CalledTwice(), {"x": torch.ones(3, 4), "scale": scale}
    ).modules
    inner = ["inner", "inner.0", "inner.1"]
    assert [call.fqn for call in calls] == ["", *inner, *inner]
    assert (root.inputs, root.outputs) == (((3, 4), (4,)), ((1, 4),))
    assert [call.inputs for call in calls if call.fqn == "inner.0"] == [((3, 4),), ((1, 4),)]
    assert (first.flops, root.flops) == (2 * 3 * 4 * 4, 2 * 4 * 4 * 4)


def test_saved_bytes_of_modules_count_what_they_kept_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.ones(3, 4)
    # Each linear keeps its input, and tanh its output, which is the second linear's input.
    assert [call.saved_bytes for call in observe(model, x).modules] == [96, 48, 48, 0]
    assert observe(model, x).saved_bytes == 96


class _Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.outer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).detach())


def test_what_no_backward_will_ask_for_is_not_kept() -> None:
    """Not even by a node that keeps what it returns, as that of tanh."""
    assert [call.saved_bytes for call in observe(_Detaches(), torch.ones(3, 4)).modules] == [
        48, 0, 0, 0, 48,
    ]  # fmt: skip


class _Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x.requires_grad_()))
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + gradient.square().sum()


def test_a_backward_within_the_forward_gets_what_was_kept() -> None:
    # Forward, the gradient of the input, and nothing of the weights'.
    assert observe(_Penalized(), torch.ones(3, 4)).flops == 2 * (2 * 3 * 4 * 4)


class Multiplies(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        match self.how:
            case "vector":
                return torch.mv(weight, x[0])
            case "cast":
                return torch.mv(weight.double().t() * 2, x[0].double())
            case "bilinear":
                return nn.functional.bilinear(x, x, weight[None])
            case _:
                return torch.cdist(x, weight)


@pytest.mark.parametrize(
    ("how", "operator"),
    [
        ("vector", "aten.mv.default"),
        ("cast", "aten.mv.default"),
        ("bilinear", "aten._trilinear.default"),
        ("distances", "aten._cdist_forward.default"),
    ],
)
def test_products_without_a_rule_for_their_flops_are_named(how: str, operator: str) -> None:
    assert observe(Multiplies(how), torch.ones(3, 4)).uncounted == (operator,)


class Harmless(nn.Module):
    """Uses weights of two dims in every way that is no product."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(6, 4))
        self.table = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm([6, 4])
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.table(ids), self.positions[:2].expand(3, 2, 4)], 1)
        x = self.linear(self.norm(x + self.positions))
        return x.mean() + nn.functional.mse_loss(self.positions, torch.zeros(6, 4))


def test_weights_that_are_looked_up_added_or_normed_are_not_products() -> None:
    found = observe(Harmless(), torch.zeros(3, 4, dtype=torch.long))
    assert found.uncounted == ()
    assert found.flops == 2 * 3 * 6 * 4 * 4


@pytest.mark.parametrize("family", [*_FAMILIES, "mixtral"])
def test_every_product_of_a_transformer_has_a_rule(family: str) -> None:
    model = (_FAMILIES | {"mixtral": _mixtral})[family]().train()
    assert observe(model, _batch()).uncounted == ()


def test_without_a_batch_only_parameters_are_known() -> None:
    model = _llama()
    found = observe(model)
    assert not found.ran
    assert found.flops == found.saved_bytes == 0
    assert found.numel == sum(p.numel() for p in model.parameters())
    assert all(block.numel for block in found.blocks)
    assert [each.position for each in found.outside] == [None, None, None]


def test_a_meta_model_is_observed_like_a_real_one() -> None:
    with torch.device("meta"):
        meta = _llama()
    assert observe(meta, _batch()) == observe(_llama(), _batch())


def test_no_memory_is_taken() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(4)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = observe(model, torch.empty(1 << 16, 1 << 16, device="meta"))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert found.saved_bytes == 4 * 4 << 32  # 64 GiB
    assert grown < 200 << 20


def test_the_model_and_the_random_state_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    observe(model, torch.ones(3, 4))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_forward_that_needs_values_is_refused_with_operator_and_module() -> None:
    with pytest.raises(ObservationError, match=r"AsksForValues.*operator aten\._local_scalar"):
        observe(AsksForValues(), torch.ones(2, 4))


def test_a_forward_that_fails_names_the_module_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 4))
    with pytest.raises(ObservationError, match=r"module '1' \(Linear\)"):
        observe(model, torch.ones(2, 4))


class _Attention(nn.Module):
    def __init__(self, width_of_values: int, dropout: float) -> None:
        super().__init__()
        self.width_of_values, self.dropout = width_of_values, dropout
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BHSE: torch.Tensor) -> torch.Tensor:
        q, k = self.linear(x_BHSE), self.linear(x_BHSE)
        v = k[..., : self.width_of_values] * 1
        return nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True
        )


@pytest.mark.parametrize(("width_of_values", "dropout"), [(8, 0.0), (8, 0.1), (4, 0.0)])
def test_attention_keeps_no_scores(width_of_values: int, dropout: float) -> None:
    """Though the CPU has no fused kernel with dropout, nor of narrower values."""
    length = 512
    model, batch = _Attention(width_of_values, dropout), torch.zeros(1, 2, length, 8)
    found = observe(model, batch, fused_attention=True)
    assert found.flops == 2 * 2 * 8 * 8 * 2 * length + 2 * 2 * length**2 * (8 + width_of_values)
    assert found.saved_bytes < 4 * 2 * length**2


class _TellsScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x @ x.transpose(-1, -2)


class _UsesNoScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_TellsScores() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)[0]
        return x


def test_a_block_hands_over_what_the_next_one_gets() -> None:
    """As MPT and BLOOM, whose blocks return attention's scores, too."""
    found = observe(_UsesNoScores(), torch.zeros(2, 64, 8))
    handed_over, scores = 4 * 2 * 64 * 8, 4 * 2 * 64 * 64
    assert [each.output_bytes for each in found.blocks] == [
        handed_over, handed_over, handed_over + scores,
    ]  # fmt: skip
