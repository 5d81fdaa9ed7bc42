"""The model families that `synth` can write, each as data: published config keys, sizes and tensor tables.

`small` sizes keep what kernels and splits depend on (nope, rope, v and rank as published, so that scale blocks
straddle heads where the real ones do) and shrink everything else; `full` puts the published attention sizes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weightprep.synth.layout import Architecture
from weightprep.synth.rows import INDEXER, LAYER, MLA, NEXTN, Q_LORA, ROUTER_BIAS, top_level

__all__ = ["ARCHITECTURES"]

# Published keys that say nothing about sizes and are the same for all families here.
_COMMON: Mapping[str, object] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "use_cache": True,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
}

# Sizes that stay small whatever the attention's are: they only add bytes.
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}

_GLM_MOE_DSA = Architecture(
    name="glm_moe_dsa",
    config={
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **_COMMON,
        "num_hidden_layers": 78,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "kv_lora_rank": 512,
        "head_dim": 192,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "indexer_types": [],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "rope_interleave": True,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    small={**_SMALL, "q_lora_rank": 128, "index_n_heads": 4},
    full={
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "index_n_heads": 32,
    },
    layer_prefix="model.layers.{i}.",
    rows=(*LAYER, *ROUTER_BIAS, *Q_LORA, *MLA, *INDEXER, *NEXTN),
    top=top_level(),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({a.name: a for a in (_GLM_MOE_DSA,)})
