"""Triton: the absorbed batched matrix product with the quantization for o_proj in its epilogue, for any GPU.

One program computes BLOCK_M rows x BLOCK_N columns of one head. BLOCK_N is a multiple of the quantization group, so a
group never crosses programs. fp8 and MXFP4 weights are widened to bf16 in registers, unless ACT_GROUP asks for
upstream's numbers: activations quantized per row and 128 of K, product in fp8.
"""

# Triton gives kernel arguments their types at launch, so annotations would say nothing.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightprep.runtime.choice import OutQuant
from weightprep.runtime.group_quant import AMAX_FLOOR, FP8_GROUP, FP8_MAX, MXFP4_GROUP
from weightprep.runtime.output import form_of, launch_strides
from weightprep.runtime.triton_quant import fp8_groups, mxfp4_groups
from weightprep.runtime.tuning import TritonConfig

__all__ = ["launch_absorb"]


@triton.jit
def _widen_mxfp4(codes, scale):
    """e2m1 codes (int32, low 4 bits) times 2^(scale - 127), as bf16; both are exact there."""
    exponent = (codes >> 1) & 3
    mantissa = codes & 1
    # Twice the magnitude is an integer: 0, 1 for exponent 0, else (2 + mantissa) * 2^(exponent - 1).
    twice = tl.where(exponent == 0, mantissa, (2 + mantissa) << (tl.maximum(exponent, 1) - 1))
    value = tl.where((codes & 8) != 0, -twice.to(tl.float32), twice.to(tl.float32)) * 0.5
    power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    power = tl.where(scale == 0, 5.877471754111438e-39, power)
    power = tl.where(scale == 255, float("nan"), power)
    return (value * power).to(tl.bfloat16)


