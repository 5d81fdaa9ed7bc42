"""DeepSeek V2, V2-Lite, V3 (R1, V3.1) and V3.2: 256 rows of kv_b_proj per head, so scale blocks and heads line up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightprep.synth.layout import Architecture
from weightprep.synth.mla import (
    COMMON_KEYS,
    COPIED_BY_NEXTN,
    INDEXER,
    LAYER,
    MLA,
    NEXTN,
    PLAIN_Q,
    Q_LORA,
    ROUTER_BIAS,
    SMALL_SIZES,
    top_level,
)

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V2_LITE", "DEEPSEEK_V3", "DEEPSEEK_V32", "V3_KEYS", "YARN"]

YARN: Mapping[str, object] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_HEAD: Mapping[str, int] = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}

DEEPSEEK_V2_LITE = Architecture(
    name="deepseek_v2_lite",
    config={
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **COMMON_KEYS,
        **_HEAD,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    small=SMALL_SIZES,
    full={"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16},
    layer_prefix="model.layers.{i}.",
    rows=(*LAYER, *PLAIN_Q, *MLA),
    top=top_level(),
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V2_LITE,
    name="deepseek_v2",
    config={
        **DEEPSEEK_V2_LITE.config,
        "num_hidden_layers": 60,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "topk_method": "group_limited_greedy",
    },
    small={**SMALL_SIZES, "q_lora_rank": 128},
    full={"hidden_size": 5120, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536},
    rows=(*LAYER, *Q_LORA, *MLA),
)

# Also Kimi K2's, which is a DeepSeek-V3 with other sizes.
V3_KEYS: Mapping[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **COMMON_KEYS,
    **_HEAD,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    config=V3_KEYS,
    small={**SMALL_SIZES, "q_lora_rank": 128},
    full={"hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536},
    layer_prefix="model.layers.{i}.",
    rows=(*LAYER, *ROUTER_BIAS, *Q_LORA, *MLA, *NEXTN, *COPIED_BY_NEXTN),
    top=top_level(),
    fp8_lists_kept=False,
)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    config={
        **V3_KEYS,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    small={**DEEPSEEK_V3.small, "index_n_heads": 4},
    full={**DEEPSEEK_V3.full, "index_n_heads": 64},
    rows=(*DEEPSEEK_V3.rows, *INDEXER),
)
