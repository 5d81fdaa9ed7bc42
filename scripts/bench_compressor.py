"""Count and time the kernels of a decode step's compressors and quantizations on one GPU, before and after.

    python3 scripts/bench_compressor.py --out DIR [--aiter FOLDER] [--search]
    python3 scripts/bench_compressor.py --check

`before` widens each gate score in a kernel of its own and transposes each group scale; `after` is weightprep. Both run
the same GEMM and the same compress and quantization kernels, so the difference is the passes that went away. One CUDA
graph holds one decode step: 90 compressors with distinct weights and states (DeepSeek-V4-Pro's sizes: 30 of ratio 4
with head_dim 512, 30 of ratio 4 with head_dim 128 in the indexer, 30 of ratio 128), or 183 quantizations. A figure is
the median of 20 replays. Nothing is timed before its result was compared with the eager reference: of every compressor,
and of every producer on one input of each number of rows. FOLDER holds an unpacked amd-aiter wheel: its fused RMSNorm
is then timed too, after a comparison with weightprep's. --check times nothing: it runs the kernels, decode and
prefill, for every combination of dtypes of scores, state, bias and output, and compares with the eager reference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "runtime"))

from weightprep.runtime import compress_kernels
from weightprep.runtime.choice import Backend
from weightprep.runtime.compress import compress_decode, compress_prefill, gate_score
from weightprep.runtime.compress_reference import window_of
from weightprep.runtime.rms_quant import quantize_groups, rms_norm_quantize
from weightprep.runtime.scale_layout import GroupScaleLayout, materialize
from weightprep.runtime.scale_probe import probe_producer, rms_arguments

DEVICE = "cuda"
HIDDEN = 7168
REPLAYS = 20
KINDS = ((4, 512), (4, 128), (128, 512))
OF_EACH_KIND = 30
QUANTIZATIONS = 183
BATCHES = (1, 16, 64, 256)
ROW, COLUMN = GroupScaleLayout.ROW, GroupScaleLayout.COLUMN

Step = Callable[[], None]


@dataclass(frozen=True)
class Layer:
    """One compressor with its weight, bias, state and the decode plan of the batch."""

    ratio: int
    weight: torch.Tensor
    ape: torch.Tensor
    state: torch.Tensor
    plan: torch.Tensor
    out: torch.Tensor


def decode_plan(ratio: int, rows: int) -> torch.Tensor:
    """Requests at lengths 1000, 1001, ...: at ratio 4 a quarter of them completes a window in this step."""
    pages = 2 if ratio == 4 else 1
    plan = torch.zeros((rows, 4), dtype=torch.int32)
    for request in range(rows):
        last = 1000 + request - 1
        page = [request * pages + (max(p, 0) // ratio) % pages for p in (last - ratio, last)]
        plan[request] = torch.tensor([last + 1, page[1] * ratio + last % ratio, *page])
    return plan.view(torch.uint8).to(DEVICE)


def layers(rows: int) -> list[Layer]:
    made = []
    for ratio, head_dim in KINDS:
        window, plan = window_of(ratio), decode_plan(ratio, rows)
        width = 2 * head_dim * (window // ratio)
        for _ in range(OF_EACH_KIND):
            made.append(
                Layer(
                    ratio,
                    (torch.randn(width, HIDDEN, device=DEVICE) * HIDDEN**-0.5).bfloat16(),
                    torch.randn(window, head_dim, device=DEVICE),
                    torch.randn(rows * (2 if ratio == 4 else 1), ratio, width, device=DEVICE),
                    plan,
                    torch.zeros(rows, head_dim, device=DEVICE),
                )
            )
    return made


def median_us(step: Step) -> float:
    """Median over replays of a graph of one step, in microseconds."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for replay in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def kernel_counts(step: Step) -> dict[str, int]:
    """Kernels of one step by name, from torch.profiler."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    counts = Counter(event.name for event in profile.events() if event.device_type.name == "CUDA")
    return {name: count for name, count in counts.most_common() if "Activity Buffer" not in name}


def copy_bandwidth() -> float:
    """Bytes read plus written per second by a large device copy."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    # A kernel, because a graph hands a plain copy to the slower copy engine.
    return 2 * source.nbytes / (median_us(lambda: torch.neg(source, out=target)) * 1e-6)


def compressor_step(which: str, x: torch.Tensor, stack: list[Layer]) -> Step:
    def run() -> None:
        for layer in stack:
            score = gate_score(x, layer.weight)
            if which == "gemm":
                continue
            if which == "before":
                score = score.float()
            compress_decode(layer.state, score, layer.ape, layer.plan, ratio=layer.ratio, out=layer.out)

    return run


