"""Kimi K2, and K2.5/K2.6, which wrap it: prefix `language_model.`, the language model's config under `text_config`."""

from __future__ import annotations

from dataclasses import replace

from weightprep.synth.deepseek import DEEPSEEK_V3, V3_KEYS, YARN
from weightprep.synth.layout import Architecture, Kind, Row
from weightprep.synth.mla import LAYER, MLA, Q_LORA, ROUTER_BIAS, SMALL_SIZES, top_level

__all__ = ["KIMI_K2", "KIMI_K25"]

KIMI_K2 = Architecture(
    name="kimi_k2",
    config={
        **V3_KEYS,
        "model_type": "kimi_k2",
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "rope_theta": 50000,
        "rope_scaling": {**YARN, "factor": 32},
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
    },
    small=DEEPSEEK_V3.small,
    full={"hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536},
    layer_prefix="model.layers.{i}.",
    rows=(*LAYER, *ROUTER_BIAS, *Q_LORA, *MLA),
    top=top_level(),
    fp8_lists_kept=False,
)

# One block of the vision tower: it is there to be carried along untouched.
_VISION = {
    "vision_hidden": 64,
    "vision_intermediate": 128,
    "vision_qkv": 192,
    "merged": 256,
    "patch": 14,
    "rgb": 3,
    "grid": 8,
}
_VISION_SIZES = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
_BLOCK = "vision_tower.encoder.blocks.0."
_VISION_ROWS = (
    Row("vision_tower.patch_embed.proj.weight", ("vision_hidden", "rgb", "patch", "patch"), Kind.KEPT),
    Row("vision_tower.patch_embed.proj.bias", ("vision_hidden",), Kind.NORM),
    Row("vision_tower.patch_embed.pos_emb.weight", ("grid", "grid", "vision_hidden"), Kind.KEPT),
    *(
        Row(f"{_BLOCK}{name}.{part}", shape if part == "weight" else shape[:1], kind if part == "weight" else Kind.NORM)
        for name, shape, kind in (
            ("norm0", ("vision_hidden",), Kind.NORM),
            ("norm1", ("vision_hidden",), Kind.NORM),
            ("wqkv", ("vision_qkv", "vision_hidden"), Kind.KEPT),
            ("wo", ("vision_hidden", "vision_hidden"), Kind.KEPT),
            ("mlp.fc0", ("vision_intermediate", "vision_hidden"), Kind.KEPT),
            ("mlp.fc1", ("vision_hidden", "vision_intermediate"), Kind.KEPT),
        )
        for part in ("weight", "bias")
    ),
    Row("vision_tower.encoder.final_layernorm.weight", ("vision_hidden",), Kind.NORM),
    Row("vision_tower.encoder.final_layernorm.bias", ("vision_hidden",), Kind.NORM),
    Row("mm_projector.pre_norm.weight", ("vision_hidden",), Kind.NORM),
    Row("mm_projector.pre_norm.bias", ("vision_hidden",), Kind.NORM),
    Row("mm_projector.proj.0.weight", ("merged", "merged"), Kind.KEPT),
    Row("mm_projector.proj.0.bias", ("merged",), Kind.NORM),
    Row("mm_projector.proj.2.weight", ("hidden_size", "merged"), Kind.KEPT),
    Row("mm_projector.proj.2.bias", ("hidden_size",), Kind.NORM),
)

KIMI_K25 = replace(
    KIMI_K2,
    name="kimi_k25",
    layer_prefix="language_model.model.layers.{i}.",
    top=(*top_level("language_model."), *_VISION_ROWS),
    extra_sizes=_VISION,
    wrapper={
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": 500,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        # Published under `vt_`, read without it: the published sizes are the readers' defaults.
        "vision_config": {
            "model_type": "kimi_k25",
            "patch_size": 14,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "init_pos_emb_time": 4,
            **{prefix + key: size for key, size in _VISION_SIZES.items() for prefix in ("vt_", "")},
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": 64,
            "text_hidden_size": SMALL_SIZES["hidden_size"],
        },
    },
)
