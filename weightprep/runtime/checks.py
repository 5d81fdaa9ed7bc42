"""What a caller can get wrong, checked on shapes and dtypes alone, before anything is allocated or launched."""

from __future__ import annotations

import torch

from weightprep.errors import ContractError
from weightprep.runtime.choice import OutQuant
from weightprep.runtime.group_quant import FP8_GROUP, FP8_MAX, MXFP4_GROUP

__all__ = ["check_heads", "check_operands", "check_output"]


def check_operands(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
) -> None:
    """Raise ContractError unless x (M, H, K), w (H, K, N) and the scale of w's encoding belong together."""
    named = {"activations": x, "weight": w, "scale": scale, "mx_scale": mx_scale, "x_scale": x_scale}
    for name, given in named.items():
        if given is not None and not isinstance(given, torch.Tensor):
            raise _mismatch(
                f"absorb: {name}", f"the {type(given).__name__} {given!r}", "a tensor on the device of the others"
            )
    if x.dim() != 3 or w.dim() != 3:
        raise _mismatch("absorb", f"activations {tuple(x.shape)}, weight {tuple(w.shape)}", "(M, H, K) and (H, K, N)")
    if (x.dtype in FP8_MAX) != (x_scale is not None):
        raise _mismatch("absorb: activations", str(x.dtype), "fp8 with one float32 scale, or a wide type without")
    if x_scale is None and x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise _mismatch("absorb: activations", str(x.dtype), "bfloat16, float16 or float32")
    if x_scale is not None and (x_scale.numel() != 1 or x_scale.dtype != torch.float32):
        found = f"{tuple(x_scale.shape)} {x_scale.dtype}"
        raise _mismatch("absorb: scale of fp8 activations", found, "one float32 for the whole tensor, 0-dim or (1,)")
    heads, k = x.shape[1], x.shape[2]
    packed = w.dtype == torch.uint8
    if w.shape[0] != heads or w.shape[1] * (2 if packed else 1) != k:
        raise _mismatch(
            "absorb: weight",
            f"{tuple(w.shape)} {w.dtype}",
            f"({heads}, {k // 2 if packed else k}, N) for {tuple(x.shape)}",
        )
    for name, tensor in named.items():
        if tensor is not None and tensor.device != x.device:
            raise _mismatch(f"absorb: {name}", f"device {tensor.device}", f"device {x.device}")
    if packed:
        wanted = (heads, k // MXFP4_GROUP, w.shape[2])
        if mx_scale is None or scale is not None or mx_scale.dtype != torch.uint8 or tuple(mx_scale.shape) != wanted:
            found = "none" if mx_scale is None else f"{tuple(mx_scale.shape)} {mx_scale.dtype}"
            raise _mismatch("absorb: mx_scale of an MXFP4 weight", found, f"{wanted} uint8, and no float scale")
        if k % MXFP4_GROUP:
            raise _mismatch("absorb: K of an MXFP4 weight", str(k), f"a multiple of {MXFP4_GROUP}")
    elif w.dtype in FP8_MAX:
        if scale is None or mx_scale is not None or scale.numel() != 1 or scale.dtype != torch.float32:
            found = "none" if scale is None else f"{tuple(scale.shape)} {scale.dtype}"
            raise _mismatch("absorb: scale of an fp8 weight", found, "one float32 for the whole tensor, 0-dim or (1,)")
    elif w.dtype != torch.bfloat16 or scale is not None or mx_scale is not None:
        raise _mismatch(
            "absorb: weight",
            f"{w.dtype} with a scale" if scale is not None else str(w.dtype),
            "bfloat16 without scale, fp8 or packed uint8",
        )


def check_heads(x: torch.Tensor) -> None:
    """Raise ContractError unless x is (M, H, N)."""
    if x.dim() != 3:
        raise _mismatch("flatten: activations", str(tuple(x.shape)), "(M, H, N)")


def check_output(columns: int, out_quant: OutQuant, fp8_dtype: torch.dtype) -> None:
    """Raise ContractError unless `columns` per head divide into the groups of `out_quant`."""
    group = {OutQuant.NONE: 1, OutQuant.FP8_GROUP: FP8_GROUP, OutQuant.MXFP4: MXFP4_GROUP}[out_quant]
    if columns % group:
        raise _mismatch(f"absorb: {out_quant.value} output", f"{columns} columns per head", f"a multiple of {group}")
    if fp8_dtype not in FP8_MAX:
        raise _mismatch("absorb: fp8 output", str(fp8_dtype), "float8_e4m3fn or float8_e4m3fnuz")


def _mismatch(subject: str, found: str, wanted: str) -> ContractError:
    return ContractError(subject, found=found, wanted=wanted, remedy="correct the argument; nothing was computed")
