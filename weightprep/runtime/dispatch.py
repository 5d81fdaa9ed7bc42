"""Sends an absorbed product to the backend that was asked for, or that the table has as the fastest, and counts it.

A backend asked for by name that cannot take the call raises; it is never replaced silently.
"""

from __future__ import annotations

import torch

from weightprep.errors import ContractError
from weightprep.runtime import witness
from weightprep.runtime.arch import arch_of
from weightprep.runtime.choice import ActQuant, Backend, OutQuant
from weightprep.runtime.group_quant import FP8_MAX, quantize_fp8_groups, quantize_mxfp4_groups
from weightprep.runtime.output import form_of
from weightprep.runtime.reference import absorb_reference, quantize_activations
from weightprep.runtime.tuning import BmmConfig, CudaConfig, DecodeConfig, TritonConfig, choose, portable

__all__ = ["absorb"]


def absorb(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    w_bf16: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor,
    act_quant: ActQuant,
    backend: Backend,
    x_scale: torch.Tensor | None = None,
) -> None:
    """Fill `out` and `scales`; both were shaped by the caller and all operands checked. M and H are not zero.

    :param x_scale: one float32, with activations that are already fp8
    """
    if act_quant is ActQuant.GROUP and w.dtype not in FP8_MAX:
        raise ContractError(
            "absorb: act_quant",
            found=f"group with a {w.dtype} weight",
            wanted="an fp8 weight, since the product is then in fp8",
            remedy="pass act_quant=ActQuant.NONE",
        )
    form = form_of(out)
    config: CudaConfig | TritonConfig | BmmConfig | None
    if backend is Backend.AUTO:
        backend, config = _automatic(x, w, mx_scale, w_bf16, out, act_quant)
    else:
        config = _named(x, w, mx_scale, out, act_quant, backend)
    some_scales = scales if scales.numel() else None
    if isinstance(config, CudaConfig):
        from weightprep.runtime.cuda_absorb import launch_cuda

        launch_cuda(x, w, scale, mx_scale, out, some_scales, config)
    elif isinstance(config, TritonConfig):
        from weightprep.runtime.triton_absorb import launch_absorb

        launch_absorb(x, w, scale, mx_scale, out, some_scales, config, x_scale)
    elif backend is Backend.AITER:
        from weightprep.runtime.aiter_absorb import launch_aiter

        launch_aiter(x, w, scale, out)
    elif isinstance(config, BmmConfig):
        weight = w if w_bf16 is None else w_bf16
        torch.bmm(x.to(torch.bfloat16).transpose(0, 1), weight, out=out.transpose(0, 1))
    else:
        _eager(x, w, scale, mx_scale, out, scales, act_quant, x_scale)
    kind = "bmm_bf16" if isinstance(config, BmmConfig) else backend.value
    witness.count(f"absorb/{kind}/{_weight_name(w)}/{'bf16' if form is OutQuant.NONE else form.value}")


def _automatic(
    x: torch.Tensor,
    w: torch.Tensor,
    mx_scale: torch.Tensor | None,
    w_bf16: torch.Tensor | None,
    out: torch.Tensor,
    act_quant: ActQuant,
) -> tuple[Backend, CudaConfig | TritonConfig | BmmConfig | None]:
    if not x.is_cuda:
        return Backend.TORCH, None
    form = form_of(out)
    if x.dtype in FP8_MAX:
        # Of the kernels, only this one widens fp8 activations.
        return Backend.TRITON, portable(x.shape[0], x.shape[2], form=form)
    if w.dtype == torch.bfloat16:
        # cuBLAS and hipBLASLt have no quantizing epilogue; without one they are the faster ones.
        fallback = portable(x.shape[0], x.shape[2], form=form)
        return (Backend.TORCH, BmmConfig(fallback)) if form is OutQuant.NONE else (Backend.TRITON, fallback)
    config = _tuned(x, w, mx_scale, form)
    if isinstance(config, BmmConfig):
        if w_bf16 is not None:
            return Backend.TORCH, config
        config = config.otherwise
    if act_quant is ActQuant.GROUP or (isinstance(config, TritonConfig) and act_quant is ActQuant.NONE):
        return Backend.TRITON, _triton(x, form, act_quant)
    if isinstance(config, CudaConfig):
        from weightprep.runtime.cuda_absorb import unsupported

        reason = unsupported(x, w, mx_scale, out, config)
        if reason is None:
            return Backend.CUDA, config
        witness.pass_over("absorb/cuda", reason)
        config = portable(x.shape[0], x.shape[2], form=form)
    return Backend.TRITON, config


