"""Time the absorbed products against their peers on one GPU, and search the configurations of the tuning table.

    python3 scripts/bench_runtime.py --out DIR --run glm:v1,q0:8,16,64:1,4,16,64,256     the tuning table's choices
    python3 scripts/bench_runtime.py --out DIR --run ... --search                        every configuration

One CUDA graph holds one call per layer for 78 layers with distinct weights, so that weights come from memory and not
from the L2 cache. A figure is the median of 10 replays divided by 78, in microseconds per layer. Inputs are random
normal. No figure is printed for a kernel whose output is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weightprep.runtime import cuda_absorb, group_quant
from weightprep.runtime.absorb import absorb_q, absorb_v
from weightprep.runtime.choice import ActQuant, OutQuant, Quantized
from weightprep.runtime.reference import absorb_reference
from weightprep.runtime.triton_absorb import launch_absorb
from weightprep.runtime.triton_quant import launch_flatten_fp8, launch_flatten_mxfp4
from weightprep.runtime.tuning import BmmConfig, DecodeConfig, TritonConfig, WgmmaConfig, choose

LAYERS = 78
REPLAYS = 10
DEVICE = "cuda"
# The digit of a cell's name.
FORMS = (OutQuant.NONE, OutQuant.FP8_GROUP, OutQuant.MXFP4)


@triton.jit
def _read_kernel(w_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at)
    if tl.max(w, axis=0) == 12345678:
        tl.store(out_ptr, 1)


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


def decode_configs(k: int, m: int, quant: int) -> Iterator[DecodeConfig]:
    """Every configuration that fits the shape, static shared memory and the register file."""
    tile_choices = [t for t in (1, 2) if t == 1 or 8 * t < m]
    for columns, warps_k, warps_n in itertools.product((16, 32, 64, 128), (1, 2, 3, 4, 8), (1, 2, 4, 8)):
        threads = 32 * warps_k * warps_n
        if k % (64 * warps_k) or columns % (8 * warps_n) or threads not in range(columns, 1025):
            continue
        chunks, per_warp = k // (64 * warps_k), columns // (8 * warps_n)
        registers = chunks * per_warp * 8 + chunks * 16 + per_warp * 4 + 40
        if registers > min(255, 65536 // threads) or (quant == 2 and columns < 32):
            continue
        for row_tiles in tile_choices:
            buffers = 1 if row_tiles == 1 else 2
            if buffers * warps_k * 16 * (columns + 4) * 4 <= 46 * 1024:
                yield DecodeConfig(columns, warps_k, warps_n, row_tiles)
                if row_tiles == 1:
                    yield DecodeConfig(columns, warps_k, warps_n, row_tiles, loads_first=True)


def wgmma_configs(k: int, n: int, m: int, quant: int) -> Iterator[WgmmaConfig]:
    """Every configuration of the kernel for many rows that fits the shape, shared memory and the register file."""
    depths = (1, 2, 3) if k == 192 else (1, 2, 4, 8)
    sizes = itertools.product((8, 16, 32, 64, 128), (1, 2, 4), (1, 2, 4, 8), depths, (1, 2))
    for rows, groups, tiles, depth, blocks in sizes:
        config = WgmmaConfig(rows, groups, tiles, depth, blocks)
        in_flight = 8 + (4 * max(1, rows * 8 // config.threads) if tiles == 1 else 0)
        registers = rows // 2 + max(32 if tiles == 1 else k // 4 + 8, depth * in_flight) + 32
        fits = config.fits(k, n) and blocks * (config.shared_bytes(k) + 1024) <= 228 * 1024
        if not fits or registers > min(255, 65536 // (config.threads * blocks)):
            continue
        if (tiles > 1 and (rows * tiles > m or depth == 1)) or (quant == 1 and groups == 1):
            continue
        if m <= rows * 8 * tiles and rows < max(16, 2 * m):
            yield config


def triton_configs(k: int, m: int, quant: int) -> Iterator[TritonConfig]:
    """Configurations of the Triton kernel for many rows, also with quantized activations where K allows."""
    block_ms = (32, 64) if m <= 64 else (64, 128, 256)
    block_ns = (128,) if quant else (64, 128)
    for block_m, block_n, block_k, warps, stages in itertools.product(block_ms, block_ns, (64, 128), (4, 8), (3, 4)):
        if k % block_k or (block_m >= 128 and warps == 4):
            continue
        for act, swap in ((False, False), (False, True), (True, False)):
            if not (act and block_k != 128) and not (swap and quant):
                yield TritonConfig(block_m, block_n, block_k, warps, stages, swap, act)


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


def search(case: Case, m: int, quant: int, *, mxfp4: bool, triton_too: bool) -> list[dict[str, Any]]:
    x = case.rows(m)
    w = case.fp4 if mxfp4 else case.fp8
    weights = [t.transpose(1, 2) for t in w]
    scale = None if mxfp4 else case.scale
    mx = [t.transpose(1, 2) for t in case.mx] if mxfp4 else [None] * LAYERS
    wanted = absorb_reference(x, weights[0], scale, mx[0]).double()
    out, scales = outputs(m, case.heads, case.n, quant)
    runs: list[tuple[str, object, Callable[[int], None]]] = []
    compiled = [*decode_configs(case.k, m, quant)] if m <= 64 else []
    compiled += wgmma_configs(case.k, case.n, m, quant) if m > 4 else []
    with ThreadPoolExecutor(16, initializer=lambda: torch.cuda.set_device(0)) as pool:
        list(pool.map(lambda c: cuda_absorb.compile_variant(c, case.k, case.n, mxfp4, FORMS[quant]), compiled))
    for config in compiled:
        runs.append(
            ("cuda", config, lambda i, c=config: cuda_absorb.launch_cuda(x, weights[i], scale, mx[i], out, scales, c))
        )
    tritons = list(triton_configs(case.k, m, quant)) if triton_too and m >= 64 else []

    def compile_one(config: TritonConfig) -> None:
        with contextlib.suppress(Exception):  # a configuration beyond the GPU's limits is reported when it is timed
            launch_absorb(x, weights[0], scale, mx[0], out, scales, config)

    with ThreadPoolExecutor(12, initializer=lambda: torch.cuda.set_device(0)) as pool:
        list(pool.map(compile_one, tritons))
    for config in tritons:
        runs.append(("triton", config, lambda i, c=config: launch_absorb(x, weights[i], scale, mx[i], out, scales, c)))
    rows = []
    for backend, config, call in runs:
        try:
            fresh, fresh_scales = outputs(m, case.heads, case.n, quant)
            out.view(torch.uint8).copy_(fresh.view(torch.uint8))
            if scales is not None and fresh_scales is not None:
                scales.copy_(fresh_scales)
            call(0)
            error = relative_error(out, scales, wanted)
            us = per_layer_us(call) if error < (0.2 if quant == 2 else 0.08) else float("nan")
        except Exception as failure:
            rows.append({"backend": backend, "config": repr(config), "failed": repr(failure)[:200]})
            continue
        rows.append({"backend": backend, "config": repr(config), "error": error, "us": us})
    return sorted(rows, key=lambda r: r.get("us", 1e9) if r.get("us") == r.get("us") else 1e9)


def peers(case: Case, m: int, quant: int) -> dict[str, float]:
    x = case.rows(m)
    buffer = torch.empty((m, case.heads, case.n), device=DEVICE, dtype=torch.bfloat16)
    weights = [t.transpose(1, 2) for t in case.bf16]
    result = {}

    def bmm(i: int) -> None:
        torch.bmm(x.transpose(0, 1), weights[i], out=buffer.transpose(0, 1))

    head_major = torch.empty((case.heads, m, case.n), device=DEVICE, dtype=torch.bfloat16)
    result["bmm_batch_major"] = per_layer_us(bmm)
    result["bmm_head_major"] = per_layer_us(lambda i: torch.bmm(x.transpose(0, 1), weights[i], out=head_major))
    if quant == 2:
        packed, powers = outputs(m, case.heads, case.n, 2)

        def both_mxfp4(i: int) -> None:
            bmm(i)
            launch_flatten_mxfp4(buffer, packed, powers)

        result["bmm_then_flatten_mxfp4"] = per_layer_us(both_mxfp4)
    if quant == 1:
        out, scales = outputs(m, case.heads, case.n, 1)

        def both(i: int, block_m: int, warps: int) -> None:
            bmm(i)
            launch_flatten_fp8(buffer, out, scales, block_m, warps)

        searched = {
            (b, w): per_layer_us(lambda i, b=b, w=w: both(i, b, w))
            for b, w in itertools.product((1, 2, 4, 8), (1, 2, 4))
            if b <= max(m, 1)
        }
        best = min(searched, key=searched.get)
        result["bmm_then_flatten_fp8"] = searched[best]
        result["flatten_block_m"], result["flatten_warps"] = best
    total = case.heads * case.k * case.n
    flat = [t.view(torch.uint8).reshape(-1).view(torch.int32) for t in case.fp8]
    sink = torch.zeros(1, device=DEVICE, dtype=torch.int32)
    result["read_only"] = min(
        per_layer_us(lambda i, b=block, w=warps: _read_kernel[(total // b,)](flat[i], sink, BLOCK=b // 4, num_warps=w))
        for block, warps in itertools.product((4096, 8192, 16384, 32768), (4, 8))
    )
    return result


def environment() -> dict[str, str]:
    """What a figure depends on besides the code."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {"gpu, driver": gpu, "torch": torch.__version__, "triton": triton.__version__, "command": " ".join(sys.argv)}


