"""GLM-5.2's attention, which the measurements work on: the dims of kv_b_proj, and a config.json that has no more."""

from __future__ import annotations

HEADS, NOPE, V, RANK = 64, 192, 256, 512


def config(*, heads: int = HEADS, layers: int = 1, nextn: int = 0) -> dict[str, object]:
    """What the recipe glm_moe_dsa reads of a config.json, with `layers` decoder and `nextn` NextN layers."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": nextn,
        "num_attention_heads": heads,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": V,
        "kv_lora_rank": RANK,
    }
