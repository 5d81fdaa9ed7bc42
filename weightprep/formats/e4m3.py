"""The two 8-bit formats with 4 exponent and 3 mantissa bits, and the exact step from one to the other.

float8_e4m3fn (OCP: bias 7, largest 448, NaN 0x7f and 0xff) is what files hold and what gfx950 and CUDA compute with;
float8_e4m3fnuz (bias 8, largest 240, one NaN 0x80, no negative zero) is what gfx942 computes with. The same byte means
half the value in fnuz, except 0x7f, 0x80 and 0xff.
"""

from __future__ import annotations

import torch

from weightprep.errors import CheckpointError

__all__ = [
    "E4M3FN_MAX",
    "FNUZ_TARGETS",
    "e4m3_dtype",
    "fn_to_fnuz",
    "has_nan",
    "quantization_multiplier",
    "quantize_e4m3fn",
]

E4M3FN_MAX = 448.0
# GPUs whose matrix units read e4m3fnuz
FNUZ_TARGETS = frozenset({"gfx942"})
# below this amax the scale would leave the normal float32 range; sglang's input_to_float8 has the same floor
_AMAX_FLOOR = 1e-12
_TABLE_CODES = 1 << 16
# elements that are worked on at a time, so that float32 intermediates stay in a core's cache
_CHUNK = 1 << 16


def e4m3_dtype(target: str) -> torch.dtype:
    """The e4m3 format that the matrix units of `target` read."""
    return torch.float8_e4m3fnuz if target in FNUZ_TARGETS else torch.float8_e4m3fn


def quantization_multiplier(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplier m and scale of the per-amax quantization q = clamp(w * m), w ~ q * scale.

    m = 448 * (1 / amax) and scale = 1 / m, each operation rounded to float32. The two roundings of m are those of
    `448 / amax` in torch, where a Python number divided by a tensor is reciprocal times number; a true division differs
    by one unit in the last place for about a quarter of all amax, and then bytes differ from sglang's input_to_float8.
    An amax of zero gives m = scale = 1.

    :param amax: float32, any shape, finite
    """
    is_zero = amax == 0
    m = amax.clamp(min=_AMAX_FLOOR).reciprocal() * E4M3FN_MAX
    m = torch.where(is_zero, torch.ones_like(m), m)
    return m, m.reciprocal()


def quantize_e4m3fn(weight: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """clamp(weight * m, -448, 448) rounded to nearest even into float8_e4m3fn; float32 throughout.

    :param weight: bf16, fp16 or fp32, finite
    :param m: float32, broadcasts against `weight`
    """
    if weight.device.type != "cpu" or weight.numel() < _TABLE_CODES or weight.dim() == 0:
        return _round(weight, m)
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    if m.dim() == 0 and weight.dtype in (torch.bfloat16, torch.float16):
        _look_up(weight.reshape(-1), m, out.view(-1))
        return out
    rows = max(1, _CHUNK // max(1, weight[0].numel()))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        out[part] = _round(weight[part], m if m.dim() == 0 else m.expand(weight.shape)[part])
    return out


def _round(weight: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    scaled = weight.to(torch.float32) * m
    return scaled.clamp_(min=-E4M3FN_MAX, max=E4M3FN_MAX).to(torch.float8_e4m3fn)


def _look_up(weight: torch.Tensor, m: torch.Tensor, out: torch.Tensor) -> None:
    """Round each of the 65,536 values that 16 bits can be once, then index: the same bytes, three times as fast."""
    codes = torch.arange(-(_TABLE_CODES // 2), _TABLE_CODES // 2, dtype=torch.int32).to(torch.int16)
    table = _round(codes.view(weight.dtype), m).view(torch.uint8)
    patterns, results = weight.view(torch.int16), out.view(torch.uint8)
    for start in range(0, weight.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        torch.index_select(table, 0, patterns[part].to(torch.int32) + _TABLE_CODES // 2, out=results[part])


def decode_e4m3fn(weight: torch.Tensor) -> torch.Tensor:
    """The values of a float8_e4m3fn tensor without NaN codes as float32: what `.to(float32)` gives, faster on a CPU.

    Sign, exponent and mantissa are moved to where float16 has them, subnormals included; the biases differ by 8.
    """
    bits = (weight.view(torch.int8).to(torch.int16) << 7) & -0x4001
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def has_nan(weight: torch.Tensor) -> bool:
    """Whether a float8_e4m3fn or float8_e4m3fnuz tensor holds a NaN code."""
    codes = weight.view(torch.uint8)
    if weight.dtype is torch.float8_e4m3fnuz:
        return bool((codes == 0x80).any())
    return bool(((codes & 0x7F) == 0x7F).any())


def fn_to_fnuz(weight: torch.Tensor, scale: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in float8_e4m3fnuz: bytes reinterpreted, -0 (0x80, NaN in fnuz) made 0, scale doubled.

    :param weight: float8_e4m3fn, any shape and strides
    :param scale: float32
    :raises CheckpointError: if a NaN code (0x7f, 0xff) is present: reinterpreted it would read +-240
    """
    if has_nan(weight):
        raise CheckpointError(
            name,
            found="a NaN code (0x7f or 0xff) in float8_e4m3fn",
            wanted="finite weights",
            remedy="the checkpoint is damaged: download this shard again",
        )
    codes = weight.view(torch.uint8)
    return codes.masked_fill(codes == 0x80, 0).view(torch.float8_e4m3fnuz), scale * 2.0
