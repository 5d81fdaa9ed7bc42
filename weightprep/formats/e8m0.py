"""The scale format of the OCP microscaling types: eight exponent bits, nothing else.

A byte b is 2^(b - 127); b = 0 is 2^-127, not zero; b = 255 is NaN. Shifting the byte into a float32 exponent gets both
ends wrong (0 becomes 0.0, 255 becomes infinity), and comparing the decoded value instead of the byte makes NaN of 2^1.
"""

from __future__ import annotations

from weightprep.deferred import torch

__all__ = ["E8M0_BIAS", "E8M0_NAN", "decode_e8m0", "encode_e8m0"]

E8M0_BIAS = 127
E8M0_NAN = 255


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e8m0 codes, exact for all 256 of them.

    :param codes: uint8 or float8_e8m0fnu, any shape
    """
    bits = codes.view(torch.uint8).to(torch.int32)
    # 2^-127 is subnormal in float32: its bit pattern is 1 << 22
    values = torch.where(bits == 0, 1 << 22, bits << 23)
    values = torch.where(bits == E8M0_NAN, 0x7FC00000, values)
    return values.view(torch.float32)


def encode_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """uint8 codes of 2^exponent, clamped to the range 2^-127 .. 2^127.

    :param exponent: an integer tensor, any shape
    """
    return (exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)
