"""Puts weightprep's absorbed products in the place of the ones that sglang's MLA calls.

    release            ROCm                                                       CUDA
    0.5.12, 0.5.15     the two aiter kernels as bound in forward_mla              forward_mla.bmm_fp8
    0.5.18 and later   forward_mla_rocm.rocm_absorb_q_bmm and rocm_absorb_v_bmm   forward_mla.bmm_fp8

Where only the kernel can be replaced, its replacement writes batch-major and returns the transposed view, so that the
transpose and flatten that upstream does next copy nothing. From 0.5.18 on the product and the quantization for o_proj
are one kernel, and a bf16 weight's product, too, is written batch-major. Upstream's fused absorb+rope kernel (0.5.22)
bypasses rocm_absorb_q_bmm; it stays, and is counted.

With many rows the product is bound by arithmetic, and a kernel that widens fp8 weights loses: there, unless a runtime
was named, q stays with upstream's fp8 kernel, which no layout makes slower, and so does CUDA's bmm_fp8.

A runtime that was named is never replaced by another of ours. What aiter's fp8 kernel cannot take (MXFP4 and bf16
weights, a quantized output, fp8 activations) stays with upstream when aiter was named.

A call that stays with upstream is counted under the name of the function with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightprep.engines.sglang import versions
from weightprep.engines.sglang.guard import ensure_hook
from weightprep.engines.sglang.source_names import resolves
from weightprep.engines.sglang.taken_paths import layer_of
from weightprep.engines.sglang.versions import installed_root
from weightprep.errors import EngineError
from weightprep.runtime import witness
from weightprep.runtime.absorb import absorb_into, absorb_q, absorb_v
from weightprep.runtime.choice import Backend, OutQuant, Quantized
from weightprep.runtime.scale_layout import GroupScaleLayout

__all__ = ["RuntimeHook", "refuse_other_runtime", "register_runtime_hooks", "runtime_hooks"]

# Up to here reading the weights takes longer than multiplying them in bf16: 4.2 TB/s and 790 TFLOP/s, as on an H200,
# balance at 94 rows.
_FEW_ROWS = 64
# Beyond, what the transpose of upstream's result costs was not set against a slower kernel.
_MEASURED_ROWS = 256
# Under which calls that stay with upstream are counted.
Q_PATH, V_PATH = versions.ROCM_ABSORB_Q.rpartition(".")[2], versions.ROCM_ABSORB_V.rpartition(".")[2]
CUDA_PATH, _FP8_PATH = versions.BMM_FP8.rpartition(".")[2], versions.FP8_KERNEL.rpartition(".")[2]
_MXFP4_PATH = versions.MXFP4_KERNEL.rpartition(".")[2]

# sglang's hooks have no argument of ours; set once, before they are registered.
_backend = Backend.AUTO
_runtime: str | None = None


@dataclass(frozen=True, slots=True)
class RuntimeHook:
    """A function around sglang's `target` (dotted name): called with the original and then upstream's arguments."""

    target: str
    around: Callable[..., Any]


def runtime_hooks(root: Path, *, hip: bool) -> tuple[RuntimeHook, ...]:
    """The hooks for the sglang package in directory `root`.

    :param hip: the process runs on ROCm; otherwise on CUDA
    """
    around: dict[str, Callable[..., Any]] = {
        versions.BMM_FP8: cuda_bmm_fp8,
        versions.ROCM_ABSORB_Q: rocm_absorb_q,
        versions.ROCM_ABSORB_V: rocm_absorb_v,
        versions.FUSED_ROPE: fused_rope,
        versions.FP8_KERNEL: aiter_fp8_kernel,
        versions.MXFP4_KERNEL: aiter_mxfp4_kernel,
    }
    targets = versions.product_targets(root, hip=hip)
    if versions.ROCM_ABSORB_V in targets and resolves(root, versions.FUSED_ROPE):
        targets += (versions.FUSED_ROPE,)
    return tuple(RuntimeHook(target, around[target]) for target in targets)


def refuse_other_runtime(runtime: str) -> None:
    """Asked before a load, because it takes no weights to know.

    :raises EngineError: a model of this process was loaded with another runtime
    """
    if _runtime not in (None, runtime):
        raise EngineError(
            f"runtime '{runtime}'",
            found=f"a model that this process loaded with runtime '{_runtime}', and hooks that all its models share",
            wanted="one runtime in a process",
            remedy=f"load this model with runtime '{_runtime}', or in a process of its own",
        )


def register_runtime_hooks(runtime: str) -> tuple[RuntimeHook, ...]:
    """Hook the running sglang and return what was hooked. Calling it again changes nothing.

    :param runtime: "auto", "aiter", "triton" or "torch"; "upstream" hooks nothing
    :raises EngineError: a hook did not take, or a model of this process was loaded with another runtime
    """
    global _backend, _runtime
    root = installed_root()
    if root is None or not torch.cuda.is_available():
        return ()
    refuse_other_runtime(runtime)
    _runtime = runtime
    if runtime == "upstream":
        return ()
    _backend = Backend(runtime)
    hooks = tuple(hook for hook in runtime_hooks(root, hip=torch.version.hip is not None) if _is_bound(hook.target))
    for hook in hooks:
        ensure_hook(hook.target, hook.around)
    return hooks


def _is_bound(target: str) -> bool:
    """Whether this process took the branch of sglang's module that binds the name."""
    module, name = target.rsplit(".", 1)
    return getattr(importlib.import_module(module), name, None) is not None


