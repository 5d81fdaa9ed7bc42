"""DeepSeek-V4: no kv_b_proj and no `model.` prefix; a checkpoint that a converter must recognise as having nothing to
convert.

Names and shapes follow the parameters of transformers' model and its map from checkpoint names.
"""

from __future__ import annotations

from weightprep.formats.encoding import Encoding
from weightprep.synth.layout import Architecture, Kind, LayerKind, Row
from weightprep.synth.mla import COMMON_KEYS

__all__ = ["DEEPSEEK_V4"]


def _compressor(prefix: str, rows: str, ratio: str, norm: str, layers: LayerKind) -> tuple[Row, ...]:
    return (
        Row(f"{prefix}.wkv.weight", (rows, "hidden_size"), Kind.KEPT, layers),
        Row(f"{prefix}.wgate.weight", (rows, "hidden_size"), Kind.KEPT, layers),
        Row(f"{prefix}.ape", (ratio, rows), Kind.FLOAT32, layers),
        Row(f"{prefix}.norm.weight", (norm,), Kind.NORM, layers),
    )


def _hyper_connection(name: str) -> tuple[Row, ...]:
    return (
        Row(f"hc_{name}_fn", ("hc_rows", "hc_columns"), Kind.FLOAT32),
        Row(f"hc_{name}_base", ("hc_rows",), Kind.FLOAT32),
        Row(f"hc_{name}_scale", ("three",), Kind.FLOAT32),
    )


def _mlp(prefix: str, kind: Kind) -> tuple[Row, ...]:
    return (
        Row(f"{prefix}.w1.weight", ("moe_intermediate_size", "hidden_size"), kind),
        Row(f"{prefix}.w2.weight", ("hidden_size", "moe_intermediate_size"), kind),
        Row(f"{prefix}.w3.weight", ("moe_intermediate_size", "hidden_size"), kind),
    )


_ROWS = (
    Row("attn_norm.weight", ("hidden_size",), Kind.NORM),
    Row("ffn_norm.weight", ("hidden_size",), Kind.NORM),
    Row("attn.wq_a.weight", ("q_lora_rank", "hidden_size"), Kind.ATTENTION),
    Row("attn.q_norm.weight", ("q_lora_rank",), Kind.NORM),
    Row("attn.wq_b.weight", ("v4_q_rows", "q_lora_rank"), Kind.ATTENTION),
    Row("attn.wkv.weight", ("head_dim", "hidden_size"), Kind.ATTENTION),
    Row("attn.kv_norm.weight", ("head_dim",), Kind.NORM),
    Row("attn.wo_a.weight", ("o_rows", "o_group_columns"), Kind.ATTENTION),
    Row("attn.wo_b.weight", ("hidden_size", "o_rows"), Kind.ATTENTION),
    Row("attn.attn_sink", ("num_attention_heads",), Kind.FLOAT32),
    *_compressor("attn.compressor", "two_head_dim", "four", "head_dim", LayerKind.COMPRESSED_4),
    *_compressor("attn.compressor", "head_dim", "ratio_128", "head_dim", LayerKind.COMPRESSED_128),
    Row("attn.indexer.wq_b.weight", ("index_rows", "q_lora_rank"), Kind.ATTENTION, LayerKind.COMPRESSED_4),
    Row("attn.indexer.weights_proj.weight", ("index_n_heads", "hidden_size"), Kind.KEPT, LayerKind.COMPRESSED_4),
    *_compressor("attn.indexer.compressor", "two_index_dim", "four", "index_head_dim", LayerKind.COMPRESSED_4),
    *_hyper_connection("attn"),
    *_hyper_connection("ffn"),
    Row("ffn.gate.weight", ("n_routed_experts", "hidden_size"), Kind.KEPT),
    Row("ffn.gate.bias", ("n_routed_experts",), Kind.FLOAT32),
    *_mlp("ffn.shared_experts", Kind.MLP),
    *_mlp("ffn.experts.{e}", Kind.EXPERT),
    Row("e_proj.weight", ("hidden_size", "hidden_size"), Kind.ATTENTION, LayerKind.NEXTN),
    Row("h_proj.weight", ("hidden_size", "hidden_size"), Kind.ATTENTION, LayerKind.NEXTN),
    Row("enorm.weight", ("hidden_size",), Kind.NORM, LayerKind.NEXTN),
    Row("hnorm.weight", ("hidden_size",), Kind.NORM, LayerKind.NEXTN),
    Row("norm.weight", ("hidden_size",), Kind.NORM, LayerKind.NEXTN),
    Row("hc_head_fn", ("hc_mult", "hc_columns"), Kind.FLOAT32, LayerKind.NEXTN),
    Row("hc_head_base", ("hc_mult",), Kind.FLOAT32, LayerKind.NEXTN),
    Row("hc_head_scale", ("one",), Kind.FLOAT32, LayerKind.NEXTN),
)

DEEPSEEK_V4 = Architecture(
    name="deepseek_v4",
    config={
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **COMMON_KEYS,
        "num_hidden_layers": 43,
        "num_nextn_predict_layers": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "sliding_window": 128,
        "compress_ratios": [],
        "num_hash_layers": 0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
    },
    small={
        "vocab_size": 512,
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 8,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "o_groups": 4,
        "index_n_heads": 4,
    },
    full={
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "index_n_heads": 64,
    },
    layer_prefix="layers.{i}.",
    nextn_prefix="mtp.{i}.",
    rows=_ROWS,
    top=(
        Row("embed.weight", ("vocab_size", "hidden_size"), Kind.KEPT),
        Row("norm.weight", ("hidden_size",), Kind.NORM),
        Row("head.weight", ("vocab_size", "hidden_size"), Kind.KEPT),
        Row("hc_head_fn", ("hc_mult", "hc_columns"), Kind.FLOAT32),
        Row("hc_head_base", ("hc_mult",), Kind.FLOAT32),
        Row("hc_head_scale", ("one",), Kind.FLOAT32),
    ),
    extra_sizes={"one": 1, "three": 3, "four": 4, "ratio_128": 128},
    fp8_lists_kept=False,
    expert_dtypes={Encoding.MXFP4: "fp4", Encoding.FP8_BLOCK: "fp8"},
)
