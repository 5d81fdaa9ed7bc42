"""Eager float32 references of the absorbed products: the definition that every backend is compared with."""

from __future__ import annotations

import torch

from weightprep.runtime.group_quant import AMAX_FLOOR, FP8_GROUP, FP8_MAX, widen_mxfp4

__all__ = ["absorb_reference", "quantize_activations", "widen_weight"]


def widen_weight(w: torch.Tensor, scale: torch.Tensor | None, mx_scale: torch.Tensor | None) -> torch.Tensor:
    """float32 (H, K, N) of an absorbed weight in any of its encodings.

    :param w: (H, K, N) bf16, e4m3fn or e4m3fnuz; or packed e2m1 (H, K / 2, N) uint8
    :param scale: one float32 for the whole tensor, with fp8 weights
    :param mx_scale: e8m0 bytes (H, K / 32, N), with MXFP4 weights
    """
    if mx_scale is not None:
        return widen_mxfp4(w, mx_scale)
    wide = w.float()
    return wide if scale is None else wide * scale.float().reshape(())


def absorb_reference(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None = None, mx_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 (M, H, N) = x (M, H, K) times the weight of each head; activations are taken as they are."""
    return torch.bmm(x.float().transpose(0, 1), widen_weight(w, scale, mx_scale)).transpose(0, 1)


def quantize_activations(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 (M, H, K): `x` after upstream's quantization to fp8 `dtype` per row and 128 of K, the last shorter."""
    padding = -x.shape[2] % FP8_GROUP
    groups = torch.nn.functional.pad(x.float(), (0, padding)).reshape(*x.shape[:2], -1, FP8_GROUP)
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_min(AMAX_FLOOR)
    scale = amax / torch.full_like(amax, FP8_MAX[dtype])
    inverse = torch.ones_like(scale) / scale
    quantized: torch.Tensor = (groups * inverse).to(dtype).float() * scale
    return quantized.flatten(2)[..., : x.shape[2]]
