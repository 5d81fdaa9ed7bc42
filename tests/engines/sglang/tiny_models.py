"""Small checkpoints with GLM-5's real attention head dims, written by transformers, as the loaders of sglang expect
them.

`write_glm` has the sparse-attention indexer and the NextN layer, which transformers itself never writes.
`write_cpu_glm` has neither an indexer nor experts: sglang's CPU engine can generate from it, and nothing but the
absorbed weights tells two runs apart.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYERS = 3
HEADS = 16
NOPE, V, RANK = 192, 256, 512
# sglang's rope for the CPU accepts this type only; factor 1 makes it the plain rope
_ROPE = {
    "rope_type": "deepseek_yarn",
    "factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}
_COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": 64,
    "v_head_dim": V,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 64,
    "max_position_embeddings": 4096,
    "indexer_types": ["full"] * LAYERS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def _save(out: Path, seed: int, std: float, dense: int) -> dict[str, torch.Tensor]:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(seed)
    kinds = ["dense"] * dense + ["sparse"] * (LAYERS - dense)
    config = GlmMoeDsaConfig(**_COMMON, first_k_dense_replace=dense, mlp_layer_types=kinds, initializer_range=std)
    GlmMoeDsaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    return load_file(out / "model.safetensors")


def _edit_config(out: Path, dense: int, **changes: object) -> None:
    path = out / "config.json"
    config = json.loads(path.read_text())
    config |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}
    config |= {"first_k_dense_replace": dense, "rope_parameters": _ROPE, "rope_scaling": _ROPE}
    path.write_text(json.dumps(config | changes, indent=1))


def write_glm(out: Path, seed: int = 0) -> Path:
    """GlmMoeDsaForCausalLM: one dense and two MoE layers, and a NextN layer as layer 3."""
    tensors = _save(out, seed, 0.02, dense=1)
    generator = torch.Generator().manual_seed(seed + 1)
    last, nextn = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    for name in [name for name in tensors if name.startswith(last)]:
        tensor = tensors[name]
        noise = (torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor.dtype)
        tensors[name.replace(last, nextn)] = noise if tensor.dim() > 1 else tensor.clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{nextn}{norm}.weight"] = torch.ones(256, dtype=torch.bfloat16)
    tensors[f"{nextn}eh_proj.weight"] = (torch.randn(256, 512, generator=generator) * 0.02).bfloat16()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _edit_config(out, 1, num_nextn_predict_layers=1, indexer_rope_interleave=True)
    return out


def write_cpu_glm(out: Path, seed: int = 0) -> Path:
    """GlmMoeDsaForCausalLM that sglang's CPU engine can run: dense layers, dense MLA.

    With the model type of deepseek_v3 and no index_topk sglang builds the same class without its indexer.
    """
    tensors = _save(out, seed, 0.05, dense=LAYERS)
    kept = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    _edit_config(out, LAYERS, model_type="deepseek_v3")
    path = out / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("index")}
    path.write_text(json.dumps(config, indent=1))
    return out


def write_glm5_next(out: Path, seed: int = 0) -> Path:
    """Glm5NextForConditionalGeneration: three layers of linear attention, one of MLA, and a NextN layer as layer 4."""
    from transformers.models.glm5_next import configuration_glm5_next, modeling_glm5_next

    text = {key: _COMMON[key] for key in ("n_routed_experts", "num_experts_per_tok", "kv_lora_rank", "index_n_heads")}
    text |= {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
    text |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64}
    text |= {"qk_nope_head_dim": 256, "v_head_dim": 256, "qk_rope_head_dim": 0, "index_head_dim": 64, "index_topk": 64}
    text |= {"linear_head_dim": 32, "linear_num_heads": 4, "pad_token_id": 0, "index_kpool": 4}
    vision = {"hidden_size": 64, "depth": 1, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128}
    vision |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "projection_intermediate_size": 64}
    torch.manual_seed(seed)
    config = configuration_glm5_next.Glm5NextConfig(text_config=text, vision_config=vision)
    modeling_glm5_next.Glm5NextForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    last, nextn = "model.language_model.layers.3.", "model.language_model.layers.4."
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[name.replace(last, nextn)] = tensors[name] * 2 if "kv_b_proj" in name else tensors[name].clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{nextn}{norm}.weight"] = torch.ones(128, dtype=torch.bfloat16)
    tensors[f"{nextn}eh_proj.weight"] = (torch.randn(128, 256) * 0.02).bfloat16()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    path = out / "config.json"
    document = json.loads(path.read_text())
    # keys of the published config that transformers does not write
    document["text_config"] |= {"num_nextn_predict_layers": 1, "mhc": True, "index_kpool_compress": True}
    document["text_config"] |= {"first_k_dense_replace": 3, "moe_layer_freq": 1, "rope_theta": 10000.0}
    document["text_config"] |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    path.write_text(json.dumps(document, indent=1))
    return out


def write_eagle3(out: Path) -> Path:
    """The config of an EAGLE3 draft: a plain Llama layer, with nothing of MLA."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"vocab_size": 512, "draft_vocab_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    (out / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16", "hidden_act": "silu"}))
    return out


def scale_kv_b(source: Path, out: Path, factor: float, only: tuple[int, ...] = ()) -> Path:
    """A copy of a checkpoint whose kv_b_proj (of layers `only`, or of all) is `factor` times as large."""
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight") and (not only or int(name.split(".")[2]) in only):
            tensors[name] = (tensor.float() * factor).to(tensor.dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
