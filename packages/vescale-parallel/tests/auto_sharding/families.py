"""Tiny models of transformers' families, and what cutting each of them comes to.

python -m packages.vescale-parallel.tests.auto_sharding.families NAME... > families.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vescale_dtensor import is_sharded
from vescale_parallel import propose_sharding
from vescale_parallel._auto_sharding.find_candidates import Candidate, Candidates, find_candidates
from vescale_parallel._model.fqns import generalize
from vescale_parallel._tensor_parallel.tensor_sharding import shard

from .masked_ranks import worst_error
from .permutation import change, is_numbered, matrices, of_norms, randomize

# What makes a configuration tiny, by the names that configurations use. Heads are 4 to a width
# of 64, so that head features (16) are no other length.
_TINY: dict[str, Any] = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "word_embed_proj_dim": 64,
    "emb_dim": 64, "d_embed": 64, "embedding_size": 64, "attention_hidden_size": 64,
    "ffn_dim": 96, "intermediate_size": 96, "n_inner": 96, "d_ff": 96, "ffn_hidden_size": 96,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "d_inner": 96, "dff": 96, "dim_ff": 96,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "n_layer": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_hidden_layers": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_blocks": 2,
    "head_dim": 16, "d_kv": 16, "dim_head": 16, "attention_head_dim": 16,
    "attention_head_size": 16,
    "vocab_size": 160, "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 16,
    "n_positions": 64, "max_position_embeddings": 64, "n_ctx": 64, "max_seq_len": 64,
    "context_length": 64,
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "num_experts_per_token": 2,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "moe_top_k": 2,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 24, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "qk_head_dim": 24, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 8, "global_head_dim": 16, "num_global_key_value_heads": 2, "rotary_dim": 8,
    "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_n_groups": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "state_size": 8,
    "ssm_state_size": 8, "mamba_d_ssm": 128, "n_groups": 2, "mamba_headdim": 16,
    "n_mamba_heads": 2, "time_step_rank": 4, "mamba_dt_rank": 4, "mamba_ngroups": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "lru_width": 64, "conv_dim": 64, "block_size": 8,
    "num_sparse_experts": 4, "expert_ffn_hidden_size": 48, "zero_expert_num": 2,
    "sliding_window": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "o_groups": 2, "o_lora_rank": 24, "num_buckets": 4, "decoder_vocab_size": 160,
    "input_embedding_size": 64, "output_embedding_size": 64, "max_source_positions": 64,
    "max_target_positions": 64,
}  # fmt: skip
# What a family needs besides.
_EXTRA: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "bamba": {"mamba_n_groups": 1},
    "granitemoehybrid": {"mamba_n_groups": 1},
    "falcon_h1": {"mamba_n_groups": 1},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"n_mamba_heads": 8, "attention_hidden_size": 128, "attention_head_dim": 32},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
}  # fmt: skip
_ROWS, _LENGTH = 2, 24
_NOT_CAUSAL = {
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "clip": "CLIPModel",
    "bart-encoder-decoder": "BartForConditionalGeneration",
    "bert-masked": "BertForMaskedLM",
}
FAMILIES = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_NOT_CAUSAL)


def shrink(config: Any) -> Any:
    """Make a configuration and those inside it tiny, in place."""
    for name, value in _TINY.items():
        with contextlib.suppress(Exception):  # some attributes differ by layer, some are checked
            known = getattr(config, name)
            if isinstance(known, int) or (known is None and name in ("head_dim", "d_kv")):
                setattr(config, name, value)
    if getattr(config, "qk_rope_head_dim", None) and getattr(config, "kv_lora_rank", None):
        with contextlib.suppress(Exception):  # latent attention has as many key heads
            config.num_key_value_heads, config.head_dim = 4, 8
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            shrink(getattr(config, name))
    return config


def build(family: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model of a family, in eval mode, and a batch for it."""
    torch.manual_seed(0)
    ids = torch.arange(_ROWS * _LENGTH).reshape(_ROWS, _LENGTH) * 7 % 101 + 3
    batch: dict[str, Any] = {"input_ids": ids}
    if family in _NOT_CAUSAL:
        cls = getattr(transformers, _NOT_CAUSAL[family])
        config = shrink(cls.config_class())
        model = cls(config)
        batch |= _other_inputs(family, config, ids)
        if family == "vit":
            del batch["input_ids"]
    else:
        config = shrink(transformers.AutoConfig.for_model(family))
        for name, value in _EXTRA.get(family, {}).items():
            setattr(config, name, value)
        model = transformers.AutoModelForCausalLM.from_config(config)
        batch["use_cache"] = False
    return model.eval(), batch