def _named(
    x: torch.Tensor,
    w: torch.Tensor,
    mx_scale: torch.Tensor | None,
    out: torch.Tensor,
    act_quant: ActQuant,
    backend: Backend,
) -> CudaConfig | TritonConfig | None:
    reason = None
    config: CudaConfig | TritonConfig | None = None
    if backend is Backend.TRITON:
        config = _triton(x, form_of(out), act_quant)
    elif backend is Backend.CUDA:
        from weightprep.runtime.cuda_absorb import unsupported

        chosen = _tuned(x, w, mx_scale, form_of(out))
        if isinstance(chosen, BmmConfig):
            chosen = chosen.otherwise
        if isinstance(chosen, TritonConfig):
            chosen = DecodeConfig(columns=32, warps_k=1 if x.shape[2] % 128 else 2, warps_n=4)
        config = chosen
        reason = unsupported(x, w, mx_scale, out, config)
        if act_quant is ActQuant.GROUP:
            reason = "it does not quantize activations"
    elif backend is Backend.AITER and (
        w.dtype not in FP8_MAX or x.dtype in FP8_MAX or out.dim() != 3 or act_quant is ActQuant.NONE
    ):
        reason = "aiter's kernel takes fp8 weights, quantizes activations that are not fp8 yet, and writes bf16"
    if reason is not None:
        raise ContractError(
            f"absorb: backend '{backend.value}'",
            found=reason,
            wanted="a call that this backend can serve",
            remedy="pass backend=Backend.AUTO, or another backend",
        )
    return config


def _tuned(
    x: torch.Tensor, w: torch.Tensor, mx_scale: torch.Tensor | None, form: OutQuant
) -> CudaConfig | TritonConfig | BmmConfig:
    rows, heads, k = x.shape
    mxfp4 = mx_scale is not None
    return choose(heads, rows, k, w.shape[2], form=form, mxfp4=mxfp4, arch=arch_of(x.device))


def _triton(x: torch.Tensor, form: OutQuant, act_quant: ActQuant) -> TritonConfig:
    config = portable(x.shape[0], x.shape[2], form=form)
    if act_quant is ActQuant.GROUP:
        # The block is the quantization group of the activations.
        config = TritonConfig(config.block_m, config.block_n, 128, config.num_warps, config.num_stages, act_group=True)
    return config


def _eager(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor,
    act_quant: ActQuant,
    x_scale: torch.Tensor | None,
) -> None:
    operand = quantize_activations(x, w.dtype) if act_quant is ActQuant.GROUP else x.to(torch.bfloat16)
    product = absorb_reference(operand, w, scale, mx_scale)
    result = (product if x_scale is None else product * x_scale).to(torch.bfloat16)
    if out.dim() == 3:
        out.copy_(result)
        return
    flat = result.flatten(1)
    values, group_scales = (
        quantize_mxfp4_groups(flat) if out.dtype == torch.uint8 else quantize_fp8_groups(flat, out.dtype)
    )
    out.copy_(values)
    scales.copy_(group_scales)


def _weight_name(w: torch.Tensor) -> str:
    return {torch.uint8: "mxfp4", torch.bfloat16: "bf16"}.get(w.dtype, "fp8")
