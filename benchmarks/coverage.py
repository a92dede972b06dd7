"""What the planner makes of public families of models: their published sizes, and no weights.

    python benchmarks/coverage.py [--families llama-3-70b ...] [--world-sizes 64 1024] > all.json
    python benchmarks/coverage.py --page docs/reference/coverage.md all.json [newer.json ...]

Every family is built on the meta device in bfloat16 and planned in a process of its own, one
thread. The first prints one JSON object: of every family its parameters, the plan of every number
of ranks or the error, the share of its bytes that tensor parallelism shards, why something is left
whole, processor seconds and the process's peak of resident memory. The second writes the page and,
beside it, the JSON that it is made of; what later files have of a family counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import platform
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_planner import Cluster, generate_plan

# Ranks of tensor parallelism that the shares are of, where heads divide; else the next smaller.
_TENSOR_PARALLEL = 8
# Of a text, or fewer where a family has fewer positions.
_TOKENS = 4096
# A step is of so many example batches, of text 4 million tokens.
_EXAMPLES = 1024
# After which a family is given up.
_MOST_SECONDS = 150
# Characters of a reason in the table.
_LONGEST = 200
Inputs = Literal["text", "translation", "masked", "image", "speech", "text and image"]


@dataclass(frozen=True)
class Family:
    """A public model: its type in transformers, the published sizes and what it is trained on."""

    model_type: str
    sizes: Mapping[str, Any]
    inputs: Inputs = "text"


def _llama_like(
    hidden: int, features: int, layers: int, heads: int, keys: int, rows: int, **more: Any
) -> dict[str, Any]:
    """Return sizes by the names that most configurations have."""
    return {
        "hidden_size": hidden, "intermediate_size": features, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": rows,
        "max_position_embeddings": 8192, **more,
    }  # fmt: skip


FAMILIES: dict[str, Family] = {
    "llama-3-70b": Family("llama", _llama_like(8192, 28672, 80, 64, 8, 128256)),
    "qwen2.5-72b": Family("qwen2", _llama_like(8192, 29568, 80, 64, 8, 152064)),
    "qwen3-32b": Family("qwen3", _llama_like(5120, 25600, 64, 64, 8, 151936, head_dim=128)),
    "gemma-2-27b": Family(
        "gemma2",
        _llama_like(4608, 36864, 46, 32, 16, 256000, head_dim=128, query_pre_attn_scalar=144),
    ),
    "gemma-3-27b": Family(
        "gemma3_text",
        _llama_like(5376, 21504, 62, 32, 16, 262208, head_dim=128, query_pre_attn_scalar=168),
    ),
    "mistral-7b": Family("mistral", _llama_like(4096, 14336, 32, 32, 8, 32768)),
    "phi-3-medium": Family("phi3", _llama_like(5120, 17920, 40, 40, 10, 32064)),
    "olmo-2-32b": Family("olmo2", _llama_like(5120, 27648, 64, 40, 8, 100352)),
    "stablelm-2-12b": Family(
        "stablelm",
        _llama_like(
            5120, 13824, 40, 32, 8, 100352, qk_layernorm=True, use_parallel_residual=True
        ),
    ),
    "granite-3-8b": Family("granite", _llama_like(4096, 12800, 40, 32, 8, 49155)),
    "smollm3-3b": Family("smollm3", _llama_like(2048, 11008, 36, 16, 4, 128256)),
    "nemotron-4-340b": Family("nemotron", _llama_like(18432, 73728, 96, 96, 8, 256000)),
    "starcoder2-15b": Family("starcoder2", _llama_like(6144, 24576, 40, 48, 4, 49152)),
    "command-r-plus": Family("cohere", _llama_like(12288, 33792, 64, 96, 8, 256000)),
    "falcon-40b": Family(
        "falcon",
        {
            "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
            "num_kv_heads": 8, "new_decoder_architecture": True, "vocab_size": 65024,
        },
    ),
    "gpt2-xl": Family(
        "gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}
    ),
    "gpt-j-6b": Family("gptj", {}),
    "gpt-neox-20b": Family(
        "gpt_neox", _llama_like(6144, 24576, 44, 64, 64, 50432)
    ),
    "opt-66b": Family(
        "opt",
        {
            "hidden_size": 9216, "ffn_dim": 36864, "num_hidden_layers": 64,
            "num_attention_heads": 72, "word_embed_proj_dim": 9216,
        },
    ),
    "bloom-176b": Family(
        "bloom", {"hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880}
    ),
    "mpt-30b": Family(
        "mpt", {"d_model": 7168, "n_heads": 64, "n_layers": 48, "max_seq_len": 8192,
                "vocab_size": 50432}
    ),
    "mixtral-8x22b": Family("mixtral", _llama_like(6144, 16384, 56, 48, 8, 32768)),
    "deepseek-v2": Family(
        "deepseek_v2",
        _llama_like(
            5120, 12288, 60, 128, 128, 102400, moe_intermediate_size=1536, n_routed_experts=160,
            num_experts_per_tok=6, n_shared_experts=2, n_group=8, topk_group=3,
            topk_method="group_limited_greedy", first_k_dense_replace=1, kv_lora_rank=512,
            q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ),
    ),
    "deepseek-v3": Family("deepseek_v3", {}),
    "qwen2-57b-a14b": Family(
        "qwen2_moe",
        _llama_like(
            3584, 18944, 28, 28, 4, 151936, moe_intermediate_size=2560,
            shared_expert_intermediate_size=20480, num_experts=64, num_experts_per_tok=8,
        ),
    ),
    "qwen3-235b-a22b": Family(
        "qwen3_moe",
        _llama_like(
            4096, 12288, 94, 64, 4, 151936, head_dim=128, moe_intermediate_size=1536,
            num_experts=128, num_experts_per_tok=8,
        ),
    ),
    "gpt-oss-120b": Family("gpt_oss", {}),
    "glm-4.5": Family(
        "glm4_moe",
        _llama_like(
            5120, 12288, 92, 96, 8, 151552, head_dim=128, moe_intermediate_size=1536,
            n_routed_experts=160, num_experts_per_tok=8, first_k_dense_replace=3,
            use_qk_norm=True,
        ),
    ),
    "olmoe-1b-7b": Family(
        "olmoe", {"intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
    ),
    "phi-3.5-moe": Family("phimoe", _llama_like(4096, 6400, 32, 32, 8, 32064)),
    "t5-11b": Family(
        "t5",
        {
            "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128,
            "decoder_start_token_id": 0,
        },
        "translation",
    ),
    "bert-large": Family(
        "bert",
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        "masked",
    ),
    "vit-huge": Family(
        "vit",
        {
            "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
            "num_attention_heads": 16, "patch_size": 14,
        },
        "image",
    ),
    "whisper-large-v3": Family(
        "whisper",
        {
            "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "vocab_size": 51866,
            "encoder_attention_heads": 20, "decoder_attention_heads": 20, "num_mel_bins": 128,
            "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
        },
        "speech",
    ),
    "qwen2-vl-72b": Family(
        "qwen2_vl",
        {
            "text_config": {
                **_llama_like(8192, 29568, 80, 64, 8, 152064, use_cache=False),
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24],
                },
            },
            "vision_config": {"hidden_size": 8192},
        },
        "text and image",
    ),
    "llava-1.5-13b": Family(
        "llava",
        {
            "text_config": {
                "model_type": "llama", "use_cache": False,
                **_llama_like(5120, 13824, 40, 40, 40, 32064),
            },
            "vision_config": {
                "model_type": "clip_vision_model", "hidden_size": 1024,
                "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "image_size": 336, "patch_size": 14,
            },
        },
        "text and image",
    ),
    "mamba-2.8b": Family("mamba", {"hidden_size": 2560, "num_hidden_layers": 64}),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("json", nargs="*", type=Path, help="results to write the page of")
    parser.add_argument("--families", nargs="*", default=[*FAMILIES], choices=[*FAMILIES])
    parser.add_argument("--world-sizes", nargs="*", type=int, default=[64, 1024])
    parser.add_argument("--cluster", default="h100", choices=Cluster.names())
    parser.add_argument("--page", type=Path, help="write it, of the results in the files")
    parsed = parser.parse_args()
    if parsed.page is not None:
        results = merged(json.loads(path.read_text("utf-8")) for path in parsed.json)
        parsed.page.write_text(page(results), "utf-8")
        text = json.dumps(results, indent=1) + "\n"
        parsed.page.with_suffix(".json").write_text(text, "utf-8")
        return
    families: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for name in parsed.families:
        with ProcessPoolExecutor(1, mp_context=context) as child:
            try:
                figures = child.submit(
                    _measure_alone, name, parsed.world_sizes, parsed.cluster
                ).result()
            except BrokenProcessPool as error:
                figures = {"error": f"ended, as after {_MOST_SECONDS} processor seconds: {error}"}
        families[name] = figures
        print(name, json.dumps(figures), file=sys.stderr, flush=True)
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cluster": parsed.cluster,
    }
    print(json.dumps({**about, "families": families}, indent=1))


def _measure_alone(name: str, world_sizes: Sequence[int], cluster: str) -> dict[str, Any]:
    """Do what :func:`measure` does, in a process that does nothing else."""
    warnings.simplefilter("ignore")
    for name_of_logger in ("transformers", "torch._subclasses.fake_tensor"):
        logging.getLogger(name_of_logger).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
    return measure(name, world_sizes, cluster)


def measure(name: str, world_sizes: Sequence[int], cluster: str) -> dict[str, Any]:
    """Return what a family gets, its errors included."""
    try:
        model = build(FAMILIES[name])
    # Arbitrary constructors: the table says which families cannot be built, and why.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    parameters = list(model.parameters())
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in parameters), "plans": {}}
    batch = example(FAMILIES[name], model)
    for size in world_sizes:
        figures["plans"][str(size)] = _timed(_planned, model, size, cluster, batch)
    figures["sharded"] = _timed(_sharded, model, batch)
    figures["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return figures


def build(family: Family) -> nn.Module:
    """Return a family's model without memory."""
    config = transformers.AutoConfig.for_model(family.model_type, use_cache=False, **family.sizes)
    with torch.device("meta"):
        model: nn.Module = _MAKERS[family.inputs].from_config(config, dtype=torch.bfloat16)
    return model.train()