def _other_inputs(family: str, config: Any, ids: torch.Tensor) -> dict[str, Any]:
    if family in ("t5", "bart-encoder-decoder"):
        return {"decoder_input_ids": ids, "use_cache": False}
    if family == "bert-masked":
        return {}
    vision = getattr(config, "vision_config", config)
    side = vision.image_size
    return {"pixel_values": torch.randn(_ROWS, vision.num_channels, side, side)}


def output(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return what a model computes, as one tensor of float64."""
    made = model(**batch)
    tensors = [made[key] for key in ("logits", "text_embeds", "image_embeds") if key in made]
    return torch.cat([tensor.double().flatten() for tensor in tensors])


# ---------------------------------------------------------------------- transformers' plans

_STYLE_DIMS = {
    "colwise": -2, "colwise_gather_output": -2, "colwise_rep": -2, "packed_colwise": -2,
    "rowwise": -1, "rowwise_split_input": -1, "rowwise_rep": -1, "packed_rowwise": -1,
    "embedding_rowwise": -2, "embedding_colwise": -1, "grouped_gemm": 0,
}  # fmt: skip


def shipped_dims(model: nn.Module, plan: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Return which dim of each matrix a plan of transformers cuts, and its style."""
    found: dict[str, tuple[int, str]] = {}
    for name, parameter in model.named_parameters():
        for pattern, style in plan.items():
            expression = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"[^.]+"))
            module = name.rpartition(".")[0]
            dim = _STYLE_DIMS.get(style)
            if dim is None or parameter.dim() < 2:
                continue
            if expression.fullmatch(name) or expression.fullmatch(module):
                found[name] = (dim % parameter.dim(), style)
    return found