def table_entry(row: dict[str, Any]) -> str | None:
    """One line of tuning_h200.py: the best configuration, or torch.bmm where that is faster than all of ours."""
    best = next((r for r in row["ours"] if r.get("us", float("nan")) == r.get("us")), None)
    if best is None:
        return None
    config = best["config"]
    bmm = row["peers"]["bmm_head_major" if row["cell"][0] == "q" else "bmm_batch_major"]
    if row["cell"][1] == "0" and bmm < best["us"]:
        config = f"BmmConfig({config})"
    return f"        Cell({row['heads']}, {row['m']}, {config}),"


def write_table(results: list[dict[str, Any]], path: Path) -> None:
    """tuning_h200.py from the results of a search."""
    keys: dict[str, list[str]] = {}
    for row in results:
        line = table_entry(row)
        if line is not None:
            form, mxfp4 = FORMS[int(row["cell"][1])], row["cell"].endswith("mx")
            key = f"({row['k']}, {row['n']}, OutQuant.{form.name}, {mxfp4})"
            keys.setdefault(key, []).append(line)
    body = "\n".join(f"    {key}: (\n" + "\n".join(lines) + "\n    )," for key, lines in keys.items())
    path.write_text(
        '"""Best measured configurations on an NVIDIA H200; written by `scripts/bench_runtime.py --search`."""\n\n'
        "from __future__ import annotations\n\nfrom typing import Final\n\n"
        "from weightprep.runtime.choice import OutQuant\n"
        "from weightprep.runtime.tuning import BmmConfig, Cell, DecodeConfig, TritonConfig, WgmmaConfig\n\n"
        '__all__ = ["MEASURED"]\n\n'
        "# (K, N, output quantization, MXFP4 weights) -> cells\n"
        "MEASURED: Final[dict[tuple[int, int, OutQuant, bool], tuple[Cell, ...]]] = {\n" + body + "\n}\n"
    )


