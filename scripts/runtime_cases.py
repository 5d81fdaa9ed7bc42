"""Inputs of the runtime benchmark and how a call is timed and compared: shared by bench_runtime.py and its peers."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weightprep.runtime import group_quant
from weightprep.runtime.choice import OutQuant

LAYERS = 78
REPLAYS = 10
DEVICE = "cuda"
# The digit of a cell's name.
FORMS = (OutQuant.NONE, OutQuant.FP8_GROUP, OutQuant.MXFP4)
# By the same digit: what rounding activations and output costs on normal data, doubled; another product is off by 1.4.
LARGEST_ERROR = (0.08, 0.08, 0.2)


def environment() -> dict[str, str]:
    """What a figure depends on besides the code."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {"gpu, driver": gpu, "torch": torch.__version__, "triton": triton.__version__, "command": " ".join(sys.argv)}


def per_layer_us(call: Callable[[int], None]) -> float:
    """Median over replays of one graph with `call(layer)` for every layer, per layer, in microseconds."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            call(layer)
    times = []
    for replay in range(REPLAYS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1e3 / LAYERS)
    return statistics.median(times)


class Case:
    """Weights of all layers and inputs of one cell; the fp8 weights are (H, N, K) in memory, seen as (H, K, N)."""

    def __init__(self, heads: int, k: int, n: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(heads * 7919 + k)
        self.heads, self.k, self.n = heads, k, n
        self.scale = torch.full((1,), 1 / 100.0, device=DEVICE)
        shape = (heads, n, k)
        self.bf16 = [torch.randn(shape, device=DEVICE, generator=generator).bfloat16() for _ in range(LAYERS)]
        self.fp8 = [(w.float() * 100).clamp(-448, 448).to(torch.float8_e4m3fn) for w in self.bf16]
        self.fp4 = [torch.randint(0, 256, (heads, n, k // 2), device=DEVICE, dtype=torch.uint8) for _ in range(LAYERS)]
        self.mx = [
            torch.randint(120, 128, (heads, n, k // 32), device=DEVICE, dtype=torch.uint8) for _ in range(LAYERS)
        ]

    def rows(self, m: int) -> torch.Tensor:
        return torch.randn((m, self.heads, self.k), device=DEVICE).bfloat16()


def outputs(m: int, heads: int, n: int, quant: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    if quant == 0:
        return torch.full((m, heads, n), float("nan"), device=DEVICE, dtype=torch.bfloat16), None
    if quant == 1:
        out = torch.full((m, heads * n), 0x7F, device=DEVICE, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return out, torch.full((m, heads * n // 128), float("nan"), device=DEVICE)
    return (
        torch.full((m, heads * n // 2), 0xA5, device=DEVICE, dtype=torch.uint8),
        torch.full((m, heads * n // 32), 0xFF, device=DEVICE, dtype=torch.uint8),
    )


def relative_error(out: torch.Tensor, scales: torch.Tensor | None, wanted: torch.Tensor) -> float:
    if scales is None:
        got = out.double()
    elif out.dtype == torch.uint8:
        got = group_quant.widen_mxfp4(out.t()[None], scales.t()[None])[0].t().double()
    else:
        got = (out.float().view(out.shape[0], -1, 128) * scales[..., None]).double()
    got = got.reshape(wanted.shape)
    return float((got - wanted).norm() / wanted.norm())


def require_right(out: torch.Tensor, scales: torch.Tensor | None, wanted: torch.Tensor, quant: int, what: str) -> float:
    """The relative error, or the end of the benchmark: no figure without a right result."""
    error = relative_error(out, scales, wanted)
    if not error < LARGEST_ERROR[quant]:
        raise SystemExit(f"{what}: wrong result, error {error}: no figure")
    return error
