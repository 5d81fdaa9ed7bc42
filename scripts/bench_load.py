"""Time sglang's load of a GLM checkpoint with and without weightprep, in the same run, on a machine without a GPU.

    python scripts/bench_load.py FOLDER [--layers 79] [--repeats 3]
    python scripts/bench_load.py FOLDER --layers 3 --filler-mb 4800 --cold

Writes a checkpoint with GLM-5.2's attention dims (64 heads, 192/256/512) into FOLDER, NextN included, and converts it
inline and with a sidecar. Everything else is as small as it may be, or `--filler-mb` of MLP in each decoder layer:
GLM-5.2 in bf16 has 1,507 GB in 79 layers, a quarter of which, as in MXFP4, is 4.8 GB a layer. Then each of `auto`,
`auto` with upstream's own cast for gfx950, `weightprep` online, inline and sidecar loads main model and draft, in turns
whose order is turned round each time, in one process with sglang 0.5.23 that was started as the tests start it. With
`--cold` the files are dropped from the page cache before each load. Prints JSON: median seconds of each load, and of
the preparation and of the startup check inside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from glm_attention import HEADS, NOPE, RANK, V
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engines" / "sglang"))

ROPE, Q_RANK, HIDDEN = 64, 128, 256
SMALLEST_FFN, MOE_FFN, EXPERTS, VOCAB = 256, 128, 8, 512
GFX950 = {"target": "gfx950"}


def write_checkpoint(folder: Path, layers: int, ffn: int) -> None:
    """One dense decoder layer per shard, with an MLP of width `ffn`; the NextN layer in the last."""
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
    dense = {"mlp": ffn}
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
    (folder / "config.json").write_text(json.dumps(_config(layers - 1, ffn)))


def _config(layers: int, ffn: int) -> dict[str, Any]:
    rope = {
        "rope_type": "deepseek_yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "rope_theta": 10000.0,
    }
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        # without an indexer, as in the tests' model for the CPU engine
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": layers + 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V,
        "kv_lora_rank": RANK,
        "q_lora_rank": Q_RANK,
        "hidden_size": HIDDEN,
        "intermediate_size": ffn,
        "moe_intermediate_size": MOE_FFN,
        "moe_layer_freq": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "ep_size": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "rope_scaling": rope,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def drop_from_page_cache(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def time_load(
    state: Any, path: Path, load_format: str, extra: dict[str, Any], cast: bool, cold: bool = False
) -> dict[str, float]:
    """Seconds of a load of main model and draft, and of the preparation and the startup check inside it."""
    import live_sglang
    import sglang.srt.models.deepseek_common.deepseek_weight_loader as upstream
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import get_model

    import weightprep.engines.sglang.loader as ours
    from weightprep.engines.sglang.prepare import Preparation

    prepare, check = Preparation._prepare, ours.check_startup
    inside = {"prepare": 0.0, "check": 0.0}

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                inside[name] += time.perf_counter() - start

        return run

    # fp8 linears ask for AMX after the load on a CPU
    kept = DefaultModelLoader.__dict__["postprocess_weights"]
    DefaultModelLoader.postprocess_weights = staticmethod(lambda model, device: None)
    Preparation._prepare, ours.check_startup = timed("prepare", prepare), timed("check", check)
    upstream._use_aiter_gfx95 = cast
    # sglang's models are reference cycles of several GB each
    gc.collect()
    if cold:
        drop_from_page_cache(path)
    try:
        start = time.perf_counter()
        for draft in (False, True):
            args = live_sglang.server_args(str(path))
            with get_model().override(model_path=str(path)):
                live_sglang.load(args, load_format, extra, draft)
        return {"load": time.perf_counter() - start} | inside
    finally:
        Preparation._prepare, ours.check_startup, upstream._use_aiter_gfx95 = prepare, check, False
        DefaultModelLoader.postprocess_weights = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=79)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--filler-mb", type=int, default=0, help="MLP weights in each decoder layer")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each load")
    arguments = parser.parse_args()
    source = arguments.folder / "bf16"
    if not source.exists():
        # three matrices of bf16; a multiple of 64 as linears of sglang want it
        ffn = max(SMALLEST_FFN, arguments.filler_mb * 1_000_000 // (3 * HIDDEN * 2) // 64 * 64)
        write_checkpoint(source, arguments.layers, ffn)
    for layout in ("inline", "sidecar"):
        target = arguments.folder / layout
        if not target.exists():
            weightprep = Path(sys.executable).with_name("weightprep")
            command = [weightprep, "convert", source, target, "--layout", layout, "--link", "hard"]
            subprocess.run(command, check=True, stdout=sys.stderr)
    ways = {
        "auto": (source, "auto", {}, False),
        "auto, upstream's cast": (source, "auto", {}, True),
        "auto, inline": (arguments.folder / "inline", "auto", {}, False),
        "weightprep, online": (source, "weightprep", GFX950, False),
        "weightprep, inline": (arguments.folder / "inline", "weightprep", GFX950, False),
        "weightprep, sidecar": (arguments.folder / "sidecar", "weightprep", GFX950, False),
    }
    from ranks import Ranks

    ranks = Ranks(1, str(source))
    times: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for repeat in range(arguments.repeats + 1):
        for way in list(ways) if repeat % 2 else reversed(ways):
            times[way].append(ranks.run(time_load, *ways[way], cold=arguments.cold)[0])
    ranks.close()
    results = {
        # the first of each warms the page cache, and what Python imports late
        way: {key: round(statistics.median(one[key] for one in each[1:]), 3) for key in each[0]}
        | {"range": [round(edge(one["load"] for one in each[1:]), 3) for edge in (min, max)]}
        for way, each in times.items()
    }
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    setting = {"layers": arguments.layers, "bytes": size, "repeats": arguments.repeats, "cold": arguments.cold}
    print(json.dumps(setting | {"seconds": results}))


if __name__ == "__main__":
    main()