@triton.jit
def _absorb_kernel(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    x_scale_ptr,
    mx_scale_ptr,
    out_ptr,
    scale_ptr,
    rows,
    columns,
    x_m,
    x_h,
    x_k,
    w_h,
    w_k,
    w_n,
    mx_h,
    mx_k,
    mx_n,
    out_m,
    out_h,
    scale_m,
    scale_g,
    K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    MXFP4_WEIGHT: tl.constexpr,
    ACT_GROUP: tl.constexpr,
    ACT_MAX: tl.constexpr,
    OUT_QUANT: tl.constexpr,
    OUT_GROUP: tl.constexpr,
    OUT_MAX: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
):
    column_block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    n64 = n.to(tl.int64)
    row_mask = m[:, None] < rows
    column_mask = n[None, :] < columns
    x_row = x_ptr + m[:, None] * x_m + head * x_h
    w_column = w_ptr + head * w_h + n64[None, :] * w_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if MXFP4_WEIGHT:
        mx_column = mx_scale_ptr + head * mx_h + n64[None, :] * mx_n
        for start in range(0, K, BLOCK_K):
            half = start // 2 + tl.arange(0, BLOCK_K // 2)
            packed = tl.load(
                w_column + half[:, None].to(tl.int64) * w_k, mask=column_mask & (half[:, None] < K // 2), other=0
            )
            scale = tl.load(
                mx_column + (half[:, None] // 16).to(tl.int64) * mx_k,
                mask=column_mask & (half[:, None] < K // 2),
                other=127,
            )
            x_mask = row_mask & (half[None, :] < K // 2)
            even = tl.load(x_row + (2 * half[None, :]).to(tl.int64) * x_k, mask=x_mask, other=0.0)
            odd = tl.load(x_row + (2 * half[None, :] + 1).to(tl.int64) * x_k, mask=x_mask, other=0.0)
            codes = packed.to(tl.int32)
            acc = tl.dot(even.to(tl.bfloat16), _widen_mxfp4(codes & 15, scale), acc)
            acc = tl.dot(odd.to(tl.bfloat16), _widen_mxfp4(codes >> 4, scale), acc)
    elif SWAP:
        # Weights as the first operand go from shared memory to registers, are widened there and stay there.
        acc_t = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        w_row = w_ptr + head * w_h + n64[:, None] * w_n
        x_column = x_ptr + m[None, :] * x_m + head * x_h
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            k64 = k.to(tl.int64)
            w = tl.load(w_row + k64[None, :] * w_k, mask=(n[:, None] < columns) & (k[None, :] < K), other=0.0)
            x = tl.load(x_column + k64[:, None] * x_k, mask=(m[None, :] < rows) & (k[:, None] < K), other=0.0)
            acc_t = tl.dot(w.to(tl.bfloat16), x.to(tl.bfloat16), acc_t)
        acc = tl.trans(acc_t)
    else:
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            k64 = k.to(tl.int64)
            w = tl.load(w_column + k64[:, None] * w_k, mask=column_mask & (k[:, None] < K), other=0.0)
            x = tl.load(x_row + k64[None, :] * x_k, mask=row_mask & (k[None, :] < K), other=0.0)
            if ACT_GROUP:
                amax = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), axis=1), FLOOR)
                act_scale = tl.math.div_rn(amax, tl.full([BLOCK_M], ACT_MAX, tl.float32))
                inverse = tl.math.div_rn(tl.full([BLOCK_M], 1.0, tl.float32), act_scale)
                q = (x.to(tl.float32) * inverse[:, None]).to(w_ptr.dtype.element_ty)
                acc += tl.dot(q, w) * act_scale[:, None]
            else:
                acc = tl.dot(x.to(tl.bfloat16), w.to(tl.bfloat16), acc)
    if HAS_SCALE:
        acc = acc * tl.load(w_scale_ptr).to(tl.float32)
    if HAS_X_SCALE:
        acc = acc * tl.load(x_scale_ptr).to(tl.float32)
    rounded = acc.to(tl.bfloat16)
    if OUT_QUANT == 0:
        out_at = out_ptr + m[:, None] * out_m + head * out_h + n64[None, :]
        tl.store(out_at, rounded, mask=row_mask & column_mask)
    else:
        g = column_block * (BLOCK_N // OUT_GROUP) + tl.arange(0, BLOCK_N // OUT_GROUP)
        flat_group = head * (columns // OUT_GROUP) + g[None, :]
        scale_at = scale_ptr + m[:, None] * scale_m + flat_group * scale_g
        scale_mask = row_mask & (g[None, :] * OUT_GROUP < columns)
        if OUT_QUANT == 1:
            values, scale = fp8_groups(rounded.to(tl.float32), BLOCK_M, BLOCK_N, OUT_GROUP, OUT_MAX, FLOOR)
            out_at = out_ptr + m[:, None] * out_m + head * columns + n64[None, :]
            tl.store(out_at, values.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)
            tl.store(scale_at, scale, mask=scale_mask)
        else:
            packed_out, byte = mxfp4_groups(rounded.to(tl.float32), BLOCK_M, BLOCK_N, OUT_GROUP)
            half_n = column_block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            out_at = out_ptr + m[:, None] * out_m + head * (columns // 2) + half_n[None, :]
            tl.store(out_at, packed_out, mask=row_mask & (half_n[None, :] * 2 < columns))
            tl.store(scale_at, byte, mask=scale_mask)


def launch_absorb(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    config: TritonConfig,
    x_scale: torch.Tensor | None = None,
) -> None:
    """Launch one absorb kernel; shapes were checked by the caller.

    :param x: (M, H, K) bf16 or fp16, or fp8 with `x_scale`; any strides
    :param w: (H, K, N) bf16 or fp8, or packed (H, K / 2, N) uint8; any strides
    :param out: (M, H, N) bf16 with unit stride along N, or quantized (M, H * N) fp8 / (M, H * N / 2) uint8
    :param scales: (M, groups), any strides, where `out` is quantized
    """
    rows, heads, k = x.shape
    columns = w.shape[2]
    code, group, out_max = {
        OutQuant.NONE: (0, 1, 0.0),
        OutQuant.FP8_GROUP: (1, FP8_GROUP, FP8_MAX.get(out.dtype, 0.0)),
        OutQuant.MXFP4: (2, MXFP4_GROUP, 0.0),
    }[form_of(out)]
    grid = (triton.cdiv(columns, config.block_n), heads, triton.cdiv(rows, config.block_m))
    _absorb_kernel[grid](
        x,
        w,
        w_scale,
        x_scale,
        mx_scale,
        out,
        scales,
        rows,
        columns,
        *x.stride(),
        *w.stride(),
        *launch_strides(mx_scale, out, scales),
        K=k,
        HAS_SCALE=w_scale is not None,
        HAS_X_SCALE=x_scale is not None,
        MXFP4_WEIGHT=mx_scale is not None,
        ACT_GROUP=config.act_group,
        ACT_MAX=FP8_MAX.get(w.dtype, 0.0),
        OUT_QUANT=code,
        OUT_GROUP=group,
        OUT_MAX=out_max,
        FLOOR=AMAX_FLOOR,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SWAP=config.swap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
