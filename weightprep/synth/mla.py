"""What MLA families share: config keys, sizes of a small model, and tensor tables with published names.

Sources: the key grammar of the published GLM-5.2-FP8 headers, DeepSeek-V3's README_WEIGHTS, and the state dicts of
transformers' models of the same families.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightprep.synth.layout import Kind, LayerKind, Row

__all__ = [
    "COMMON_KEYS",
    "COPIED_BY_NEXTN",
    "INDEXER",
    "LAYER",
    "MLA",
    "NEXTN",
    "PLAIN_Q",
    "Q_LORA",
    "ROUTER_BIAS",
    "SMALL_SIZES",
    "top_level",
]

# Published keys that say nothing about sizes and are the same for all families here.
COMMON_KEYS: Mapping[str, object] = {
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
SMALL_SIZES: Mapping[str, int] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}

LAYER = (
    Row("input_layernorm.weight", ("hidden_size",), Kind.NORM),
    Row("post_attention_layernorm.weight", ("hidden_size",), Kind.NORM),
    Row("mlp.gate_proj.weight", ("intermediate_size", "hidden_size"), Kind.MLP, LayerKind.DENSE),
    Row("mlp.up_proj.weight", ("intermediate_size", "hidden_size"), Kind.MLP, LayerKind.DENSE),
    Row("mlp.down_proj.weight", ("hidden_size", "intermediate_size"), Kind.MLP, LayerKind.DENSE),
    Row("mlp.gate.weight", ("n_routed_experts", "hidden_size"), Kind.KEPT, LayerKind.SPARSE),
    Row("mlp.shared_experts.gate_proj.weight", ("shared_rows", "hidden_size"), Kind.MLP, LayerKind.SPARSE),
    Row("mlp.shared_experts.up_proj.weight", ("shared_rows", "hidden_size"), Kind.MLP, LayerKind.SPARSE),
    Row("mlp.shared_experts.down_proj.weight", ("hidden_size", "shared_rows"), Kind.MLP, LayerKind.SPARSE),
    Row("mlp.experts.{e}.gate_proj.weight", ("moe_intermediate_size", "hidden_size"), Kind.EXPERT, LayerKind.SPARSE),
    Row("mlp.experts.{e}.up_proj.weight", ("moe_intermediate_size", "hidden_size"), Kind.EXPERT, LayerKind.SPARSE),
    Row("mlp.experts.{e}.down_proj.weight", ("hidden_size", "moe_intermediate_size"), Kind.EXPERT, LayerKind.SPARSE),
)

# The router of DeepSeek-V3 and later; V2 has none.
ROUTER_BIAS = (Row("mlp.gate.e_score_correction_bias", ("n_routed_experts",), Kind.FLOAT32, LayerKind.SPARSE),)

Q_LORA = (
    Row("self_attn.q_a_proj.weight", ("q_lora_rank", "hidden_size"), Kind.ATTENTION),
    Row("self_attn.q_a_layernorm.weight", ("q_lora_rank",), Kind.NORM),
    Row("self_attn.q_b_proj.weight", ("q_rows", "q_lora_rank"), Kind.ATTENTION),
)

PLAIN_Q = (Row("self_attn.q_proj.weight", ("q_rows", "hidden_size"), Kind.ATTENTION),)

MLA = (
    Row("self_attn.kv_a_proj_with_mqa.weight", ("kv_a_rows", "hidden_size"), Kind.ATTENTION),
    Row("self_attn.kv_a_layernorm.weight", ("kv_lora_rank",), Kind.NORM),
    Row("self_attn.kv_b_proj.weight", ("kv_b_rows", "kv_lora_rank"), Kind.ATTENTION),
    Row("self_attn.o_proj.weight", ("hidden_size", "o_columns"), Kind.ATTENTION),
)

# The published exclude lists of GLM call weights_proj by a name that no tensor has.
INDEXER = (
    Row("self_attn.indexer.wq_b.weight", ("index_rows", "q_lora_rank"), Kind.ATTENTION, LayerKind.INDEXED),
    Row("self_attn.indexer.wk.weight", ("index_head_dim", "hidden_size"), Kind.ATTENTION, LayerKind.INDEXED),
    Row(
        "self_attn.indexer.weights_proj.weight",
        ("index_n_heads", "hidden_size"),
        Kind.KEPT,
        LayerKind.INDEXED,
        "self_attn.indexers_proj",
    ),
    Row("self_attn.indexer.k_norm.weight", ("index_head_dim",), Kind.NORM, LayerKind.INDEXED),
    Row("self_attn.indexer.k_norm.bias", ("index_head_dim",), Kind.NORM, LayerKind.INDEXED),
)

NEXTN = (
    Row("eh_proj.weight", ("hidden_size", "two_hidden"), Kind.KEPT, LayerKind.NEXTN),
    Row("enorm.weight", ("hidden_size",), Kind.NORM, LayerKind.NEXTN),
    Row("hnorm.weight", ("hidden_size",), Kind.NORM, LayerKind.NEXTN),
    Row("shared_head.norm.weight", ("hidden_size",), Kind.NORM, LayerKind.NEXTN),
)

# DeepSeek's NextN layer carries copies of the main model's embedding and head; GLM's does not.
COPIED_BY_NEXTN = (
    Row("embed_tokens.weight", ("vocab_size", "hidden_size"), Kind.KEPT, LayerKind.NEXTN),
    Row("shared_head.head.weight", ("vocab_size", "hidden_size"), Kind.KEPT, LayerKind.NEXTN),
)


def top_level(prefix: str = "") -> tuple[Row, ...]:
    """Embedding, final norm and head of a model below `prefix`."""
    return (
        Row(f"{prefix}model.embed_tokens.weight", ("vocab_size", "hidden_size"), Kind.KEPT),
        Row(f"{prefix}model.norm.weight", ("hidden_size",), Kind.NORM),
        Row(f"{prefix}lm_head.weight", ("vocab_size", "hidden_size"), Kind.KEPT),
    )
