"""The 4-bit element of MXFP4: one sign, two exponent and one mantissa bit; no infinity, no NaN.

Codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6 and 8..15 their negatives (8 is -0). Two codes share a byte, the lower nibble
holding the even column.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np

from weightprep.deferred import torch
from weightprep.formats.table import look_up

__all__ = ["E2M1_MAX", "E2M1_MAX_EXPONENT", "E2M1_VALUES", "Ties", "decode_e2m1", "encode_e2m1", "pack_nibbles"]

Ties = Literal["even", "away"]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
# exponent of the largest power of two
E2M1_MAX_EXPONENT = 2


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """float32 values [..., 2n] of packed codes [..., n] (uint8, int8 or float4_e2m1fn_x2)."""
    codes = packed.view(torch.uint8)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    decoded = look_up(pairs, codes) if packed.device.type == "cpu" else pairs[codes.to(torch.int32)]
    return decoded.flatten(-2)


def encode_e2m1(values: torch.Tensor, ties: Ties = "even") -> torch.Tensor:
    """uint8 codes (not packed) of float32 values, rounded to nearest and saturated at +-6.

    :param values: float32, finite, any shape
    :param ties: to the even code (OCP MX, Quark), or away from zero (aiter's kernels)
    """
    if values.device.type != "cpu":
        return _round(values, ties)
    # No tie and no code has more than two mantissa bits: 16 bits of a float32, the last one set where any bit behind
    # it is, tell on which side of all of them it lies.
    halves = values.contiguous().reshape(-1).numpy().view(np.uint16)
    odd = halves[1::2] | (halves[::2] != 0)
    return look_up(_table(ties), torch.from_numpy(odd.view(np.int16))).view(values.shape)


@cache
def _table(ties: Ties) -> torch.Tensor:
    """The code of every float32 whose last 16 bits are 0, by its first 16."""
    return _round((torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32), ties)


def _round(values: torch.Tensor, ties: Ties) -> torch.Tensor:
    rounded = torch.round if ties == "even" else _round_away
    magnitude = values.abs()
    # Codes are 2x up to 2, x + 2 up to 4 and x/2 + 4 above: the least of the three everywhere. Rounding before the
    # even number is added keeps ties what they are, and no sum is rounded twice.
    codes = torch.minimum(rounded(magnitude * 2), rounded(magnitude) + 2)
    codes = torch.minimum(codes, rounded(magnitude * 0.5) + 4).clamp_(max=7).to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def _round_away(magnitude: torch.Tensor) -> torch.Tensor:
    floor = magnitude.floor()
    # the difference is exact, while adding 0.5 and flooring would round values just below a tie up
    return floor + (magnitude - floor >= 0.5)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte along the last dimension [..., 2n] -> [..., n], the even column in the lower nibble."""
    pairs = codes.contiguous().view(torch.int16)
    return ((pairs >> 4) | pairs).to(torch.uint8)