def rocm_absorb_q(orig: Callable[..., torch.Tensor], attn: Any, q_nope: torch.Tensor, **rest: Any) -> torch.Tensor:
    """Around rocm_absorb_q_bmm: (M, H, nope) -> bf16 (H, M, rank)."""
    reason = _not_ours(attn.w_kc, attn.w_scale, getattr(attn, "w_scale_k", None)) or _not_aiters(attn.w_kc)
    if reason is None and attn.w_kc.dtype != torch.uint8 and _backend is Backend.AUTO and q_nope.shape[0] > _FEW_ROWS:
        reason = "with this many rows upstream's fp8 kernel is the faster one"
    if reason is not None:
        witness.decline(Q_PATH, reason)
        return orig(attn, q_nope, **rest)
    scale, mx_scale = _scales(attn.w_kc, attn.w_scale, getattr(attn, "w_scale_k", None))
    with witness.calling(Q_PATH, layer_of(attn)):
        return absorb_q(q_nope, attn.w_kc, scale, mx_scale=mx_scale, backend=_backend)


def rocm_absorb_v(
    orig: Callable[..., Any], attn: Any, attn_output: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Around rocm_absorb_v_bmm: (M, H, rank) -> what o_proj takes, bf16 (M, H * v) or a pair of values and scales.

    The pair is upstream's: e8m0 scales column-major, as aiter's MXFP4 quantization returns them; fp8 scales
    column-major where the bpreshuffle GEMM of gfx95 reads them, row-major elsewhere.
    """
    out_quant, layout = _o_proj_input(attn.o_proj)
    reason = _not_ours(attn.w_vc, attn.w_scale, getattr(attn, "w_scale_v", None))
    if attn.w_vc.dtype == torch.bfloat16 and isinstance(attn.w_scale, float) and out_quant is OutQuant.NONE:
        reason = None
    reason = reason or _not_aiters(attn.w_vc, out_quant)
    if reason is None and out_quant is not OutQuant.NONE and getattr(attn.kv_b_proj, "set_lora", False):
        reason = "a kv_b LoRA corrects the product before it is quantized"
    if reason is not None:
        witness.decline(V_PATH, reason)
        upstream: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = orig(attn, attn_output)
        return upstream
    scale, mx_scale = _scales(attn.w_vc, attn.w_scale, getattr(attn, "w_scale_v", None))
    with witness.calling(V_PATH, layer_of(attn)):
        result = absorb_v(
            attn_output, attn.w_vc, scale, mx_scale=mx_scale, out_quant=out_quant, scale_layout=layout, backend=_backend
        )
    return (result.values, result.scales) if isinstance(result, Quantized) else result.flatten(1, 2)


def fused_rope(orig: Callable[..., Any], *args: Any, **rest: Any) -> Any:
    """Around upstream's kernel that absorbs q, rotates and writes the cache at once: nothing of ours replaces it."""
    witness.decline(Q_PATH, "upstream's fused absorb, rope and cache kernel took the call")
    return orig(*args, **rest)


def aiter_fp8_kernel(
    orig: Callable[..., torch.Tensor],
    X: torch.Tensor,
    WQ: torch.Tensor,
    w_scale: torch.Tensor,
    group_size: int = 128,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    splitK: int | None = None,
    YQ: torch.Tensor | None = None,
    transpose_bm: bool | None = False,
    transpose_bm_in: bool | None = False,
    config: object = None,
) -> torch.Tensor:
    """Around aiter's fp8 batched kernel: X (H, M, K), or (M, H, K) with `transpose_bm_in`; WQ (H, N, K)."""
    weight = WQ.transpose(1, 2)
    reason = _not_ours(weight, w_scale, None)
    if reason is None and (bias is not None or dtype != torch.bfloat16):
        reason = "with a bias, or an output that is not bf16"
    if reason is not None:
        witness.decline(_FP8_PATH, reason)
        return orig(X, WQ, w_scale, group_size, bias, dtype, splitK, YQ, transpose_bm, transpose_bm_in, config)
    x = X if transpose_bm_in else X.transpose(0, 1)
    if YQ is None:
        out = x.new_empty((x.shape[0], x.shape[1], weight.shape[2]), dtype=torch.bfloat16)
        YQ = out if transpose_bm else out.transpose(0, 1)
    with witness.calling(_FP8_PATH):
        absorb_into(YQ if transpose_bm else YQ.transpose(0, 1), x, weight, w_scale, backend=_backend)
    return YQ


def aiter_mxfp4_kernel(
    orig: Callable[..., Any],
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    dtype: torch.dtype | None = torch.bfloat16,
    y: torch.Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> torch.Tensor | None:
    """Around aiter's MXFP4 batched kernel: x (H, M, K), w (H, N, K / 2), w_scales (H, N, K / 32), y (H, M, N).

    A head-major `y`, as 0.5.12 allocates it, becomes the transposed view of a batch-major buffer in its own memory.
    """
    reason = _not_aiters(w)
    if dtype != torch.bfloat16 or rest or named:
        reason = "with an explicit configuration, or an output that is not bf16"
    if reason is not None:
        witness.decline(_MXFP4_PATH, reason)
        done: torch.Tensor | None = orig(x, w, w_scales, dtype, y, *rest, **named)
        return done
    weight, mx_scale = w.transpose(1, 2), w_scales.transpose(1, 2)
    if y is None:
        y = x.new_empty((x.shape[1], x.shape[0], weight.shape[2]), dtype=torch.bfloat16).transpose(0, 1)
    elif y.is_contiguous():
        y.as_strided_(y.shape, (y.shape[2], y.shape[0] * y.shape[2], 1))
    with witness.calling(_MXFP4_PATH):
        absorb_into(y.transpose(0, 1), x.transpose(0, 1), weight, mx_scale=mx_scale, backend=_backend)
    return y


def cuda_bmm_fp8(
    orig: Callable[..., torch.Tensor],
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around bmm_fp8: A (H, M, K) and B (H, K, N) in e4m3fn, one scale each -> bf16 (H, M, N), batch-major."""
    reason = _not_ours(B, B_scale, None)
    if reason is None and not _one_float32(A_scale):
        reason = "the scale of the activations is not one float32 on the device"
    if reason is None and (out is not None or dtype != torch.bfloat16):
        reason = "into a given buffer, or an output that is not bf16"
    if reason is None and _backend is Backend.AITER:
        reason = "aiter was named, which has no kernel for activations that are already fp8"
    if reason is None and _backend is Backend.AUTO and A.shape[1] > _MEASURED_ROWS:
        reason = "with this many rows upstream's fp8 kernel is the faster one"
    if reason is not None:
        witness.decline(CUDA_PATH, reason)
        return orig(A, B, A_scale, B_scale, dtype, out)
    buffer = A.new_empty((A.shape[1], A.shape[0], B.shape[2]), dtype=torch.bfloat16)
    with witness.calling(CUDA_PATH):
        absorb_into(buffer, A.transpose(0, 1), B, B_scale, x_scale=A_scale, backend=_backend)
    return buffer.transpose(0, 1)


def _not_ours(w: torch.Tensor, scale: object, mx_scale: torch.Tensor | None) -> str | None:
    """Why a weight stays with upstream, or None."""
    if w.dtype == torch.uint8:
        return None if mx_scale is not None else "an MXFP4 weight without its e8m0 scales"
    if w.dtype not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        return f"the weight is {w.dtype}, for which upstream's torch.bmm is the fast path"
    return None if _one_float32(scale) else "the scale is not one float32 on the device"


def _one_float32(scale: object) -> bool:
    return isinstance(scale, torch.Tensor) and scale.dtype == torch.float32 and scale.numel() == 1


def _not_aiters(w: torch.Tensor, out_quant: OutQuant = OutQuant.NONE) -> str | None:
    """Why a call stays with upstream when aiter was named, or None."""
    if _backend is Backend.AITER and (out_quant is not OutQuant.NONE or w.dtype in (torch.uint8, torch.bfloat16)):
        return "aiter was named, whose fp8 kernel takes fp8 weights and writes bf16"
    return None


def _scales(
    w: torch.Tensor, scale: Any, mx_scale: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if w.dtype == torch.uint8:
        return None, mx_scale
    return (None if w.dtype == torch.bfloat16 else scale), None


def _o_proj_input(o_proj: Any) -> tuple[OutQuant, GroupScaleLayout]:
    """What upstream's function hands to this o_proj: its own conditions, from its own module."""
    from sglang.srt.models.deepseek_common import utils

    if o_proj.weight.dtype == torch.uint8:
        return OutQuant.MXFP4, GroupScaleLayout.COLUMN
    if utils._is_block_scale_fp8(o_proj):
        column = getattr(utils, "_use_aiter_bpreshuffle_gfx95", False)
        return OutQuant.FP8_GROUP, GroupScaleLayout.COLUMN if column else GroupScaleLayout.ROW
    return OutQuant.NONE, GroupScaleLayout.ROW