DIMS = {
    ("glm", "v"): (512, 256),
    ("glm", "q"): (192, 512),
    ("deepseek", "v"): (512, 128),
    ("deepseek", "q"): (128, 512),
}


def tuned(case: Case, m: int, quant: int, *, mxfp4: bool, is_q: bool) -> list[dict[str, Any]]:
    """The public function with the table's choice: what a user gets."""
    x = case.rows(m)
    weights = [t.transpose(1, 2) for t in (case.fp4 if mxfp4 else case.fp8)]
    wide = [t.transpose(1, 2) for t in case.bf16]
    scale = None if mxfp4 else case.scale
    mx = [t.transpose(1, 2) for t in case.mx] if mxfp4 else [None] * LAYERS

    def call(i: int, w_bf16: torch.Tensor | None) -> torch.Tensor | Quantized:
        if is_q:
            return absorb_q(x, weights[i], scale, mx_scale=mx[i], w_bf16=w_bf16)
        return absorb_v(x, weights[i], scale, mx_scale=mx[i], out_quant=FORMS[quant])

    result = call(0, None)
    out, scales = result if isinstance(result, Quantized) else (result, None)
    wanted = absorb_reference(x, weights[0], scale, mx[0]).double()
    error = relative_error(out, scales, wanted.transpose(0, 1) if is_q else wanted)
    if not error < (0.2 if quant == 2 else 0.08):
        raise SystemExit(f"wrong result at M = {m}, error {error}: no figure")
    config = choose(case.heads, m, case.k, case.n, form=FORMS[quant], mxfp4=mxfp4)
    rows = [{"backend": "table", "config": repr(config), "error": error, "us": per_layer_us(lambda i: call(i, None))}]
    if isinstance(config, BmmConfig):
        if is_q:
            us = per_layer_us(lambda i: call(i, wide[i]))
            rows.insert(0, {"backend": "table, bf16 copy given", "config": "torch.bmm", "error": error, "us": us})
    elif isinstance(config, DecodeConfig | WgmmaConfig):
        late, (target, target_scales) = (
            dataclasses.replace(config, prefetch=False),
            outputs(m, case.heads, case.n, quant),
        )
        us = per_layer_us(lambda i: cuda_absorb.launch_cuda(x, weights[i], scale, mx[i], target, target_scales, late))
        rows.append({"backend": "table, without early launch", "config": repr(late), "us": us})
    return rows


