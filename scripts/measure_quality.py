"""Measure what each precision costs on weights of known distributions: the figures behind the floors of the recipes.

    python scripts/measure_quality.py

Prints the ratio of signal to error in dB, whole tensor, of a kv_b_proj with GLM's head dims. The error is against the
numbers that the source stands for: the bf16 ones, or those of its block fp8.
"""

from __future__ import annotations

import torch
from glm_attention import NOPE, RANK, V, config

from weightprep.convert.quality import measure
from weightprep.formats import EncodedShape, Encoding
from weightprep.recipe import load_recipe, resolve
from weightprep.transforms import Bundle, StepContext, make_step, run_steps

HEADS = 16
ROWS = HEADS * (NOPE + V)
COLUMNS = (("bf16", "fp8"), ("fp8_block", "fp8"), ("bf16", "mxfp4"), ("fp8_block", "mxfp4"))


def weights() -> dict[str, torch.Tensor]:
    """float32 [ROWS, RANK] by name of the distribution."""
    torch.manual_seed(0)
    normal = torch.randn(ROWS, RANK) * 0.02
    heavy = torch.distributions.StudentT(4.0).sample((ROWS, RANK)) * 0.02
    uniform = (torch.rand(ROWS, RANK) - 0.5) * 0.04
    found = {"normal": normal, "uniform": uniform, "Student t, 4 degrees": heavy}
    for power in (5, 10, 15):
        found[f"normal, one head 2^{power} times as large"] = _scaled_head(normal, 2.0**power)
    columns = normal.clone()
    columns[:, ::64] *= 32
    found["normal, each 64th column 32 times as large"] = columns
    return found


def _scaled_head(values: torch.Tensor, factor: float) -> torch.Tensor:
    scaled = values.clone()
    scaled[: NOPE + V] *= factor
    return scaled


def source(values: torch.Tensor, encoding: str) -> Bundle:
    bundle = Bundle.source(values.bfloat16(), None, EncodedShape(Encoding.BF16, ROWS, RANK))
    if encoding == "bf16":
        return bundle
    return run_steps([make_step("quantize_fp8", {"granularity": "block"}, "source")], bundle, StepContext())


def ratio(bundle: Bundle, precision: str) -> str:
    """SQNR in dB, of the whole tensor."""
    plan = resolve(load_recipe("glm_moe_dsa"), config(heads=HEADS), precision=precision)
    stored = run_steps(plan.modules[0].store, bundle, StepContext(plan.dims))
    record = measure(bundle, stored, heads=HEADS, name="kv_b_proj")
    return "no error" if record.sqnr_db is None else f"{record.sqnr_db:.1f}"


def main() -> None:
    print("| weights | " + " | ".join(f"{stored} to {precision}" for stored, precision in COLUMNS) + " |")
    print("|---|" + "---|" * len(COLUMNS))
    for name, values in weights().items():
        cells = [ratio(source(values, stored), precision) for stored, precision in COLUMNS]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
