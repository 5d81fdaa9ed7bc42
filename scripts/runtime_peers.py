"""What the absorbed products are measured against: torch.bmm and quantization, aiter's kernels, a kernel that reads."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from runtime_cases import (
    DEVICE,
    LARGEST_ERROR,
    LAYERS,
    Case,
    outputs,
    per_layer_us,
    relative_error,
    require_right,
)

from weightprep.runtime import group_quant
from weightprep.runtime.absorb import absorb_v
from weightprep.runtime.choice import ActQuant, OutQuant, Quantized
from weightprep.runtime.reference import absorb_reference
from weightprep.runtime.triton_quant import launch_flatten_fp8, launch_flatten_mxfp4


@triton.jit
def _read_kernel(w_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at)
    if tl.max(w, axis=0) == 12345678:
        tl.store(out_ptr, 1)


def peers(case: Case, m: int, quant: int) -> dict[str, float]:
    x = case.rows(m)
    buffer = torch.empty((m, case.heads, case.n), device=DEVICE, dtype=torch.bfloat16)
    weights = [t.transpose(1, 2) for t in case.bf16]
    result = {}

    def bmm(i: int) -> None:
        torch.bmm(x.transpose(0, 1), weights[i], out=buffer.transpose(0, 1))

    def check(i: int, out: torch.Tensor, scales: torch.Tensor | None, digit: int) -> None:
        what = f"torch.bmm and weightprep's quantization, M = {m}, layer {i}"
        require_right(out, scales, absorb_reference(x, weights[i]).double(), digit, what)

    for i in range(LAYERS):
        bmm(i)
        check(i, buffer, None, 0)
    head_major = torch.empty((case.heads, m, case.n), device=DEVICE, dtype=torch.bfloat16)
    result["bmm_batch_major"] = per_layer_us(bmm)
    result["bmm_head_major"] = per_layer_us(lambda i: torch.bmm(x.transpose(0, 1), weights[i], out=head_major))
    if quant == 2:
        packed, powers = outputs(m, case.heads, case.n, 2)

        def both_mxfp4(i: int) -> None:
            bmm(i)
            launch_flatten_mxfp4(buffer, packed, powers)

        for i in range(LAYERS):
            both_mxfp4(i)
            check(i, packed, powers, 2)
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
        for i in range(LAYERS):
            both(i, *best)
            check(i, out, scales, 1)
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


def aiter_configs(m: int) -> Iterator[tuple[int, int, int, int]]:
    """block_m, block_n, warps and stages; tiles of more rows than there are, but for the smallest two, are left out."""
    for config in itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (2, 4, 8), (2, 3, 4)):
        if config[0] <= max(m, 32):
            yield config


def aiter_peer(case: Case, m: int, quant: int, folder: Path) -> dict[str, Any]:
    """aiter's fp8 kernel with the best of :func:`aiter_configs`, alone and before its own quantization for o_proj."""
    launch, x = aiter_kernel(folder), case.rows(m)
    out = torch.empty((m, case.heads, case.n), device=DEVICE, dtype=torch.bfloat16)
    weights = [t.transpose(1, 2) for t in case.fp8]
    configs = list(aiter_configs(m))

    def compile_one(config: tuple[int, int, int, int]) -> None:
        with contextlib.suppress(Exception):  # what cannot run is left out below
            launch(x, weights[0], case.scale, out, *config)

    with ThreadPoolExecutor(12, initializer=lambda: torch.cuda.set_device(0)) as pool:
        list(pool.map(compile_one, configs))
    first = absorb_reference(x, weights[0], case.scale).double()
    times = {}
    for config in configs:
        out.fill_(float("nan"))
        try:
            launch(x, weights[0], case.scale, out, *config)
        except Exception:  # beyond the GPU's shared memory or registers
            continue
        if relative_error(out, None, first) < LARGEST_ERROR[0]:
            times[config] = per_layer_us(lambda i, c=config: launch(x, weights[i], case.scale, out, *c))
    best = min(times, key=times.__getitem__)
    for i in range(LAYERS):
        launch(x, weights[i], case.scale, out, *best)
        wanted = absorb_reference(x, weights[i], case.scale).double()
        require_right(out, None, wanted, 0, f"aiter's kernel {best}, M = {m}, layer {i}")
    result = {"aiter_fp8": times[best], "aiter_config": best, "aiter_configs_timed": len(times)}
    if quant == 1:
        from aiter_wheel import import_triton_module

        flatten = import_triton_module(folder, "fused_fp8_quant").fused_flatten_fp8_group_quant

        def both(i: int) -> None:
            launch(x, weights[i], case.scale, out, *best)
            flatten(out, 128, torch.float8_e4m3fn)

        for i in range(LAYERS):
            launch(x, weights[i], case.scale, out, *best)
            values, scales = flatten(out, 128, torch.float8_e4m3fn)
            wanted = absorb_reference(x, weights[i], case.scale).double()
            require_right(values, scales, wanted, 1, f"aiter's kernel {best} and quantization, M = {m}, layer {i}")
        result["aiter_fp8_then_aiter_flatten"] = per_layer_us(both)
    return result
