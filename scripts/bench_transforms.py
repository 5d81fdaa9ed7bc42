"""Time the store and load steps on one core, on a kv_b_proj of GLM-5.2's size [28672, 512], for each source encoding,
and all that `convert` does with such a weight: reading it, converting it, hashing and figures of quality.

    OMP_NUM_THREADS=1 python scripts/bench_transforms.py
    python scripts/bench_transforms.py --convert 79     # the whole command, on a checkpoint of 79 such weights

Rates are bytes of the source (weight and scale) over the CPU time of the one thread, so that other programs on the
machine count less. Each cell is the median of --runs with the least and the greatest; results are checked against a
plain formula before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from glm_attention import HEADS, NOPE, RANK, V, config

from weightprep.checkpoint.reader import SourceModule
from weightprep.checkpoint.writer import ShardWriter, as_bytes, describe
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
WORKERS = 2


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
    parser.add_argument("--convert", type=int, metavar="N", help="time `weightprep convert` of N weights, and no more")
    parser.add_argument("--directory", type=Path, help="where --convert works; default: the temporary directory")
    options = parser.parse_args()
    runs: int = options.runs
    if options.convert is not None:
        time_command(options.convert, runs, options.directory)
        return
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


def time_command(layers: int, runs: int, directory: Path | None) -> None:
    """CPU seconds and seconds of `convert --layout sidecar --workers 2` of `layers` weights and of one, warm: what one
    more weight takes, and what is left for the start. A result is verified before anything is timed.
    """
    with tempfile.TemporaryDirectory(dir=directory) as name:
        sources = {count: write_checkpoint(Path(name) / f"source-{count}", count) for count in (1, layers)}
        out = Path(name) / "out"
        command = [sys.executable, "-m", "weightprep"]
        args = ["--layout", "sidecar", "--link", "hard", "--workers", str(WORKERS)]
        taken: dict[int, list[tuple[float, float]]] = {count: [] for count in sources}
        for number in range(runs + 1):
            for count, source in sources.items():
                usage = resource.getrusage(resource.RUSAGE_CHILDREN)
                before, began = usage.ru_utime + usage.ru_stime, time.monotonic()
                subprocess.run([*command, "convert", source, out, *args], check=True, capture_output=True)
                seconds = time.monotonic() - began
                usage = resource.getrusage(resource.RUSAGE_CHILDREN)
                if number:
                    taken[count].append((usage.ru_utime + usage.ru_stime - before, seconds))
                elif count == 1:
                    subprocess.run([*command, "verify", source, out], check=True, capture_output=True)
                shutil.rmtree(out)
    nbytes = ROWS * RANK * 2
    print(f"{layers} weights of {nbytes / 1e6:.1f} MB, {WORKERS} workers, median (least - greatest) of {runs}")
    for what, which, cores in (("CPU seconds", 0, 1), ("seconds", 1, WORKERS)):
        of_one, of_all = ([run[which] for run in taken[count]] for count in (1, layers))
        each = (statistics.median(of_all) - statistics.median(of_one)) / (layers - 1)
        start = statistics.median(of_one) - each
        print(
            f"{what:12} {statistics.median(of_all):6.2f} ({min(of_all):.2f} - {max(of_all):.2f}), of them {start:.2f} "
            f"for the start; {nbytes / 1e6 / each / cores:.0f} MB/s of source for each core without it, "
            f"{layers * nbytes / 1e6 / statistics.median(of_all) / cores:.0f} with it"
        )


def write_checkpoint(folder: Path, layers: int) -> Path:
    """`layers` times one kv_b_proj of normal numbers, in one shard."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(layers=layers)))
    weight = (torch.randn(ROWS, RANK, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    names = [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(layers)]
    infos = [describe(name, weight.dtype, (ROWS, RANK)) for name in names]
    with ShardWriter(folder / "model.safetensors", infos, {"format": "pt"}) as writer:
        for name in names:
            writer.write(name, weight)
        writer.finish()
    return folder


def discard(name: str, slices: Iterable[np.ndarray]) -> None:
    """Take what is to be written, and write nothing."""
    for _ in slices:
        pass


if __name__ == "__main__":
    main()
