"""The two absorbed products of MLA as functions over tensors: absorb_q before attention, absorb_v after it.

Both are one custom operator, so that torch.compile and piecewise CUDA graphs see an opaque call with a known output
shape. absorb_v writes (M, H, v) in memory order, so flattening heads for o_proj is a view, and can quantize for o_proj
in the same kernel.
"""

from __future__ import annotations

import torch

from weightprep.errors import ContractError
from weightprep.runtime import dispatch
from weightprep.runtime.checks import check_operands, check_output
from weightprep.runtime.choice import ActQuant, Backend, OutQuant, Quantized, member
from weightprep.runtime.output import empty_quantized
from weightprep.runtime.scale_layout import GroupScaleLayout

__all__ = ["absorb_into", "absorb_q", "absorb_v"]


def absorb_q(
    q_nope: torch.Tensor,
    w_kc: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    mx_scale: torch.Tensor | None = None,
    w_bf16: torch.Tensor | None = None,
    head_major: bool = True,
    act_quant: ActQuant | str = ActQuant.AUTO,
    backend: Backend | str = Backend.AUTO,
) -> torch.Tensor:
    """bf16 q_nope @ w_kc for every head: (H, M, rank), or (M, H, rank) without `head_major`; contiguous.

    :param q_nope: (M, H, nope) bf16 or fp16, any strides
    :param w_kc: (H, nope, rank) bf16, e4m3fn or e4m3fnuz, any strides; or packed e2m1 (H, nope / 2, rank) uint8
    :param scale: one float32, 0-dim or (1,), on the device, with fp8 weights
    :param mx_scale: e8m0 bytes (H, nope / 32, rank), with packed weights
    :param w_bf16: the same weight in bf16; where the table has torch.bmm as the faster one, it is used on this copy
    :param act_quant: a member of the enum, or its value as a string; so are the other choices of this module
    :raises ContractError: shapes, dtypes or devices do not fit together, or the named backend cannot take them
    """
    check_operands(q_nope, w_kc, scale, mx_scale)
    out: torch.Tensor
    out, _ = _absorb(
        q_nope,
        w_kc,
        scale,
        mx_scale,
        w_bf16,
        OutQuant.NONE.value,
        False,
        head_major,
        False,
        member(ActQuant, act_quant, "act_quant").value,
        member(Backend, backend, "backend").value,
    )
    return out


def absorb_v(
    attn_out: torch.Tensor,
    w_vc: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    mx_scale: torch.Tensor | None = None,
    out_quant: OutQuant | str = OutQuant.NONE,
    scale_layout: GroupScaleLayout | str = GroupScaleLayout.ROW,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    act_quant: ActQuant | str = ActQuant.AUTO,
    backend: Backend | str = Backend.AUTO,
) -> torch.Tensor | Quantized:
    """attn_out @ w_vc for every head, in the form that o_proj reads.

    The arguments are those of :func:`absorb_q`, with attn_out (M, H, rank) and w_vc (H, rank, v).

    :param out_quant: NONE returns bf16 (M, H, v), contiguous; FP8_GROUP returns `fp8_dtype` (M, H * v) and float32
        scales (M, H * v / 128); MXFP4 returns packed (M, H * v / 2) and e8m0 bytes (M, H * v / 32)
    :param scale_layout: order of the scales' bytes; their strides tell it
    :raises ContractError: as absorb_q, or v is not a multiple of the quantization group
    """
    check_operands(attn_out, w_vc, scale, mx_scale)
    form = member(OutQuant, out_quant, "out_quant")
    check_output(w_vc.shape[2], form, fp8_dtype)
    column = member(GroupScaleLayout, scale_layout, "scale_layout") is GroupScaleLayout.COLUMN
    act = member(ActQuant, act_quant, "act_quant").value
    named = member(Backend, backend, "backend").value
    fnuz = fp8_dtype == torch.float8_e4m3fnuz
    out: torch.Tensor
    scales: torch.Tensor
    out, scales = _absorb(attn_out, w_vc, scale, mx_scale, None, form.value, column, False, fnuz, act, named)
    return out if form is OutQuant.NONE else Quantized(out, scales)


def absorb_into(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    mx_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    backend: Backend | str = Backend.AUTO,
) -> None:
    """Write the bf16 product of :func:`absorb_v` into `out` (M, H, N), of any strides with a contiguous last dimension.

    :param x: (M, H, K) bf16 or fp16, or fp8 with its one float32 `x_scale`
    :param backend: with fp8 activations AUTO, TRITON or TORCH
    :raises ContractError: the tensors do not fit together, or the named backend cannot take them
    """
    check_operands(x, w, scale, mx_scale, x_scale)
    named = member(Backend, backend, "backend").value
    wanted = (x.shape[0], x.shape[1], w.shape[2])
    if tuple(out.shape) != wanted or out.dtype != torch.bfloat16 or out.stride(2) != 1:
        raise ContractError(
            "absorb: output",
            found=f"{tuple(out.shape)} {out.dtype}, strides {out.stride()}",
            wanted=f"{wanted} bfloat16 with a contiguous last dimension",
            remedy="pass the buffer that the next operation reads, seen as (M, H, N)",
        )
    if x.shape[0] and x.shape[1]:
        _absorb_into(out, x, w, scale, mx_scale, x_scale, named)


@torch.library.custom_op("weightprep::absorb_into", mutates_args=("out",))
def _absorb_into(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    backend: str,
) -> None:
    none = x.new_empty((0, 0), dtype=torch.float32)
    dispatch.absorb(x, w, scale, mx_scale, None, out, none, ActQuant.AUTO, Backend(backend), x_scale)


@torch.library.custom_op("weightprep::absorb", mutates_args=())
def _absorb(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    w_bf16: torch.Tensor | None,
    out_quant: str,
    column: bool,
    head_major: bool,
    fnuz: bool,
    act_quant: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, scales = _empty_outputs(x, w, out_quant, column, head_major, fnuz)
    if x.shape[0] and x.shape[1]:
        batch_major = out.transpose(0, 1) if head_major else out
        dispatch.absorb(x, w, scale, mx_scale, w_bf16, batch_major, scales, ActQuant(act_quant), Backend(backend))
    return out, scales


@_absorb.register_fake
def _(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    w_bf16: torch.Tensor | None,
    out_quant: str,
    column: bool,
    head_major: bool,
    fnuz: bool,
    act_quant: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_outputs(x, w, out_quant, column, head_major, fnuz)


def _empty_outputs(
    x: torch.Tensor, w: torch.Tensor, out_quant: str, column: bool, head_major: bool, fnuz: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, columns = x.shape[0], x.shape[1], w.shape[2]
    form = OutQuant(out_quant)
    if form is OutQuant.NONE:
        shape = (heads, rows, columns) if head_major else (rows, heads, columns)
        return x.new_empty(shape, dtype=torch.bfloat16), x.new_empty((0, 0), dtype=torch.float32)
    return empty_quantized(x, columns, form, column_major=column, fnuz=fnuz)
