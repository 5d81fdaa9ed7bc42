"""MXFP4: groups of 32 e2m1 elements under one e8m0 scale, and the rules by which a group's scale is chosen.

The rules differ in how the group's largest magnitude amax becomes a power of two. `even` is the rule of AMD Quark and
of aiter's dynamic_mxfp4_quant (they are the same), `floor` that of the OCP specification, `ceil` that of Quark's option
of this name, and `rceil` the smallest scale under which nothing saturates. The scale is rounded first and elements are
quantized with the rounded one.
"""

from __future__ import annotations

from typing import Literal

from weightprep.deferred import torch
from weightprep.formats.e2m1 import E2M1_MAX_EXPONENT, Ties, decode_e2m1, encode_e2m1, pack_nibbles
from weightprep.formats.e8m0 import E8M0_BIAS, decode_e8m0, encode_e8m0
from weightprep.formats.table import CHUNK

__all__ = ["MX_GROUP", "ScaleRule", "dequantize_mxfp4", "group_exponent", "quantize_mxfp4"]

MX_GROUP = 32
ScaleRule = Literal["even", "floor", "ceil", "rceil"]

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
# half of the last bit that e2m1's one mantissa bit keeps: amax >= 1.75 * 2^e goes to the next power of two
_EVEN_ROUNDING = 1 << (_MANTISSA_BITS - 1 - 1)
# mantissa of 6 = 1.5 * 2^2
_SIX_MANTISSA = 1 << (_MANTISSA_BITS - 1)


def group_exponent(amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """int32 exponent e of the scale 2^e of groups with largest magnitude `amax`, in -127 .. 127.

    A zero group gets -127, the smallest scale, as aiter and Quark give it.

    :param amax: float32, finite, not negative
    """
    bits = amax.view(torch.int32)
    if rule == "even":
        bits = bits + _EVEN_ROUNDING
    # exact also below 2^-126, where the exponent field is 0: such groups are clamped to -127 in every rule
    exponent = (bits >> _MANTISSA_BITS) - E8M0_BIAS - E2M1_MAX_EXPONENT
    mantissa = bits & _MANTISSA_MASK
    if rule == "ceil":
        exponent = exponent + (mantissa > 0)
    elif rule == "rceil":
        exponent = exponent + (mantissa > _SIX_MANTISSA)
    return exponent.clamp(-E8M0_BIAS, E8M0_BIAS)


def quantize_mxfp4(
    values: torch.Tensor, rule: ScaleRule = "even", ties: Ties = "even"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize along the last dimension, in groups of 32.

    :param values: bf16, fp16 or fp32 [..., K] with K a multiple of 32, finite
    :return: packed uint8 [..., K/2] and scales uint8 (e8m0) [..., K/32]
    """
    groups = values.reshape(-1, MX_GROUP)
    packed = torch.empty((groups.shape[0], MX_GROUP // 2), dtype=torch.uint8, device=values.device)
    scale = torch.empty(groups.shape[0], dtype=torch.uint8, device=values.device)
    # a few at a time on a CPU, in the core's cache; all at once elsewhere
    step = CHUNK // MX_GROUP if values.device.type == "cpu" else max(1, groups.shape[0])
    for start in range(0, groups.shape[0], step):
        part = slice(start, start + step)
        packed[part], scale[part] = _quantize_groups(groups[part].to(torch.float32), rule, ties)
    return packed.view(*values.shape[:-1], -1), scale.view(*values.shape[:-1], -1)


def _quantize_groups(groups: torch.Tensor, rule: ScaleRule, ties: Ties) -> tuple[torch.Tensor, torch.Tensor]:
    exponent = group_exponent(groups.abs().amax(dim=-1), rule)
    # multiplying by a power of two is exact
    scaled = groups * decode_e8m0(encode_e8m0(-exponent)).unsqueeze(-1)
    return pack_nibbles(encode_e2m1(scaled, ties)), encode_e8m0(exponent)


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., K] of packed uint8 [..., K/2] and e8m0 scales [..., K/32]."""
    groups = torch.unflatten(decode_e2m1(packed), -1, (-1, MX_GROUP))
    return (groups * decode_e8m0(scale).unsqueeze(-1)).flatten(-2)
