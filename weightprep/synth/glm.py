"""GLM-5.x (DSA) and GLM-4.7-Flash: 448 rows of kv_b_proj per head, so 128-row scale blocks straddle heads."""

from __future__ import annotations

from weightprep.synth.layout import Architecture
from weightprep.synth.mla import COMMON_KEYS, INDEXER, LAYER, MLA, NEXTN, Q_LORA, ROUTER_BIAS, SMALL_SIZES, top_level

__all__ = ["GLM4_MOE_LITE", "GLM_MOE_DSA"]

GLM_MOE_DSA = Architecture(
    name="glm_moe_dsa",
    config={
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **COMMON_KEYS,
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
    small={**SMALL_SIZES, "q_lora_rank": 128, "index_n_heads": 4},
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

GLM4_MOE_LITE = Architecture(
    name="glm4_moe_lite",
    config={
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        **COMMON_KEYS,
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "kv_lora_rank": 512,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    small={**SMALL_SIZES, "q_lora_rank": 128},
    full={"hidden_size": 2048, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768},
    layer_prefix="model.layers.{i}.",
    rows=(*LAYER, *ROUTER_BIAS, *Q_LORA, *MLA, *NEXTN),
    top=top_level(),
)