def accuracy(case: Case, m: int, folder: Path | None) -> dict[str, dict[str, float]]:
    """Relative error in the norm of absorb_v, fp8 groups out, against float64 of the fp8 and of the bf16 weights."""
    x = case.rows(m)
    w, wide = case.fp8[0].transpose(1, 2), case.bf16[0].transpose(1, 2)
    exact = {
        "fp8 weights": torch.bmm(x.double().transpose(0, 1), w.float().double() * case.scale.double()).transpose(0, 1),
        "bf16 weights": torch.bmm(x.double().transpose(0, 1), wide.double()).transpose(0, 1),
    }

    def flattened(product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return group_quant.quantize_fp8_groups(product.flatten(1, 2))

    bmm = torch.bmm(x.transpose(0, 1), wide).transpose(0, 1)
    widened = torch.bmm(x.transpose(0, 1), (w.float() * case.scale).bfloat16()).transpose(0, 1)
    ways: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "bf16 weights, torch.bmm, quantization": flattened(bmm),
        "fp8 weights widened to a bf16 copy, torch.bmm, quantization": flattened(widened),
    }
    for name, act in (("ours, table", ActQuant.AUTO), ("ours, activations quantized", ActQuant.GROUP)):
        result = absorb_v(x, w, case.scale, out_quant=OutQuant.FP8_GROUP, act_quant=act)
        assert isinstance(result, Quantized)
        ways[name] = (result.values, result.scales)
    if folder is not None:
        theirs = torch.empty((m, case.heads, case.n), device=DEVICE, dtype=torch.bfloat16)
        aiter_kernel(folder)(x, w, case.scale, theirs, 16, 64, 4, 3)
        ways["aiter's kernel, quantization"] = flattened(theirs)
    return {
        name: {against: relative_error(*way, wanted) for against, wanted in exact.items()} for name, way in ways.items()
    }


def aiter_kernel(folder: Path) -> Callable[..., None]:
    """aiter's fp8 batched kernel: (x, w, scale, out, block_m, block_n, warps, stages), batch-major."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "runtime"))
    from aiter_wheel import import_triton_module

    name = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
    kernel = getattr(import_triton_module(folder, name), f"_{name}_kernel")

    def launch(
        x: torch.Tensor,
        w: torch.Tensor,
        scale: torch.Tensor,
        out: torch.Tensor,
        bm: int,
        bn: int,
        warps: int,
        stages: int,
    ) -> None:
        (m, heads, k), n = x.shape, w.shape[2]
        blocks = {"BLOCK_SIZE_M": bm, "BLOCK_SIZE_N": bn, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
        steps = (x.stride(1), x.stride(0), x.stride(2), *w.stride(), out.stride(1), out.stride(0), out.stride(2))
        kernel[(heads, triton.cdiv(m, bm) * triton.cdiv(n, bn))](
            *(x, w, out, scale, None, m, n, k, *steps, 1, False),
            **blocks,
            DTYPE_MAX=448.0,
            DTYPE_MIN=-448.0,
            cache_modifier=".cg",
            num_warps=warps,
            num_stages=stages,
        )

    return launch


def aiter_peer(case: Case, m: int, quant: int, folder: Path) -> dict[str, Any]:
    """aiter's fp8 kernel with its best configuration, alone and before its own quantization for o_proj."""
    launch, x = aiter_kernel(folder), case.rows(m)
    out = torch.empty((m, case.heads, case.n), device=DEVICE, dtype=torch.bfloat16)
    weights = [t.transpose(1, 2) for t in case.fp8]
    configs = list(itertools.product((16, 32) if m <= 64 else (32, 64), (64, 128), (4,), (2, 3)))

    def compile_one(config: tuple[int, int, int, int]) -> None:
        launch(x, weights[0], case.scale, out, *config)

    with ThreadPoolExecutor(8, initializer=lambda: torch.cuda.set_device(0)) as pool:
        list(pool.map(compile_one, configs))
    times = {c: per_layer_us(lambda i, c=c: launch(x, weights[i], case.scale, out, *c)) for c in configs}
    best = min(times, key=times.__getitem__)
    result = {"aiter_fp8": times[best], "aiter_config": best}
    if quant == 1:
        from aiter_wheel import import_triton_module

        flatten = import_triton_module(folder, "fused_fp8_quant").fused_flatten_fp8_group_quant

        def both(i: int) -> None:
            launch(x, weights[i], case.scale, out, *best)
            flatten(out, 128, torch.float8_e4m3fn)

        result["aiter_fp8_then_aiter_flatten"] = per_layer_us(both)
    return result