def check_compressors(x: torch.Tensor, stack: list[Layer]) -> dict[str, float]:
    """Both paths and the reference agree within float32 rounding; also what a bias in bf16 would lose."""
    worst, bias_in_bf16 = 0.0, []
    for layer in stack:
        score = gate_score(x, layer.weight)
        states = [layer.state.clone() for _ in range(4)]
        outs = [torch.zeros_like(layer.out) for _ in range(4)]
        compress_decode(states[0], score, layer.ape, layer.plan, ratio=layer.ratio, out=outs[0])
        compress_decode(states[1], score.float(), layer.ape, layer.plan, ratio=layer.ratio, out=outs[1])
        compress_decode(states[2], score, layer.ape, layer.plan, ratio=layer.ratio, out=outs[2], backend=Backend.TORCH)
        rounded = layer.ape.bfloat16()
        compress_decode(states[3], score, rounded, layer.plan, ratio=layer.ratio, out=outs[3])
        if not torch.equal(states[0], states[1]):
            raise SystemExit("the bf16 score and the widened one leave different states")
        worst = max(worst, float((outs[0] - outs[2]).abs().max()), float((outs[0] - outs[1]).abs().max()))
        if outs[0].any():
            bias_in_bf16.append(float((outs[3] - outs[0]).norm() / outs[0].norm()))
    if worst > 1e-5:
        raise SystemExit(f"the bf16 score, the widened one and the reference differ by {worst}")
    return {
        "largest_difference": worst,
        "relative_error_if_ape_were_bf16": max(bias_in_bf16, default=0.0),
    }


