"""Tiny models with experts of several families, and one step on one device or under a plan."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning

from .families import InDouble
from .plans import make_plan
from .training import whole

ROWS, LENGTH, VOCABULARY = 8, 6, 48
_SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32, "attention_dropout": 0.0,
}  # fmt: skip
_SMALL = {"moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3}
_ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_SMALL, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "qwen2_moe": {**_SMALL, "shared_expert_intermediate_size": 12, "decoder_sparse_step": 1},
    "olmoe": _SMALL,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 4},
    "deepseek_v3": {
        **_SMALL, **_ROUTED, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
        "head_dim": 4,
    },
    "glm4_moe": {**_SMALL, **_ROUTED, "first_k_dense_replace": 1},
}  # fmt: skip


def build(
    family: str, implementation: str = "eager", *, skewed: bool = False, **more: Any
) -> nn.Module:
    """Return a model of a family in float64, with experts that are computed in some way.

    ``skewed`` routers send nothing to some experts, and of gpt-oss to the upper half.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {**_SIZES, **FAMILIES[family], **more}
    config = AutoConfig.for_model(family, **sizes)
    config._experts_implementation = implementation
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # as drawn, routers would hardly tell tokens apart
            nn.init.normal_(parameter, std=0.3)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        if skewed and name.endswith((".gate.weight", ".router.weight")):
            _skew(parameter)
        if skewed and name.endswith(".router.bias"):
            parameter.data[: len(parameter) // 2] += 100
    return model


def _skew(router: nn.Parameter) -> None:
    """Have the outer experts, on one side or the other, get all tokens."""
    router.data.copy_(router.data[:1] * torch.linspace(-2, 2, len(router))[:, None])


def tokens(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    """Return the batch of a step; every position of a row has a target that counts."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


class AllInDouble(InDouble):
    """Grouped products, too, of which torch has none in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ("grouped_mm", "_grouped_mm"):
            return super().__torch_function__(func, types, args, kwargs)
        rows, weights = args
        ends = kwargs["offs"].tolist()
        groups = zip(itertools.pairwise([0, *ends]), weights, strict=True)
        return torch.cat([rows[start:end] @ weight for (start, end), weight in groups])


def rows_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's rows of a batch; all of them on one device."""
    ranks = getattr(model, "_vescale_engine", None)
    if ranks is None:
        return batch
    size, rank = ranks.data_ranks.size, vescale.data_parallel_rank(model)
    return {name: each.chunk(size)[rank] for name, each in batch.items()}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came out of some steps: losses, the first gradients, parameters at the end."""

    losses: list[float]
    grads: dict[str, Tensor]
    norms: list[float]
    parameters: dict[str, Tensor]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    family: str,
    implementation: str,
    constraints: Mapping[str, Any] | None,
    parts: int,
    steps: int = 3,
    more: Mapping[str, Any] | None = None,
) -> Trained:
    """Train by AdamW; without constraints on one device, in as many micro-batches as ``parts``."""
    model = build(family, implementation, **(more or {}))
    if constraints is None:
        optimizer = adamw(model)
    else:
        plan = make_plan(constraints)
        model, optimizer = vescale.parallelize(plan, model, adamw)
        parts //= plan.data_parallel.size
    losses, norms, grads = list[float](), list[float](), dict[str, Tensor]()
    for step in range(steps):
        with AllInDouble(), warnings.catch_warnings():
            # Balancing losses count tokens by torch.histc, whose inputs are gathered.
            warnings.simplefilter("ignore", GatherWarning)
            losses.append(_step(model, step, parts))
        if not step:
            of_each = {name: p.grad for name, p in model.named_parameters()}
            grads = {name: whole(g).clone() for name, g in of_each.items() if g is not None}
            assert grads.keys() == of_each.keys()
        norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
    final = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return Trained(losses=losses, grads=grads, norms=norms, parameters=final)


def _step(model: Any, step: int, parts: int) -> float:
    batch = rows_of(model, tokens(step))
    loss = 0.0
    for index in range(parts):
        part = {name: each.chunk(parts)[index] for name, each in batch.items()}
        made = model(**part).loss / parts
        made.backward()
        loss += made.item()
    return loss