def compile_table(runs: list[tuple[str, str, str, str]]) -> None:
    """Compile on all cores what the table chooses for `runs`, with and without early launch."""
    variants = set()
    for dims, names, all_heads, all_rows in runs:
        for heads, m, cell in itertools.product(all_heads.split(","), all_rows.split(","), names.split(",")):
            (k, n), form, mxfp4 = DIMS[dims, cell[0]], FORMS[int(cell[1])], cell.endswith("mx")
            config = choose(int(heads), int(m), k, n, form=form, mxfp4=mxfp4)
            config = config.otherwise if isinstance(config, BmmConfig) else config
            if isinstance(config, DecodeConfig | WgmmaConfig):
                for early in (True, False):
                    variants.add((dataclasses.replace(config, prefetch=early), k, n, mxfp4, form))
    with ThreadPoolExecutor(16, initializer=lambda: torch.cuda.set_device(0)) as pool:
        list(pool.map(lambda variant: cuda_absorb.compile_variant(*variant), variants))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--search", action="store_true", help="time every configuration and write tuning_h200.py")
    parser.add_argument(
        "--aiter", type=Path, metavar="DIR", help="time aiter's kernels too; DIR holds aiter/ of the wheel"
    )
    parser.add_argument("--triton", action="store_true", help="with --search: time Triton's configurations too")
    parser.add_argument(
        "--run",
        action="append",
        required=True,
        metavar="DIMS:CELLS:HEADS:ROWS",
        help="e.g. glm:v1,q0:8,64:1,16; a cell is v or q, output 0 bf16, 1 fp8 or 2 MXFP4, and mx for MXFP4 weights",
    )
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    record = {"environment": environment(), "layers": LAYERS, "replays": REPLAYS, "results": results}
    runs = [tuple(run.split(":")) for run in args.run]
    if not args.search:
        compile_table(runs)
    for dims, names, all_heads, all_rows in runs:
        for heads, kind in itertools.product(map(int, all_heads.split(",")), ("v", "q")):
            cells = [c for c in names.split(",") if c[0] == kind]
            if not cells:
                continue
            k, n = DIMS[dims, kind]
            case = Case(heads, k, n)
            for m, cell in itertools.product(map(int, all_rows.split(",")), cells):
                quant, mxfp4 = int(cell[1]), cell.endswith("mx")
                row: dict[str, Any] = {"dims": dims, "heads": heads, "k": k, "n": n, "m": m, "cell": cell}
                row["peers"] = peers(case, m, quant)
                if args.aiter is not None and not mxfp4 and not args.search:
                    row["peers"] |= aiter_peer(case, m, quant, args.aiter)
                if cell == "v1" and not args.search:
                    row["accuracy"] = accuracy(case, m, args.aiter)
                if args.search:
                    row["ours"] = search(case, m, quant, mxfp4=mxfp4, triton_too=args.triton)
                else:
                    row["ours"] = tuned(case, m, quant, mxfp4=mxfp4, is_q=kind == "q")
                results.append(row)
                shown = {name: us if isinstance(us, tuple) else round(us, 2) for name, us in row["peers"].items()}
                print(dims, heads, m, cell, shown, flush=True)
                for r in [r for r in row["ours"] if "error" in r][:2]:
                    print("    ", r["backend"], round(r["us"], 2), round(r["error"], 4), r["config"], flush=True)
                (args.out / "runtime.json").write_text(json.dumps(record, indent=1))
            del case
            torch.cuda.empty_cache()
    if args.search:
        write_table(results, args.out / "tuning_h200.py")


if __name__ == "__main__":
    main()
