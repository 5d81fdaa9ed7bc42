"""The two 8-bit formats with 4 exponent and 3 mantissa bits, and the exact step from one to the other.

float8_e4m3fn (OCP: bias 7, largest 448, NaN 0x7f and 0xff) is what files hold and what gfx950 and CUDA compute with;
float8_e4m3fnuz (bias 8, largest 240, one NaN 0x80, no negative zero) is what gfx942 computes with. The same byte means
half the value in fnuz, except 0x7f, 0x80 and 0xff.
"""

from __future__ import annotations

from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats.e4m3_table import AMAX_FLOOR, E4M3FN_MAX, decode_table
from weightprep.formats.table import CHUNK, look_up

__all__ = [
    "E4M3FN_MAX",
    "FNUZ_TARGETS",
    "decode_e4m3fn",
    "e4m3_dtype",
    "fn_to_fnuz",
    "has_nan",
    "quantization_multiplier",
    "quantize_e4m3fn",
    "refuse_nan",
]

# GPUs whose matrix units read e4m3fnuz
FNUZ_TARGETS = frozenset({"gfx942"})
_TABLE_CODES = 1 << 16


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
    m = amax.clamp(min=AMAX_FLOOR).reciprocal() * E4M3FN_MAX
    m = torch.where(is_zero, torch.ones_like(m), m)
    return m, m.reciprocal()


def quantize_e4m3fn(weight: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """clamp(weight * m, -448, 448) rounded to nearest even into float8_e4m3fn; float32 throughout.

    :param weight: bf16, fp16 or fp32, finite
    :param m: float32, broadcasts against `weight`
    """
    if weight.device.type != "cpu" or weight.numel() < _TABLE_CODES or weight.dim() == 0:
        return _round(weight, m)
    if m.dim() == 0 and weight.dtype in (torch.bfloat16, torch.float16):
        # round each of the values that 16 bits can be once: the same bytes, four times as fast
        table = _round(torch.arange(_TABLE_CODES, dtype=torch.int32).to(torch.int16).view(weight.dtype), m)
        return look_up(table.view(torch.uint8), weight.view(torch.int16)).view(torch.float8_e4m3fn)
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    rows = max(1, CHUNK // max(1, weight[0].numel()))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        out[part] = _round(weight[part], m if m.dim() == 0 else m.expand(weight.shape)[part])
    return out


def _round(weight: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    scaled = weight.to(torch.float32) * m
    return scaled.clamp_(min=-E4M3FN_MAX, max=E4M3FN_MAX).to(torch.float8_e4m3fn)


def decode_e4m3fn(weight: torch.Tensor) -> torch.Tensor:
    """The values of a float8_e4m3fn tensor without NaN codes as float32: what `.to(float32)` gives, faster on a CPU."""
    if weight.device.type != "cpu":
        return weight.to(torch.float32)
    return look_up(torch.from_numpy(decode_table()), weight.view(torch.uint8))


def has_nan(weight: torch.Tensor) -> bool:
    """Whether a float8_e4m3fn or float8_e4m3fnuz tensor holds a NaN code."""
    if weight.numel() == 0:
        return False
    # a reduction over memory in its own order is ten times as fast as one over a transposed view
    in_memory_order = weight.permute(sorted(range(weight.dim()), key=weight.stride, reverse=True))
    codes = in_memory_order.reshape(-1)
    if weight.dtype is torch.float8_e4m3fnuz:
        return int(codes.view(torch.int8).min()) == -0x80
    return int(codes.view(torch.uint8).max()) == 0xFF or int(codes.view(torch.int8).max()) == 0x7F


def refuse_nan(weight: torch.Tensor, name: str) -> None:
    """Make sure that every value of a float8_e4m3fn weight is a number.

    :param name: the tensor's, for the message
    :raises CheckpointError: a NaN code, 0x7f or 0xff, is present
    """
    if has_nan(weight):
        raise CheckpointError(
            name,
            found="a NaN code (0x7f or 0xff) in float8_e4m3fn",
            wanted="finite weights",
            remedy="the checkpoint is damaged: download this shard again",
        )


def fn_to_fnuz(weight: torch.Tensor, scale: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in float8_e4m3fnuz: bytes reinterpreted, -0 (0x80, NaN in fnuz) made 0, scale doubled.

    :param weight: float8_e4m3fn, any shape and strides
    :param scale: float32
    :raises CheckpointError: if a NaN code (0x7f, 0xff) is present: reinterpreted it would read +-240
    """
    refuse_nan(weight, name)
    codes = weight.view(torch.uint8)
    return codes.masked_fill(codes == 0x80, 0).view(torch.float8_e4m3fnuz), scale * 2.0
