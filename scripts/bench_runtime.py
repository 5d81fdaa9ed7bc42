"""Time the absorbed products against their peers on one GPU, and search the configurations of the tuning table.

    python3 scripts/bench_runtime.py --out DIR --run glm:v1,q0:8,16,64:1,4,16,64,256     the tuning table's choices
    python3 scripts/bench_runtime.py --out DIR --run ... --search                        every configuration

One CUDA graph holds one call per layer for 78 layers with distinct weights, so that weights come from memory and not
from the L2 cache. A figure is the median of 10 replays divided by 78, in microseconds per layer. Inputs are random
normal. A figure is printed after the output of every layer was within the error of its number formats of a float32
product; --search compares layer 0 of each configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from runtime_cases import (
    FORMS,
    LARGEST_ERROR,
    LAYERS,
    REPLAYS,
    Case,
    environment,
    outputs,
    per_layer_us,
    relative_error,
    require_right,
)
from runtime_peers import accuracy, aiter_peer, peers

from weightprep.runtime import cuda_absorb
from weightprep.runtime.absorb import absorb_q, absorb_v
from weightprep.runtime.arch import arch_of
from weightprep.runtime.choice import Quantized
from weightprep.runtime.reference import absorb_reference
from weightprep.runtime.triton_absorb import launch_absorb
from weightprep.runtime.tuning import BmmConfig, DecodeConfig, TritonConfig, WgmmaConfig, choose


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
            us = per_layer_us(call) if error < LARGEST_ERROR[quant] else float("nan")
        except Exception as failure:
            rows.append({"backend": backend, "config": repr(config), "failed": repr(failure)[:200]})
            continue
        rows.append({"backend": backend, "config": repr(config), "error": error, "us": us})
    return sorted(rows, key=lambda r: r.get("us", 1e9) if r.get("us") == r.get("us") else 1e9)


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
    title = f"Best configurations for {arch_of(torch.device('cuda'))}, measured on an {torch.cuda.get_device_name()}"
    path.write_text(
        f'"""{title}; written by `scripts/bench_runtime.py --search`."""\n\n'
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

    def check(i: int, result: torch.Tensor | Quantized, wanted: torch.Tensor, what: str) -> float:
        out, scales = result if isinstance(result, Quantized) else (result, None)
        return require_right(out, scales, wanted.double(), quant, f"{what}, M = {m}, layer {i}")

    def wanted(i: int) -> torch.Tensor:
        return absorb_reference(x, weights[i], scale, mx[i])

    def as_returned(product: torch.Tensor) -> torch.Tensor:
        return product.transpose(0, 1) if is_q else product

    error = max(check(i, call(i, None), as_returned(wanted(i)), "table") for i in range(LAYERS))
    config = choose(case.heads, m, case.k, case.n, form=FORMS[quant], mxfp4=mxfp4, arch=arch_of(x.device))
    rows = [{"backend": "table", "config": repr(config), "error": error, "us": per_layer_us(lambda i: call(i, None))}]
    if isinstance(config, BmmConfig):
        if is_q:
            for i in range(LAYERS):
                check(i, call(i, wide[i]), as_returned(absorb_reference(x, wide[i])), "torch.bmm")
            us = per_layer_us(lambda i: call(i, wide[i]))
            rows.insert(0, {"backend": "table, bf16 copy given", "config": "torch.bmm", "error": error, "us": us})
    elif isinstance(config, DecodeConfig | WgmmaConfig):
        late = dataclasses.replace(config, prefetch=False)
        target, target_scales = outputs(m, case.heads, case.n, quant)

        def launch_late(i: int) -> None:
            cuda_absorb.launch_cuda(x, weights[i], scale, mx[i], target, target_scales, late)

        for i in range(LAYERS):
            launch_late(i)
            result = target if target_scales is None else Quantized(target, target_scales)
            check(i, result, wanted(i), "table, without early launch")
        us = per_layer_us(launch_late)
        rows.append({"backend": "table, without early launch", "config": repr(late), "us": us})
    return rows


def compile_table(runs: list[tuple[str, str, str, str]]) -> None:
    """Compile on all cores what the table chooses for `runs`, with and without early launch."""
    variants, arch = set(), arch_of(torch.device("cuda"))
    for dims, names, all_heads, all_rows in runs:
        for heads, m, cell in itertools.product(all_heads.split(","), all_rows.split(","), names.split(",")):
            (k, n), form, mxfp4 = DIMS[dims, cell[0]], FORMS[int(cell[1])], cell.endswith("mx")
            config = choose(int(heads), int(m), k, n, form=form, mxfp4=mxfp4, arch=arch)
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
