"""Time the preparation of all layers on a GPU: bf16 kv_b_proj -> w_kc, w_vc, w_scale with GLM-5.2's attention dims.

    python3 scripts/bench_prepare_gpu.py [--layers 79] [--shards 1 8]

What is timed is what the plugin does at a load once the weights are on the device: agree on the amax (the reduction
itself is left out, one rank runs alone), quantize, split, lay out, measure the noise of some heads. Weights are random
normal. One layer's result is compared with the CPU's, bit for bit. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from glm_attention import HEADS, NOPE, RANK, V, config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weightprep.engines.sglang.quality_check import measure_noise
from weightprep.formats import EncodedShape, Encoding
from weightprep.recipe import ModulePlan, load_recipe, resolve
from weightprep.transforms import Bundle, StepContext, measure_amax, run_steps

REPEATS = 7


def prepare(modules: tuple[ModulePlan, ...], weights: list[torch.Tensor], heads: int, *, agree: bool) -> list[Bundle]:
    dims = {"heads": heads, "nope": NOPE, "v": V, "rank": RANK}
    bundles = [Bundle.source(weight, None, EncodedShape(Encoding.BF16, weight.shape[0], RANK)) for weight in weights]
    context = StepContext(dims, "gfx950")
    maxima: list[torch.Tensor | None] = [None] * len(modules)
    if agree:
        measured = [measure_amax(m.prepare, bundle, context) for m, bundle in zip(modules, bundles, strict=True)]
        packed = torch.cat([value for value in measured if value is not None])
        maxima = list(packed.split(packed.numel() // len(modules)))
    made = []
    for module, bundle, amax in zip(modules, bundles, maxima, strict=True):
        made.append(run_steps(module.prepare, bundle, StepContext(dims, "gfx950", amax, module.source)))
        measure_noise(bundle, made[-1], NOPE + V, module.source)
    return made


def bits(bundle: Bundle) -> list[torch.Tensor]:
    return [tensor.cpu().reshape(-1).view(torch.uint8) for _, tensor in sorted(bundle.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=79)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    modules = resolve(load_recipe("glm_moe_dsa"), config(layers=arguments.layers - 1, nextn=1)).modules
    results = {}
    for shards in arguments.shards:
        heads = HEADS // shards
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (heads * (NOPE + V), RANK)
        weights = [
            (torch.randn(shape, generator=generator, device="cuda") * 0.02).bfloat16() for _ in range(arguments.layers)
        ]
        seconds = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            made = prepare(modules, weights, heads, agree=shards > 1)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        on_cpu = prepare(modules[:1], [weights[0].cpu()], heads, agree=shards > 1)
        same = all(torch.equal(a, b) for a, b in zip(bits(made[0]), bits(on_cpu[0]), strict=True))
        results[f"tp{shards}"] = {
            "first_s": round(seconds[0], 4),
            "median_s": round(statistics.median(seconds[1:]), 4),
            "max_s": round(max(seconds[1:]), 4),
            "equals_cpu": same,
        }
        del made, weights
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "torch": torch.__version__, "layers": arguments.layers, "prepare": results}))


if __name__ == "__main__":
    main()
