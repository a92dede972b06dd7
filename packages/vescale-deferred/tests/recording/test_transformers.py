"""Families of transformers, tiny, constructed from their config classes."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

# Its lazy attributes mean nothing to a type checker.
transformers: Any = import_module("transformers")
Check = Callable[[Callable[[], nn.Module]], Any]

# Each config class takes what it knows.
_TINY = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "state_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "word_embed_proj_dim": 32,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_USUAL = ("bert", "deepseek_v3", "gpt2", "llama", "mamba", "mixtral", "t5", "vit")
_NIGHTLY = """
    albert apertus arcee bart beit biogpt bitnet blenderbot bloom camembert clip codegen cohere
    cohere2 convnext ctrl data2vec-text data2vec-vision deberta deberta-v2 deit deepseek_v2
    diffllama dinov2 distilbert electra ernie ernie4_5 exaone4 flaubert fnet gemma gemma2
    gemma3_text git glm glm4 glm4_moe gpt_bigcode gpt_neox gptj granite granitemoe helium hubert
    ibert imagegpt jamba led lfm2 longformer longt5 lw_detr m2m_100 marian mbart megatron-bert
    mistral mobilebert modernbert mpnet mpt mra mt5 nemotron nystromformer olmo olmo2 olmoe opt
    pegasus persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe rembert resnet roberta
    roformer rwkv seed_oss smollm3 squeezebert stablelm starcoder2 switch_transformers
    timesformer umt5 vit_mae wav2vec2 wavlm whisper xglm xlm xlm-roberta xmod yoso
"""


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


def _config(family: str, **changes: object) -> object:
    return transformers.CONFIG_MAPPING[family](**{**_TINY, **changes})


@pytest.mark.parametrize("family", _USUAL)
def test_a_family_has_its_ordinary_values(family: str, same_as_ordinary: Check):
    config = _config(family)
    same_as_ordinary(lambda: transformers.AutoModel.from_config(config))


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # some families warn while they construct
@pytest.mark.filterwarnings("error::vescale_deferred.DeferredWarning")
@pytest.mark.parametrize("family", _NIGHTLY.split())
def test_another_family_has_its_ordinary_values(family: str, same_as_ordinary: Check):
    config = _config(family)
    same_as_ordinary(lambda: transformers.AutoModel.from_config(config))


def test_tied_embeddings_in_bfloat16_have_their_ordinary_values(same_as_ordinary: Check):
    config = _config("llama", tie_word_embeddings=True)
    model = same_as_ordinary(
        lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype is torch.bfloat16
