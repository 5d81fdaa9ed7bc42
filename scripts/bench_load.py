"""Time sglang's load of a GLM checkpoint with and without weightprep, in the same run, on a machine without a GPU.

    python scripts/bench_load.py FOLDER [--layers 79] [--repeats 3]

Writes a checkpoint with GLM-5.2's attention dims (64 heads, 192/256/512) into FOLDER, NextN included, everything else
as small as it may be, and converts it inline and with a sidecar. Then each of `auto`, `auto` with upstream's own cast
for gfx950, `weightprep` online, inline and sidecar loads main model and draft, in turns, in one process with sglang
0.5.23 that was started as the tests start it. Prints JSON: seconds of each load, and of the preparation inside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engines" / "sglang"))

HEADS, NOPE, ROPE, V, RANK, Q_RANK, HIDDEN = 64, 192, 64, 256, 512, 128, 256
FFN, MOE_FFN, EXPERTS, VOCAB = 256, 128, 8, 512
GFX950 = {"target": "gfx950", "canary": "off"}


def write_checkpoint(folder: Path, layers: int) -> None:
    """One dense decoder layer per shard, the NextN layer in the last."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_a_proj": (Q_RANK, HIDDEN),
        "self_attn.q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
        "self_attn.kv_a_proj_with_mqa": (RANK + ROPE, HIDDEN),
        "self_attn.kv_b_proj": (HEADS * (NOPE + V), RANK),
        "self_attn.o_proj": (HIDDEN, HEADS * V),
    }
    norms = {
        "self_attn.q_a_layernorm": Q_RANK,
        "self_attn.kv_a_layernorm": RANK,
        "input_layernorm": HIDDEN,
        "post_attention_layernorm": HIDDEN,
    }
    dense = {"mlp": FFN}
    # sglang builds the NextN layer with experts whatever the config says of dense layers
    sparse = {"mlp.shared_experts": MOE_FFN, **{f"mlp.experts.{expert}": MOE_FFN for expert in range(EXPERTS)}}
    index = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        here = dict(shapes)
        for mlp, width in (sparse if layer == layers - 1 else dense).items():
            here |= {f"{mlp}.{name}_proj": (width, HIDDEN) for name in ("gate", "up")}
            here[f"{mlp}.down_proj"] = (HIDDEN, width)
        tensors = {
            f"{prefix}{name}.weight": (torch.randn(shape, generator=generator) * 0.02).bfloat16()
            for name, shape in here.items()
        }
        tensors |= {f"{prefix}{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
        if layer == 0:
            for name, rows in (("model.embed_tokens", VOCAB), ("lm_head", VOCAB)):
                tensors[f"{name}.weight"] = (torch.randn((rows, HIDDEN), generator=generator) * 0.02).bfloat16()
            tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        if layer == layers - 1:
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
            tensors[f"{prefix}mlp.gate.weight"] = torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)
            tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
            tensors[f"{prefix}eh_proj.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
        file = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(_config(layers - 1)))


def _config(layers: int) -> dict[str, Any]:
    rope = {
        **{"rope_type": "deepseek_yarn", "factor": 1.0, "original_max_position_embeddings": 4096, "beta_fast": 32},
        **{"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0},
    }
    return {
        # without an indexer, as in the tests' model for the CPU engine
        **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16"},
        **{"num_hidden_layers": layers, "num_nextn_predict_layers": 1, "first_k_dense_replace": layers + 1},
        **{"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "qk_nope_head_dim": NOPE, "v_head_dim": V},
        **{"qk_rope_head_dim": ROPE, "kv_lora_rank": RANK, "q_lora_rank": Q_RANK, "hidden_size": HIDDEN},
        **{
            "intermediate_size": FFN,
            "moe_intermediate_size": MOE_FFN,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
        },
        **{
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        **{"vocab_size": VOCAB, "max_position_embeddings": 4096, "moe_layer_freq": 1, "scoring_func": "sigmoid"},
        **{
            "topk_method": "noaux_tc",
            "ep_size": 1,
            "rope_parameters": rope,
            "rope_scaling": rope,
            "hidden_act": "silu",
        },
        **{"rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False},
    }


def time_load(state: Any, path: Path, load_format: str, extra: dict[str, Any], cast: bool) -> dict[str, float]:
    """Seconds of a load of main model and draft, and of the preparation inside it."""
    import live_sglang
    import sglang.srt.models.deepseek_common.deepseek_weight_loader as upstream
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from weightprep.engines.sglang.prepare import Preparation

    prepare, inside = Preparation._prepare, []

    def timed(self: Preparation, touched: Any) -> None:
        start = time.perf_counter()
        prepare(self, touched)
        inside.append(time.perf_counter() - start)

    # fp8 linears ask for AMX after the load on a CPU
    kept = DefaultModelLoader.__dict__["postprocess_weights"]
    DefaultModelLoader.postprocess_weights = staticmethod(lambda model, device: None)
    Preparation._prepare, upstream._use_aiter_gfx95 = timed, cast
    # sglang's models are reference cycles of several GB each
    gc.collect()
    try:
        start = time.perf_counter()
        for draft in (False, True):
            args = live_sglang.server_args(str(path))
            from sglang.srt.runtime_context import get_model

            with get_model().override(model_path=str(path)):
                live_sglang.load(args, load_format, extra, draft)
        return {"load": time.perf_counter() - start, "prepare": sum(inside)}
    finally:
        Preparation._prepare, upstream._use_aiter_gfx95 = prepare, False
        DefaultModelLoader.postprocess_weights = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=79)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    source = arguments.folder / "bf16"
    if not source.exists():
        write_checkpoint(source, arguments.layers)
    for layout in ("inline", "sidecar"):
        if not (arguments.folder / layout).exists():
            target = arguments.folder / layout
            weightprep = Path(sys.executable).with_name("weightprep")
            subprocess.run([weightprep, "convert", source, target, "--layout", layout], check=True)
    ways = {
        "auto": (source, "auto", {}, False),
        "auto, upstream's cast": (source, "auto", {}, True),
        "weightprep, online": (source, "weightprep", GFX950, False),
        "weightprep, inline": (arguments.folder / "inline", "weightprep", GFX950, False),
        "weightprep, sidecar": (arguments.folder / "sidecar", "weightprep", GFX950, False),
    }
    from ranks import Ranks

    ranks = Ranks(1, str(source))
    times: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(arguments.repeats + 1):
        for way, parameters in ways.items():
            times[way].append(ranks.run(time_load, *parameters)[0])
    ranks.close()
    results = {
        # the first of each warms the page cache
        way: {key: round(statistics.median(one[key] for one in each[1:]), 3) for key in ("load", "prepare")}
        for way, each in times.items()
    }
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    print(json.dumps({"layers": arguments.layers, "bytes": size, "repeats": arguments.repeats, "seconds": results}))


if __name__ == "__main__":
    main()