_MAKERS: dict[Inputs, Any] = {
    "text": transformers.AutoModelForCausalLM,
    "translation": transformers.AutoModelForSeq2SeqLM,
    "masked": transformers.AutoModelForMaskedLM,
    "image": transformers.AutoModelForImageClassification,
    "speech": transformers.AutoModelForSpeechSeq2Seq,
    "text and image": transformers.AutoModelForImageTextToText,
}


def example(family: Family, model: Any) -> dict[str, Tensor]:
    """Return a batch of one data-parallel rank, with labels."""

    def ids(rows: int, length: int) -> Tensor:
        return torch.zeros(rows, length, dtype=torch.long)

    def floats(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    match family.inputs:
        case "text":
            config = model.config
            named = ("max_position_embeddings", "n_positions")
            length = min(_TOKENS, *(getattr(config, name, _TOKENS) for name in named))
            return {"input_ids": ids(1, length), "labels": ids(1, length)}
        case "translation" | "masked":
            return {"input_ids": ids(8, 512), "labels": ids(8, 512)}
        case "image":
            return {"pixel_values": floats(32, 3, 224, 224), "labels": ids(32, 1)[:, 0]}
        case "speech":
            return {"input_features": floats(8, 128, 3000), "labels": ids(8, 448)}
        case "text and image":
            return _example_with_an_image(model.config)


def _example_with_an_image(config: Any) -> dict[str, Tensor]:
    """Return a text of which the first tokens stand for one image."""
    text_BS = torch.zeros(1, _TOKENS, dtype=torch.long)
    batch = {"input_ids": text_BS, "labels": torch.zeros_like(text_BS)}
    vision = config.vision_config
    patches = 24
    if hasattr(vision, "spatial_merge_size"):
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        batch["pixel_values"] = torch.zeros(patches**2, width, dtype=torch.bfloat16)
        batch["image_grid_thw"] = torch.tensor([[1, patches, patches]])
        text_BS[:, : (patches // vision.spatial_merge_size) ** 2] = config.image_token_id
    else:
        side = vision.image_size
        batch["pixel_values"] = torch.zeros(1, 3, side, side, dtype=torch.bfloat16)
        text_BS[:, : patches**2] = config.image_token_id
    return batch


def _timed(run: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Return what something returns, or raises, and its processor seconds."""
    start = time.process_time()
    try:
        found = run(*given)
    # What is refused, and what is wrong, is a finding.
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": round(time.process_time() - start, 1)}


def _planned(model: nn.Module, size: int, cluster: str, batch: Any) -> dict[str, Any]:
    rows = _EXAMPLES * next(iter(batch.values())).shape[0]
    plan = generate_plan(
        model,
        {"batch.global_size": rows},
        world_size=size,
        cluster=cluster,
        example_batch=batch,
    )
    estimate = plan.estimate
    assert estimate is not None
    return {
        "tp": plan.tensor_parallel.size,
        "sequence": plan.tensor_parallel.sequence,
        "cp": plan.context_parallel.size,
        "pp": plan.pipeline_parallel.size,
        "dp": plan.data_parallel.size,
        "ep": plan.expert_parallel.size,
        "replicas": plan.data_parallel.replicate_size,
        "zero": plan.data_parallel.zero_stage,
        "recompute": plan.recompute,
        "accumulation": plan.batch.gradient_accumulation,
        "step_seconds": estimate.step_seconds,
        "memory_bytes": estimate.memory_bytes,
        "mfu": estimate.mfu(size),
        "reasons": plan.reasons,
    }


def _sharded(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the share of bytes that tensor parallelism shards, and why something is whole."""
    size = _size_that_divides(model)
    found = propose_sharding(model, "auto", size, example_batch=batch)
    sharded = found.sharded_parameters(model)
    named = dict(model.named_parameters())
    share = sum(named[n].nbytes for n in sharded & named.keys())
    return {
        "size": size,
        "share": share / sum(p.nbytes for p in named.values()),
        "left_whole": found.left_whole,
    }


def _size_that_divides(model: Any) -> int:
    """Return the ranks of which every one gets as many heads, 8 or fewer; 8 if there are none."""
    config = model.config.get_text_config()
    named = (getattr(config, name, None) for name in ("num_attention_heads", "n_head", "n_heads"))
    heads = next((count for count in named if isinstance(count, int)), 0)
    size = _TENSOR_PARALLEL
    while heads % size and size > 2:
        size //= 2
    return size if heads % size == 0 else _TENSOR_PARALLEL


PAGE = """# Coverage of the planner

What `vescale.generate_plan` makes of public families of models, of their published sizes, without
weights: each is built on the meta device in bfloat16, in a process of its own. A step of AdamW is
of {examples:,} example batches: a text of up to {tokens:,} tokens, 8 texts of 512, 8 recordings
of 30 s or 32 images. The cluster is `{cluster}`; what planned was one thread of {machine}, with
torch {torch} and transformers {transformers}.

- *plan*: sizes of tensor (tp), context (cp), pipeline (pp), data (dp) and expert parallelism (ep),
  *+ sequence* if tensor-parallel ranks shard it between layers; the ZeRO
  stage, in how many copies; *recomputes* if activations are; *parts* is gradient accumulation.
  Then predicted seconds of a step, and GiB of the fullest rank.
- *sharded*: the share of the bytes of parameters that tensor parallelism of so many ranks shards,
  in a plan that was compared with one device; 8 ranks, or fewer where heads do not divide.
- *whole*: a reason why something stays whole, that of layers before that of single dimensions.
- *CPU s*: processor seconds of the two plans and of the sharding plan; *GB*: the process's peak
  of resident memory.

`python benchmarks/coverage.py > all.json` plans all families, and with
`--page docs/reference/coverage.md all.json` writes this page.

| family | parameters | {columns} | sharded | whole | CPU s | GB |
| --- | ---: | {dashes} | ---: | --- | ---: | ---: |
{rows}
{errors}"""


def merged(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what the last of several results has of each family, in the order of the script.

    Without the reasons of plans, which are long and of which the page says nothing.
    """
    together: dict[str, Any] = {}
    families: dict[str, Any] = {}
    for each in results:
        together |= each
        families |= each["families"]
    for found in families.values():
        for plan in found.get("plans", {}).values():
            plan.pop("reasons", None)
    together["families"] = {name: families[name] for name in FAMILIES if name in families}
    return together


def page(results: Mapping[str, Any]) -> str:
    """Return the page of some results."""
    families = results["families"]
    sizes = list(dict.fromkeys(size for f in families.values() for size in f.get("plans", ())))
    errors = [line for name, found in families.items() for line in _errors(name, found)]
    return PAGE.format(
        **{name: results[name] for name in ("cluster", "machine", "torch", "transformers")},
        examples=_EXAMPLES,
        tokens=_TOKENS,
        columns=" | ".join(f"{int(size):,} ranks" for size in sizes),
        dashes=" | ".join("---" for _ in sizes),
        rows="\n".join(_row(name, found, sizes) for name, found in families.items()),
        errors="\n## Not planned\n\n" + "".join(errors) if errors else "",
    )


def _row(name: str, found: Mapping[str, Any], sizes: Sequence[str]) -> str:
    """Return a family's line of the table."""
    if "plans" not in found:
        return f"| `{name}` | | {' | '.join('none' for _ in sizes)} | | | | |"
    sharded, plans = found["sharded"], found["plans"]
    share = f"{_percent(sharded['share'])} of {sharded['size']}" if "share" in sharded else "none"
    seconds = sum(each["seconds"] for each in (sharded, *plans.values()))
    whole = _why_whole(sharded.get("left_whole", {}))
    cells = [
        f"`{name}`",
        f"{found['parameters'] / 1e9:.3g} B",
        *(_plan(plans[size]) if size in plans else "" for size in sizes),
        share,
        whole,
        f"{seconds:.0f}",
        f"{found['peak_bytes'] / 1e9:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _why_whole(left_whole: Mapping[str, str]) -> str:
    """Return the first reason, of layers that were refused if there are any."""
    layers = [what for what in left_whole if " dim " not in what]
    for what in (layers or [*left_whole])[:1]:
        why = " ".join(f"`{what.split(',')[0].split(' ')[0]}`: {left_whole[what]}".split())
        return (why[:_LONGEST] + "..." * (len(why) > _LONGEST)).replace("|", "/")
    return ""


def _percent(share: float) -> str:
    """Return a share, all of it only if nothing is left out."""
    return "100%" if share == 1.0 else f"{min(share, 0.999):.1%}"


def _plan(plan: Mapping[str, Any]) -> str:
    if "error" in plan:
        return "none"
    axes = ("tp", "cp", "pp", "dp", "ep")
    said = [f"{axis} {plan[axis]}" for axis in axes if plan.get(axis, 1) > 1]
    if plan.get("sequence"):
        said[0] += " + sequence"
    copies = f" in {plan['replicas']} copies" if plan["replicas"] > 1 else ""
    said += [f"ZeRO {plan['zero']}{copies}"] * (plan["zero"] > 0)
    said += ["recomputes"] * (plan["recompute"] != "none")
    said += [f"{plan['accumulation']} parts"] * (plan["accumulation"] > 1)
    cost = f"{plan['step_seconds']:.3g} s, {plan['memory_bytes'] / 2**30:.0f} GiB"
    return f"{', '.join(said)}: {cost}"


def _errors(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was raised instead of plans."""
    plans = {f"{int(size):,} ranks": each for size, each in found.get("plans", {}).items()}
    tried = {"": found, **plans, "sharding": found.get("sharded", {})}
    for what, each in tried.items():
        if "error" in each:
            why = " ".join(each["error"].split())
            yield f"- `{name}`{what and ', '}{what}: {why}\n"


if __name__ == "__main__":
    main()
