"""bf16 to float8_e4m3fn by table and without torch: what a converter does to most checkpoints, in a process that is at
work before torch would have been imported.

The bits are those of :func:`weightprep.formats.e4m3.quantize_e4m3fn` under one multiplier.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AMAX_FLOOR",
    "E4M3FN_MAX",
    "bf16_values",
    "decode_table",
    "encode_table",
    "look_up_and_count",
    "multiplier",
]

E4M3FN_MAX = 448.0
# Below this amax the scale would leave the normal float32 range; sglang's input_to_float8 has the same floor.
AMAX_FLOOR = 1e-12
_CODES = 1 << 16


def bf16_values() -> NDArray[np.float32]:
    """The value of every bf16 code, float32 [65536]."""
    return (np.arange(_CODES, dtype=np.uint32) << np.uint32(16)).view(np.float32)


def multiplier(amax: np.float32) -> tuple[np.float32, np.float32]:
    """m and scale of `quantization_multiplier`: m = 448 * (1 / amax), scale = 1 / m, each rounded to float32."""
    one = np.float32(1)
    if amax == 0:
        return one, one
    m = one / np.maximum(amax, np.float32(AMAX_FLOOR)) * np.float32(E4M3FN_MAX)
    return m, one / m


def encode_table(m: np.float32) -> NDArray[np.uint8]:
    """clamp(w * m, -448, 448) rounded to nearest even into e4m3fn, for the w of every bf16 code: uint8 [65536].

    Entries of NaN codes mean nothing.
    """
    # Codes far above the amax that m belongs to overflow to infinity, which saturates.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = bf16_values() * m
    magnitude = np.minimum(np.abs(scaled), np.float32(E4M3FN_MAX))
    bits = magnitude.view(np.uint32)
    # Three of 23 mantissa bits stay; a carry moves into the exponent as it should. The biases differ by 120.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Codes below 2^-6 count units of 2^-9, the last place of a float32 from 2^14 on: the addition rounds to them.
    unit = np.float32(2**14)
    subnormal = (magnitude + unit).view(np.uint32) - unit.view(np.uint32)
    codes = np.where(magnitude < np.float32(2**-6), subnormal, normal)
    codes |= (scaled.view(np.uint32) >> 24) & 0x80
    return codes.astype(np.uint8)


def decode_table() -> NDArray[np.float32]:
    """The value of every e4m3fn code, float32 [256]; the NaN codes 0x7f and 0xff come out as 480."""
    codes = np.arange(256, dtype=np.uint16)
    # Sign, exponent and mantissa are moved to where float16 has them, subnormals included; the biases differ by 8.
    moved = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return moved.view(np.float16).astype(np.float32) * np.float32(256)


def look_up_and_count(
    table: NDArray[np.uint8], codes: NDArray[np.uint16]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """table[codes] of a flat array, and how often each 16-bit code stands in it: int64 [65536]."""
    # What numpy does with any other integers first, done once for both.
    index = codes.astype(np.intp)
    found = np.empty(codes.size, dtype=np.uint8)
    # No index is out of range; without a mode numpy would check, into a copy of the output.
    np.take(table, index, out=found, mode="clip")
    return found, np.bincount(index, minlength=_CODES)