def shipped_plan(model: nn.Module, kind: str) -> dict[str, str]:
    """Return the tp or ep plan that a model of transformers carries."""
    if kind == "tp":
        return dict(getattr(model, "tp_plan", None) or {})
    plan: dict[str, str] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        plan |= getattr(config, "base_model_ep_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if style == "grouped_gemm"}


# ---------------------------------------------------------------------- verdicts


def sharded(family: str, size: int = 2) -> dict[str, Any]:
    """Return which share of a family's parameters the plan that runs cuts among ranks.

    That is the plan of ``propose_sharding(model, "auto", size)``. What was found and did not pass
    its check is whole in it. ``sharded`` is None, with a reason, if the plan was not checked.
    """
    record: dict[str, Any] = {"family": family, "sharded": None}
    try:
        model, batch = build(family)
        proposal = propose_sharding(model, "auto", size, example_batch=batch)
    except Exception as error:
        return record | {"not_sharded": f"{type(error).__name__}: {error}"[:200]}
    if proposal.proven_call is None:
        return record | {"not_sharded": "its plan was not compared with one device"}
    placements = shard(proposal.plan, model, size).placements
    numel = {name: p.numel() for name, p in model.named_parameters()}
    cut = sum(numel[name] for name, at in placements.items() if name in numel and is_sharded(at))
    return record | {"sharded": cut / sum(numel.values())}


def verdict(family: str, size: int = 2) -> dict[str, Any]:
    """Return what cutting a family comes to, as a record of plain data."""
    record: dict[str, Any] = {"family": family}
    try:
        model, batch = build(family)
    except Exception as error:
        return record | {"not_built": f"{type(error).__name__}: {error}"[:200]}
    try:
        found = find_candidates(model, batch, size)
    except Exception as error:
        return record | {"not_run": f"{type(error).__name__}: {error}"[:400]}
    numel = sum(p.numel() for p in model.parameters())
    record |= {
        "chosen": len(found.chosen),
        "kinds": {k: sum(c.kind == k for c in found.chosen) for k in ("features", "vocabulary",
                                                                      "experts")},
        "share": sum(c.sharded_numel for c in found.chosen) / numel,
        "unknown": sorted({u.operator for u in found.unknown}),
        "rejected": [list(each) for each in found.rejected],
        "whole": _whole(model, found),
        "tp": _agreement(model, shipped_plan(model, "tp"), (*found.gathered, *found.chosen)),
        "tp_chosen": _agreement(model, shipped_plan(model, "tp"), found.chosen),
        "ep": _agreement(model, shipped_plan(model, "ep"), _experts(found)),
    }  # fmt: skip
    record |= {name: value for name, value in sharded(family, size).items() if name != "family"}
    torch.set_default_dtype(torch.float64)  # code that makes numbers without a dtype
    try:
        return record | certify(model, batch, found)
    finally:
        torch.set_default_dtype(torch.float32)


def _experts(found: Candidates) -> list[Candidate]:
    return [cut for cut in (*found.chosen, *found.alternatives) if cut.kind == "experts"]


def _whole(model: nn.Module, found: Candidates) -> list[list[Any]]:
    """Return the matrices in no cut, most elements first, and what keeps them whole."""
    cut = {name for each in found.chosen for name in each.parameters}
    numel: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and name not in cut:
            pattern = generalize(name)
            numel[pattern] = numel.get(pattern, 0) + parameter.numel()
    reasons: dict[str, list[str]] = {}
    for axis, reason in found.rejected:
        reasons.setdefault(axis.partition(" ")[0], []).append(f"{axis}: {reason}")
    ordered = sorted(numel.items(), key=lambda item: -item[1])
    return [[pattern, elements, reasons.get(pattern, [])] for pattern, elements in ordered]


# These cut a parameter, gather what it gives or cut what it gets, and need no inference.
_STORAGE_ONLY = ("colwise_gather_output", "rowwise_split_input")


def _agreement(model: nn.Module, plan: Mapping[str, str], made: Iterable[Candidate]) -> Any:
    """Count the matrices that a shipped plan cuts and that are cut alike."""
    cut_dims = {name: getattr(placement, "dim", None)
                for cut in made for name, placement in cut.parameters.items()}  # fmt: skip
    shipped = shipped_dims(model, plan)
    if not shipped:
        return None
    differ = {
        name: (style, cut_dims.get(name))
        for name, (dim, style) in shipped.items()
        if cut_dims.get(name) != dim and not (style in _STORAGE_ONLY and name in cut_dims)
    }
    return {"tensors": len(shipped), "agree": len(shipped) - len(differ), "differ": differ}


def certify(model: nn.Module, batch: Mapping[str, Any], found: Candidates) -> dict[str, Any]:
    """Check the cuts: as masked ranks all of them, by permutation those of features."""
    with contextlib.suppress(Exception):
        cast(Any, model).set_experts_implementation("eager")
    randomize(model)
    batch = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
             for k, v in batch.items()}  # fmt: skip

    def run() -> torch.Tensor:
        with torch.no_grad():
            return output(model, batch)

    record: dict[str, Any] = {"certified": 0, "failed": [], "controls": 0, "uncontrolled": []}
    record |= {"ranks": 0, "ranks_wrong": []}
    try:
        before = run()
        repeated = (run() - before).abs().max().item()
    except Exception as error:
        return record | {"not_certified": f"{type(error).__name__}: {error}"[:200]}
    if repeated or not torch.isfinite(before).all():
        return record | {"not_certified": "the output is not finite, or random"}
    # Of the many equal blocks of some models two are checked.
    seen: Counter[frozenset[str]] = Counter()
    for cut in (*found.chosen, *_experts(found)):
        pattern = frozenset(map(generalize, cut.parameters))
        seen[pattern] += 1
        if seen[pattern] > 2:
            continue
        try:
            wrong = worst_error(model, lambda called: output(called, batch), cut)
        except Exception as error:
            return record | {"not_certified": f"{type(error).__name__}: {error}"[:200]}
        if wrong < 1e-5:
            record["ranks"] += 1
        else:
            record["ranks_wrong"].append([wrong, cut.kind, *cut.parameters])
        if cut.kind != "features" or is_numbered(model, cut):
            continue
        names = [*cut.parameters, *of_norms(model, cut)]
        error = change(model, run, cut, names, before)
        if error < 1e-6:
            record["certified"] += 1
        else:
            record["failed"].append([error, cut.length, names[:6]])
        alone = change(model, run, cut, matrices(model, cut)[:1], before)
        record["controls"] += alone > 1e-6
        if alone <= 1e-6:
            record["uncontrolled"].append(matrices(model, cut)[0])
    return record


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took over {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _main(
    families: list[str], write: Callable[[str], Any], judge: Callable[[str], dict[str, Any]]
) -> None:
    warnings.simplefilter("ignore")
    for family in families:
        try:
            with time_limit(600):
                record = judge(family)
        except TimeoutError as error:
            record = {"family": family, "not_run": str(error)}
        write(json.dumps(record) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="*", default=list(FAMILIES))
    parser.add_argument("--sharded", action="store_true", help="the share that is sharded alone")
    parsed = parser.parse_args()
    _main(parsed.family, sys.stdout.write, sharded if parsed.sharded else verdict)
