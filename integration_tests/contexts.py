"""Tiny models of long sequences, and some steps on one device or on ranks that share them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning

from . import joint_attention, residuals_outside, written_attention
from .experts import Trained, adamw
from .families import InDouble
from .listed_experts import HIDDEN, OldMixtral
from .plans import SEQUENCE, Constraints, make_plan
from .training import whole

ROWS, VOCABULARY = 4, 48
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64, "attention_dropout": 0.0,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TOKENS = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": {**_SIZES, "sliding_window": 4},
    "qwen3": {**_SIZES, "tie_word_embeddings": True},
    "gemma3_text": {**_SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma2": {**_SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gpt_oss": {
        **_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    },
    "gpt2": _GPT2,
    "bloom": {**_GPT2, "hidden_size": 32},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY},
    "deberta-v2": {
        **_SIZES, **_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 4,
    },
    "t5": {
        **_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "relative_attention_num_buckets": 8,
    },
    "bart": {
        **_TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 40, "max_position_embeddings": 64, "forced_eos_token_id": None,
    },
    "mamba": {**_SIZES, "state_size": 4},
    "bert": {**_SIZES, **_BERT},
    "roberta": {**_SIZES, **_BERT},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "decoder_sparse_step": 1},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**_SIZES, **_EXPERTS},
    "deepseek_v3": {
        **_SIZES, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4,
        "first_k_dense_replace": 0,
    },
}  # fmt: skip
_HEADS = {
    "bert": "AutoModelForMaskedLM",
    "deberta-v2": "AutoModelForMaskedLM",
    "roberta": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
}


class Block(nn.Module):
    """Attention by hand, with rotary tables that it is given."""

    def __init__(self, features: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 48), nn.Linear(48, features)

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        rows, length, features = x_BSF.shape
        q, k, v = (
            each.view(rows, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.norm(x_BSF)).chunk(3, -1)
        )
        q, k = (x * cos_SD + x.roll(1, -1) * sin_SD for x in (q, k))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSF = x_BSF + self.out(made.transpose(1, 2).reshape(rows, length, features))
        return x_BSF + self.down(F.gelu(self.up(self.norm2(x_BSF))))


class ByHand(nn.Module):
    """A causal model by hand, whose loss is of targets that are shifted outside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BSF = self.embed(input_ids)
        place = torch.arange(input_ids.shape[1], dtype=x_BSF.dtype)[:, None]
        angle_SD = place / torch.arange(1, 9, dtype=x_BSF.dtype)
        for block in self.blocks:
            x_BSF = block(x_BSF, angle_SD.cos(), angle_SD.sin())
        logits = self.head(x_BSF)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ExpertBlock(Block):
    """A block with experts in a list, which returns what its router says besides."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, 2)
        self.moe = OldMixtral()

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: another block
        self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_BSF = super().forward(x_BSF, cos_SD, sin_SD)
        made, scores = self.moe(x_BSF)
        return x_BSF + made, scores


class ExpertsByHand(nn.Module):
    """A causal model by hand, whose loss has a part of all tokens that routers see."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSF, scores = self.embed(input_ids), list[Tensor]()
        place = torch.arange(input_ids.shape[1], dtype=x_BSF.dtype)[:, None]
        angle_SD = place / torch.arange(1, 5, dtype=x_BSF.dtype)
        for block in self.blocks:
            x_BSF, of_block = block(x_BSF, angle_SD.cos(), angle_SD.sin())
            scores.append(of_block)
        loss = F.cross_entropy(self.head(x_BSF)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + 0.1 * torch.cat(scores).softmax(-1).mean(0).square().sum()


_BY_HAND: dict[str, Callable[[], nn.Module]] = {
    **written_attention.BY_HAND,
    **joint_attention.BY_HAND,
    **residuals_outside.BY_HAND,
    **{
        name: functools.partial(written_attention.Causal, make)
        for name, make in joint_attention.ATTENTION.items()
    },
    "by_hand": ByHand,
    "experts_by_hand": ExpertsByHand,
}


def build(family: str, attention: str = "sdpa", experts: str = "eager", **more: Any) -> nn.Module:
    """Return a model in float64."""
    import transformers

    torch.manual_seed(0)
    if family in _BY_HAND:
        model = _BY_HAND[family]().double()
    else:
        config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **more})
        kind = getattr(transformers, _HEADS.get(family, "AutoModelForCausalLM"))
        config._experts_implementation = experts
        model = kind.from_config(config, attn_implementation=attention).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # as drawn, attention would be nearly even
            nn.init.normal_(parameter, std=0.3)
    return model


def batch_of(step: int, length: int, kind: str, rows: int = ROWS) -> dict[str, Any]:
    """Return the batch of a step; rows count different numbers of targets."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 2] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[1, length - 3 :] = 0
        mask[-1, length // 2 :] = 0
        batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    if kind == "packed":
        cut = length // 2 - 1
        places = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        batch |= {"position_ids": places.expand(rows, length), "use_cache": False}
    if kind == "translation":  # of other lengths than what is translated
        batch["labels"] = labels[:, : length - 3].contiguous()
    if kind == "classes":
        batch["labels"] = ids[:, 0] % 2
    return batch


def train(
    family: str,
    constraints: Mapping[str, Any] | None,
    length: int = 12,
    kind: str = "",
    attention: str = "sdpa",
    rows: int = ROWS,
    steps: int = 3,
    more: Sequence[tuple[str, Any]] = (),
) -> Trained:
    """Train by AdamW with clipping; without constraints on one device."""
    model, optimizer = build(family, attention, **dict(more)), None
    if constraints is None:
        optimizer = adamw(model)
    else:
        plan = plan_for(model, constraints, batch_of(0, length, kind, rows))
        model, optimizer = vescale.parallelize(plan, model, adamw)
    losses, norms, grads = list[float](), list[float](), dict[str, Tensor]()
    for step in range(steps):
        batch = rows_of(model, batch_of(step, length + step % 2, kind, rows))
        with InDouble(), warnings.catch_warnings():
            # Balancing losses count tokens by torch.histc, whose inputs are gathered.
            warnings.simplefilter("ignore", GatherWarning)
            output = model(**batch)
            loss = output if isinstance(output, Tensor) else output.loss
            loss.backward()
        losses.append(loss.item())
        if not step:
            of_each = {name: p.grad for name, p in model.named_parameters()}
            grads = {name: whole(g).clone() for name, g in of_each.items() if g is not None}
        norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
    final = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return Trained(losses=losses, grads=grads, norms=norms, parameters=final)


def plan_for(model: nn.Module, constraints: Constraints, batch: Any) -> vescale.ParallelPlan:
    """Return a plan; one that shards sequences between layers is found for the model."""
    if constraints.get(SEQUENCE) and not hasattr(model, "config"):
        return vescale.generate_plan(model, constraints, example_batch=batch)
    return make_plan(constraints)


def rows_of(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's rows of a batch; all of them on one device."""
    engine = getattr(model, "_vescale_engine", None)
    if engine is None:
        return batch
    parts, part = engine.data_ranks.num_parts, vescale.data_parallel_rank(model)
    return {
        name: each.chunk(parts)[part] if isinstance(each, Tensor) else each
        for name, each in batch.items()
    }
