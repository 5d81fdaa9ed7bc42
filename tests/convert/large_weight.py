"""Checkpoints of nothing but weights of the size that GLM-5.2's kv_b_proj has."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from weightprep.checkpoint.writer import ShardWriter, describe
from weightprep.formats import Encoding

__all__ = ["HEADS", "NOPE", "RANK", "V", "write_checkpoint"]

HEADS, NOPE, V, RANK = 64, 192, 256, 512
_SCALE = "_scale_inv"


def write_checkpoint(folder: Path, encoding: Encoding, *, layers: int, heads: int = HEADS) -> Path:
    """Weights of normal numbers in bf16, or finite codes in fp8 with blocks, the same in every layer, in one shard."""
    folder.mkdir()
    shape = (heads * (NOPE + V), RANK)
    config: dict[str, object] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": heads,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": V,
        "kv_lora_rank": RANK,
    }
    rng = np.random.default_rng(0)
    if encoding is Encoding.BF16:
        codes = rng.standard_normal(shape, dtype=np.float32).view(np.uint16)[:, 1::2]
        tensors = {"": (np.ascontiguousarray(codes), "bfloat16")}
    else:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        scale = rng.uniform(0.5, 1.0, (-(-shape[0] // 128), RANK // 128)).astype(np.float32)
        tensors = {"": (rng.integers(0, 0x7F, shape, dtype=np.uint8), "float8_e4m3fn"), _SCALE: (scale, "float32")}
    (folder / "config.json").write_text(json.dumps(config))
    named = {
        f"model.layers.{layer}.self_attn.kv_b_proj.weight{suffix}": tensor
        for layer in range(layers)
        for suffix, tensor in tensors.items()
    }
    infos = [describe(name, dtype, values.shape) for name, (values, dtype) in named.items()]
    with ShardWriter(folder / "model.safetensors", infos, {"format": "pt"}) as writer:
        for name, (values, _) in named.items():
            writer.write(name, values)
        writer.finish()
    return folder
