"""Time the store and load steps on one core, on a kv_b_proj of GLM-5.2's size [28672, 512], for each source encoding,
and all that `convert` does with such a weight: reading it, converting it, hashing and figures of quality.

    OMP_NUM_THREADS=1 python scripts/bench_transforms.py

Rates are bytes of the source (weight and scale) over the CPU time of the one thread, so that other programs on the
machine count less. Each cell is the median of --runs with the least and the greatest; results are checked against a
plain formula before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from glm_attention import HEADS, NOPE, RANK, V, config

from weightprep.checkpoint.reader import SourceModule
from weightprep.checkpoint.writer import as_bytes, describe
from weightprep.convert.by_table import convert_by_table
from weightprep.convert.module import convert_module
from weightprep.convert.options import ConvertOptions
from weightprep.convert.plan import ModuleJob
from weightprep.convert.planner import make_plan
from weightprep.formats import EncodedShape, Encoding, classify
from weightprep.recipe import load_recipe, resolve
from weightprep.synth import synthesize
from weightprep.transforms import Bundle, StepContext, make_step, run_steps

ROWS = HEADS * (NOPE + V)


def make_source(encoding: Encoding, weight: torch.Tensor) -> Bundle:
    """`weight` in `encoding`, by the package's own quantizers where it has them."""
    if encoding is Encoding.BF16:
        return Bundle.source(weight, None, classify("w.weight", weight.dtype, (ROWS, RANK), None, None))
    bf16 = make_source(Encoding.BF16, weight)
    step = {
        Encoding.FP8_BLOCK: ("quantize_fp8", {"granularity": "block"}),
        Encoding.FP8_CHANNEL: ("quantize_fp8", {"granularity": "channel"}),
        Encoding.MXFP4: ("quantize_mxfp4", {}),
    }[encoding]
    return run_steps([make_step(*step, "bench")], bf16, StepContext())


def median_rate(work: Callable[[], object], nbytes: int, runs: int) -> str:
    """MB/s of CPU time: median (least - greatest)."""
    work()
    rates = []
    for _ in range(runs):
        start = time.process_time()
        work()
        rates.append(nbytes / 1e6 / (time.process_time() - start))
    return f"{statistics.median(rates):6.0f} ({min(rates):.0f} - {max(rates):.0f})"


def check(weight: torch.Tensor, stored: Bundle) -> None:
    """Fail unless `stored` is the per-tensor formula applied to the whole weight at once."""
    values = weight.float()
    m = 448.0 * values.abs().max().reciprocal()
    wanted = (values * m).clamp(-448, 448).to(torch.float8_e4m3fn)
    if not torch.equal(stored["weight"].view(torch.uint8), wanted.view(torch.uint8)):
        raise SystemExit("the fp8 bytes differ from the formula: nothing is timed")


def make_job(folder: Path, weight: torch.Tensor) -> ModuleJob:
    """A job of `convert` from bf16 to fp8 whose source file, in the page cache, holds `weight`."""
    job = make_plan(ConvertOptions(synthesize(folder / "source"), folder / "result")).modules[0]
    path = folder / "weight"
    path.write_bytes(as_bytes(weight))
    name = job.source.weight.name
    ref = dataclasses.replace(
        job.source.weight, path=path, offset=0, info=describe(name, weight.dtype, tuple(weight.shape))
    )
    source = SourceModule(job.source.module, EncodedShape(Encoding.BF16, ROWS, RANK), ref, None)
    blocks = (-(-ROWS // 128), -(-RANK // 128))
    outputs = {
        "weight": describe(name, torch.float8_e4m3fn, (ROWS, RANK)),
        "scale": describe(job.outputs["scale"].name, torch.float32, blocks),
    }
    return dataclasses.replace(job, source=source, outputs=outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    weight = (torch.randn(ROWS, RANK, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    recipe = load_recipe("glm_moe_dsa")
    plans = {name: resolve(recipe, config(), precision=name).modules[0] for name in ("fp8", "mxfp4")}
    context = StepContext({"heads": HEADS, "nope": NOPE, "v": V, "rank": RANK}, name="kv_b_proj.weight")
    check(weight, run_steps(plans["fp8"].store, make_source(Encoding.BF16, weight), context))
    print(
        f"torch {torch.__version__}, one thread, [{ROWS}, {RANK}], MB/s of source: median (least - greatest) of {runs}"
    )
    print(f"{'source':12} {'store fp8':>22} {'load of fp8':>22} {'store mxfp4':>22}")
    for encoding in (Encoding.BF16, Encoding.FP8_BLOCK, Encoding.FP8_CHANNEL, Encoding.MXFP4):
        bundle = make_source(encoding, weight)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in bundle.values())
        stored = run_steps(plans["fp8"].store, bundle, context)
        cells = [
            median_rate(lambda b=bundle: run_steps(plans["fp8"].store, b, context), nbytes, runs),
            median_rate(lambda s=stored: run_steps(plans["fp8"].load, s, context), nbytes, runs),
            median_rate(lambda b=bundle: run_steps(plans["mxfp4"].store, b, context), nbytes, runs),
        ]
        print(f"{encoding.value:12} " + " ".join(f"{cell:>22}" for cell in cells))
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(Path(folder), weight)
        dims = {"heads": HEADS}
        by_table = median_rate(lambda: convert_by_table(job, dims, "file", discard), weight.nbytes, runs)
        by_steps = median_rate(lambda: convert_module(job, dims, "file"), weight.nbytes, runs)
        print(f"all of convert but its writing, bf16 to fp8, by table: {by_table}; by the steps: {by_steps}")


def discard(name: str, slices: Iterable[np.ndarray]) -> None:
    """Take what is to be written, and write nothing."""
    for _ in slices:
        pass


if __name__ == "__main__":
    main()