def prefill_plans(ratio: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two requests, one from its beginning and one that continues in the middle of a window; pages of the state."""
    window, pages = window_of(ratio), 2 if ratio == 4 else 1
    compress: list[tuple[int, int, int, int]] = []
    write: list[tuple[int, int]] = []
    row = 0
    for request, start in enumerate((0, 2 * ratio + ratio // 2)):
        for position in range(start, start + tokens):
            if (position + 1) % ratio == 0:
                held = max(0, window - (position + 1 - start))
                page = [request * pages + (max(p, 0) // ratio) % pages for p in (position - ratio, position)]
                compress.append((position + 1, row | held << 16, *page))
            if position >= start + tokens - window:
                page_now = request * pages + (position // ratio) % pages
                write.append((row, page_now * ratio + position % ratio))
            row += 1
    compress.append((-1, 0, 0, 0))
    plans = (torch.tensor(compress, dtype=torch.int32), torch.tensor(write, dtype=torch.int32))
    # Only the last write of a slot counts; the plan of an engine names each slot once.
    last = {slot: index for index, (_, slot) in enumerate(write)}
    once = plans[1][sorted(last.values())].contiguous()
    return plans[0].view(torch.uint8).to(DEVICE), once.view(torch.uint8).to(DEVICE), 2 * pages


def check_dtypes() -> None:
    """Every combination of dtypes, decode and prefill: the state's bits, and the output within its own rounding."""
    checked, worst = 0, 0.0
    for (ratio, head_dim), *dtypes in itertools.product(KINDS, *[(torch.bfloat16, torch.float32)] * 4):
        score_dtype, state_dtype, ape_dtype, out_dtype = dtypes
        window, tokens = window_of(ratio), 3 * ratio
        width = 2 * head_dim * (window // ratio)
        ape = torch.randn(window, head_dim, device=DEVICE).to(ape_dtype)
        compress, write, pages = prefill_plans(ratio, tokens)
        score = torch.randn(2 * tokens, width, device=DEVICE).to(score_dtype)
        decode = decode_plan(ratio, 33)
        states = {
            "prefill": torch.randn(pages, ratio, width, device=DEVICE).to(state_dtype),
            "decode": torch.randn(66, ratio, width, device=DEVICE).to(state_dtype),
        }
        for phase, state in states.items():
            results = []
            for backend in (Backend.TRITON, Backend.TORCH):
                mine = state.clone()
                rows = compress.shape[0] if phase == "prefill" else 33
                out = torch.full((rows, head_dim), float("nan"), device=DEVICE).to(out_dtype)
                given: dict[str, Any] = {"ratio": ratio, "out": out, "backend": backend}
                if phase == "prefill":
                    compress_prefill(mine, score, ape, compress, write, **given)
                else:
                    compress_decode(mine, score[:1].expand(33, -1).contiguous(), ape, decode, **given)
                results.append((mine, out))
            (state_a, out_a), (state_b, out_b) = results
            if not torch.equal(state_a, state_b) or torch.equal(state_a, state):
                raise SystemExit(f"{phase}, ratio {ratio}, {dtypes}: the states differ, or nothing was stored")
            if not torch.equal(out_a.isnan(), out_b.isnan()) or out_a.isnan().all() or not out_a.isnan().any():
                raise SystemExit(f"{phase}, ratio {ratio}, {dtypes}: other rows were written")
            apart = (out_a.double() - out_b.double()).nan_to_num().abs()
            # One step of the output's format, for sums in another order that straddle a rounding boundary.
            step = 2.0**-7 if out_dtype == torch.bfloat16 else 1e-5
            if (apart > step * out_b.double().nan_to_num().abs().clamp(min=1.0)).any():
                raise SystemExit(f"{phase}, ratio {ratio}, {dtypes}: differs by {apart.max()}")
            worst = max(worst, float(apart.max()) if out_dtype == torch.float32 else 0.0)
            checked += 1
    print(f"{checked} combinations of phase, ratio, head_dim and dtypes agree; float32 outputs within {worst:.1e}")


def search(rows: int) -> None:
    """Microseconds per compress call without its GEMM, for each shape of program and kind of compressor."""
    stack = layers(rows)
    for ratio, head_dim in KINDS:
        chosen = [layer for layer in stack if layer.ratio == ratio and layer.out.shape[1] == head_dim]
        scores = [torch.randn(rows, layer.weight.shape[0], device=DEVICE).bfloat16() for layer in chosen]
        pieces = (8,) if ratio == 4 else (32, 128)
        usual, times = compress_kernels.CONFIGS[ratio], {}
        for channels, piece, warps in itertools.product((32, 64, 128, 256), pieces, (2, 4, 8)):
            if channels > head_dim or not 4 <= channels * piece // (32 * warps) <= 64:
                continue
            compress_kernels.CONFIGS[ratio] = compress_kernels.CompressConfig(channels, piece, warps)

            def step(chosen: list[Layer] = chosen, scores: list[torch.Tensor] = scores) -> None:
                for layer, score in zip(chosen, scores, strict=True):
                    compress_decode(layer.state, score, layer.ape, layer.plan, ratio=layer.ratio, out=layer.out)

            times[channels, piece, warps] = round(median_us(step) / len(chosen), 2)
        compress_kernels.CONFIGS[ratio] = usual
        print(rows, ratio, head_dim, sorted(times.items(), key=lambda item: item[1])[:8])


def bench_compressors(bandwidth: float) -> list[dict[str, Any]]:
    rows_of_table = []
    for rows in BATCHES:
        stack = layers(rows)
        x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        checks = check_compressors(x, stack)
        moved = sum(layer.weight.nbytes for layer in stack)
        row: dict[str, Any] = {"rows": rows, "floor_us": moved / bandwidth * 1e6, **checks}
        for which in ("gemm", "before", "after"):
            row[f"{which}_us"] = median_us(compressor_step(which, x, stack))
        row["after_again_us"] = median_us(compressor_step("after", x, stack))
        if rows == 16:
            row["kernels"] = {w: kernel_counts(compressor_step(w, x, stack)) for w in ("before", "after")}
        rows_of_table.append(row)
        del stack
    return rows_of_table


Produce = Callable[[torch.Tensor, torch.Tensor, GroupScaleLayout], torch.Tensor]


def scale_step(produce: Produce, inputs: list[torch.Tensor], residuals: list[torch.Tensor], layout: Any) -> Step:
    """Quantize every input; where the producer wrote ROW, transpose the scale for a GEMM that reads columns."""

    def run() -> None:
        for x, residual in zip(inputs, residuals, strict=True):
            materialize(produce(x, residual, layout), COLUMN)

    return run


def producers(aiter: Any | None) -> dict[str, tuple[Produce, int]]:
    """Name -> (producer of a scale, bytes it moves per value)."""
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    found: dict[str, tuple[Produce, int]] = {
        "group quant": (lambda x, residual, layout: quantize_groups(x, layout=layout)[1], 3),
        "rms quant + residual": (
            lambda x, residual, layout: rms_norm_quantize(x, weight, 1e-6, residual=residual, layout=layout).scale,
            7,
        ),
    }
    if aiter is not None:
        fixed = {"group_size": 128, "dtype_quant": torch.float8_e4m3fn}
        probed = probe_producer(aiter.fused_rms_fp8_group_quant, rms_arguments(**fixed), device=DEVICE)
        check_aiter(probed, torch.randn(33, HIDDEN, device=DEVICE).bfloat16(), weight)
        found[f"aiter rms quant + residual ({probed.behaviour.name})"] = (
            lambda x, residual, layout: probed(x, weight, 1e-6, res1=residual, layout=layout, **fixed)[0][1],
            7,
        )
    return found


def bench_scales(aiter: Any | None, bandwidth: float) -> list[dict[str, Any]]:
    table = []
    for rows in BATCHES:
        inputs = [torch.randn(rows, HIDDEN, device=DEVICE).bfloat16() for _ in range(QUANTIZATIONS)]
        residuals = [torch.randn_like(x) for x in inputs]
        check_producers(inputs[0], residuals[0])
        for name, (produce, value_bytes) in producers(aiter).items():
            moved = QUANTIZATIONS * (rows * HIDDEN * value_bytes + rows * HIDDEN // 128 * 4)
            row: dict[str, Any] = {"rows": rows, "producer": name, "floor_us": moved / bandwidth * 1e6}
            for which, layout in (("before", ROW), ("after", COLUMN)):
                step = scale_step(produce, inputs, residuals, layout)
                row[f"{which}_us"] = median_us(step)
                if rows == 16:
                    row[f"{which}_kernels"] = kernel_counts(step)
            table.append(row)
    return table


def check_producers(x: torch.Tensor, residual: torch.Tensor) -> None:
    """weightprep's producers and their eager reference, in both layouts."""
    weight = torch.ones(HIDDEN, dtype=x.dtype, device=x.device)
    for layout in GroupScaleLayout:
        (q, scale), (wanted_q, wanted_scale) = (
            quantize_groups(x, layout=layout, backend=backend) for backend in (Backend.TRITON, Backend.TORCH)
        )
        if not layout.holds(scale) or not torch.equal(scale, wanted_scale) or not same_bytes(q, wanted_q):
            raise SystemExit(f"quantize_groups in {layout} and its reference differ")
        ours, wanted = (
            rms_norm_quantize(x, weight, 1e-6, residual=residual, layout=layout, backend=backend)
            for backend in (Backend.TRITON, Backend.TORCH)
        )
        # Sums of HIDDEN squares in another order.
        if not layout.holds(ours.scale) or not torch.allclose(ours.scale, wanted.scale, rtol=4e-6):
            raise SystemExit(f"the scales of rms_norm_quantize in {layout} and its reference's differ")
        if not same_but_for_ties(ours.q, wanted.q) or not torch.equal(ours.residual, wanted.residual):
            raise SystemExit(f"rms_norm_quantize in {layout} and its reference differ")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_but_for_ties(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether fp8 values agree but for a few neighbours: values near the middle of two may go either way."""
    apart = (a.view(torch.int8).int() - b.view(torch.int8).int()).abs()
    return bool(apart.max() <= 1) and bool((apart > 0).float().mean() <= 1e-2)


def check_aiter(producer: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
    """The wheel's producer through the wrapper and ours: same scales in either layout, same bytes but for ties."""
    for layout in GroupScaleLayout:
        (q, scale), *_ = producer(x, weight, 1e-6, group_size=128, dtype_quant=torch.float8_e4m3fn, layout=layout)
        ours = rms_norm_quantize(x, weight, 1e-6, layout=layout)
        if not layout.holds(scale) or not torch.allclose(scale, ours.scale, rtol=2e-6):
            raise SystemExit(f"aiter's scales in {layout} differ")
        # aiter's divisions are not correctly rounded.
        if not same_but_for_ties(q, ours.q):
            raise SystemExit("aiter's bytes differ by more than ties")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the eager reference and time nothing")
    parser.add_argument("--aiter", type=Path)
    parser.add_argument("--search", action="store_true", help="time every shape of program of the compress kernel")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.check:
        check_dtypes()
        return
    if options.out is None:
        parser.error("--out is needed where something is timed")
    if options.search:
        for rows in (16, 256):
            search(rows)
    aiter = None
    if options.aiter is not None:
        from aiter_wheel import import_triton_module

        aiter = import_triton_module(options.aiter, "fused_fp8_quant")
    bandwidth = copy_bandwidth()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bandwidth": bandwidth,
    }
    for name, bench in (
        ("compressors", lambda: bench_compressors(bandwidth)),
        ("scales", lambda: bench_scales(aiter, bandwidth)),
    ):
        result[name] = bench()
        (options.out / "compressor.json").write_text(json.dumps(result, indent=1))
        for row in result[name]:
            print(json.dumps({k: round(v, 7) if isinstance(v, float) else v for k, v in row.items()}))


if __name__ == "__main__":
    main()
