"""The two quantizations of activations that o_proj reads, as eager float32 references: these define the bits.

fp8 in groups of 128 (the rule of aiter's fused_flatten_fp8_group_quant, with correctly rounded divisions)::

    scale = max(amax, 1e-10) / fp8_max        value = round_to_nearest_even(x * (1 / scale))

MXFP4 in groups of 32 (the rule of aiter's fused_flatten_mxfp4_quant): the shared exponent is that of amax after its
mantissa is rounded up from 1.75, minus 2; e2m1 ties round away from zero::

    exponent = clamp(floor(log2(bits(amax) + 0x200000)) - 2, -127, 127)     byte = exponent + 127

NaN elements stay NaN in fp8 and do not enter amax. e2m1 has no NaN: there a NaN element becomes zero, so callers that
may see NaN use fp8.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = [
    "AMAX_FLOOR",
    "FP8_GROUP",
    "FP8_MAX",
    "MXFP4_GROUP",
    "e8m0_to_float32",
    "quantize_fp8_groups",
    "quantize_mxfp4_groups",
    "widen_mxfp4",
]

FP8_GROUP: Final = 128
MXFP4_GROUP: Final = 32
# aiter and sglang use 240 for e4m3fnuz.
FP8_MAX: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
AMAX_FLOOR: Final = 1e-10
_E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDPOINTS: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantize_fp8_groups(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (rows, columns) in `dtype` and float32 scales (rows, columns / 128), row-major.

    :param x: (rows, columns), any float dtype; columns is a multiple of 128
    """
    rows, columns = x.shape
    groups = x.float().reshape(rows, columns // FP8_GROUP, FP8_GROUP)
    amax = torch.where(groups.isnan(), 0.0, groups.abs()).amax(dim=-1).clamp_min(AMAX_FLOOR)
    # Tensors on both sides: by a Python number CUDA multiplies with the reciprocal, which rounds differently.
    scale = amax / torch.full_like(amax, FP8_MAX[dtype])
    inverse = torch.ones_like(scale) / scale
    return (groups * inverse[..., None]).to(dtype).reshape(rows, columns), scale


def quantize_mxfp4_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 (rows, columns / 2) uint8, even columns in the low nibble, and e8m0 bytes (rows, columns / 32).

    :param x: (rows, columns), any float dtype, finite; columns is a multiple of 32
    """
    rows, columns = x.shape
    groups = x.float().reshape(rows, columns // MXFP4_GROUP, MXFP4_GROUP)
    amax = torch.where(groups.isnan(), 0.0, groups.abs()).amax(dim=-1)
    exponent = ((amax.view(torch.int32) + 0x200000) >> 23) - 127 - 2
    exponent = exponent.clamp(-127, 127)
    # 2^127 times 2^-exponent is not representable for the smallest exponents: scale in two exact steps.
    half = torch.div(exponent, 2, rounding_mode="floor")
    scaled = torch.ldexp(torch.ldexp(groups, -half[..., None]), -(exponent - half)[..., None])
    magnitude = scaled.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint in _E2M1_MIDPOINTS:
        code += magnitude >= midpoint
    code |= scaled.signbit().to(torch.uint8) << 3
    code = code.reshape(rows, columns // 2, 2)
    return code[..., 0] | (code[..., 1] << 4), (exponent + 127).to(torch.uint8)


def e8m0_to_float32(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two from e8m0 bytes of any shape: 2^(byte - 127), and NaN for 255."""
    return scale.contiguous().view(torch.float8_e8m0fnu).float()


def widen_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 (H, K, N) from packed (H, K / 2, N), even k in the low nibble, and e8m0 scales (H, K / 32, N)."""
    heads, half_k, columns = packed.shape
    codes = torch.stack((packed & 0xF, packed >> 4), dim=2).reshape(heads, 2 * half_k, columns)
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=packed.device)
    values = magnitudes[(codes & 7).long()]
    values = torch.where(codes >= 8, -values, values)
    return values * e8m0_to_float32(scale).repeat_interleave(MXFP4_GROUP, dim=1)
