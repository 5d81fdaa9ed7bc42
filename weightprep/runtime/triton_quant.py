"""Triton: the two output quantizations as device functions, shared by the absorb kernel's epilogue and flatten_quant.

Divisions are `div_rn` so that the bits are those of group_quant.py; Triton's `/` is not correctly rounded on every GPU.
"""

# Triton gives kernel arguments their types at launch, so annotations would say nothing.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightprep.runtime.group_quant import AMAX_FLOOR, FP8_GROUP, FP8_MAX, MXFP4_GROUP

__all__ = ["fp8_groups", "launch_flatten_fp8", "launch_flatten_mxfp4", "mxfp4_groups"]


@triton.jit
def fp8_groups(
    values,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    FP8_MAX: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """float32 (BLOCK_M, BLOCK_N) -> scaled float32 values before the cast, scales (BLOCK_M, BLOCK_N / GROUP)."""
    grouped = tl.reshape(values, [BLOCK_M, BLOCK_N // GROUP, GROUP])
    amax = tl.maximum(tl.max(tl.where(grouped != grouped, 0.0, tl.abs(grouped)), axis=2), FLOOR)
    scale = tl.math.div_rn(amax, tl.full(amax.shape, FP8_MAX, tl.float32))
    inverse = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    scaled = grouped * tl.expand_dims(inverse, 2)
    return tl.reshape(scaled, [BLOCK_M, BLOCK_N]), scale


@triton.jit
def mxfp4_groups(values, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """float32 (BLOCK_M, BLOCK_N) -> packed uint8 (BLOCK_M, BLOCK_N / 2), e8m0 uint8 (BLOCK_M, BLOCK_N / GROUP)."""
    grouped = tl.reshape(values, [BLOCK_M, BLOCK_N // GROUP, GROUP])
    amax = tl.max(tl.where(grouped != grouped, 0.0, tl.abs(grouped)), axis=2)
    exponent = ((amax.to(tl.int32, bitcast=True) + 0x200000) >> 23) - 129
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    # 2^-exponent in two factors: one alone is not representable for the smallest exponents.
    half = exponent >> 1
    first = ((127 - half) << 23).to(tl.float32, bitcast=True)
    second = ((127 - exponent + half) << 23).to(tl.float32, bitcast=True)
    scaled = grouped * tl.expand_dims(first, 2) * tl.expand_dims(second, 2)
    a = tl.abs(scaled)
    code = (a >= 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a >= 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a >= 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a >= 5.0).to(tl.int32)
    code |= (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    even, odd = tl.split(tl.reshape(code, [BLOCK_M, BLOCK_N // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8), (exponent + 127).to(tl.uint8)


@triton.jit
def _flatten_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    rows,
    columns,
    x_m,
    x_h,
    x_n,
    scale_m,
    scale_g,
    MXFP4: tl.constexpr,
    GROUP: tl.constexpr,
    FP8_MAX: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    column_block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    m = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m[:, None] < rows) & (n[None, :] < columns)
    x = tl.load(x_ptr + m[:, None] * x_m + head * x_h + n[None, :].to(tl.int64) * x_n, mask=mask, other=0.0)
    x = x.to(tl.float32)
    flat = head * columns
    g = column_block * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP)
    scale_at = scale_ptr + m[:, None] * scale_m + (flat // GROUP + g[None, :]) * scale_g
    scale_mask = (m[:, None] < rows) & (g[None, :] * GROUP < columns)
    if MXFP4:
        packed, scale = mxfp4_groups(x, BLOCK_M, BLOCK_N, GROUP)
        half = column_block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_at = out_ptr + m[:, None] * (heads * columns // 2) + flat // 2 + half[None, :]
        tl.store(out_at, packed, mask=(m[:, None] < rows) & (half[None, :] * 2 < columns))
    else:
        values, scale = fp8_groups(x, BLOCK_M, BLOCK_N, GROUP, FP8_MAX, FLOOR)
        out_at = out_ptr + m[:, None] * (heads * columns) + flat + n[None, :]
        tl.store(out_at, values.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_at, scale, mask=scale_mask)


def _launch(
    x: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    *,
    mxfp4: bool,
    group: int,
    fp8_max: float,
    block_m: int,
    num_warps: int,
) -> None:
    rows, heads, columns = x.shape
    block_n = max(triton.next_power_of_2(columns), group) if columns <= 256 else 256
    grid = (triton.cdiv(columns, block_n), heads, triton.cdiv(rows, block_m))
    _flatten_kernel[grid](
        x,
        out,
        scales,
        rows,
        columns,
        *x.stride(),
        *scales.stride(),
        MXFP4=mxfp4,
        GROUP=group,
        FP8_MAX=fp8_max,
        FLOOR=AMAX_FLOOR,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )


def launch_flatten_fp8(
    x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, block_m: int = 1, num_warps: int = 1
) -> None:
    """Fill `out` (M, H * N) fp8 and float32 `scales` (M, H * N / 128) from `x` (M, H, N), any strides."""
    _launch(
        x, out, scales, mxfp4=False, group=FP8_GROUP, fp8_max=FP8_MAX[out.dtype], block_m=block_m, num_warps=num_warps
    )


def launch_flatten_mxfp4(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill packed `out` (M, H * N / 2) and e8m0 `scales` (M, H * N / 32) from `x` (M, H, N), any strides."""
    _launch(x, out, scales, mxfp4=True, group=MXFP4_GROUP, fp8_max=0.0, block_m=1, num_warps=1)
