"""Quantizes the random weights that `synth` invents into every storage scheme that published checkpoints use.

Each scheme is two functions of the logical shape, so that a shard's header can be written before any weight exists:
which tensors a weight becomes, and their values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightprep.formats.encoding import Encoding

__all__ = ["BLOCK", "Scheme", "Stored", "encode", "stored_as"]

BLOCK = 128
_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one kind of tensor is stored.

    :param encoding: None for int4 packed into int32, which weightprep knows only by name
    :param scale_suffix: what replaces `.weight` in the name of the scale
    :param scale_dtype: safetensors dtype of the scale
    :param packed_dtype: safetensors dtype of packed fp4
    :param power_of_two: whether scales are rounded up to powers of two before quantizing
    """

    encoding: Encoding | None
    scale_suffix: str = ".weight_scale"
    scale_dtype: str = "F32"
    packed_dtype: str = "U8"
    power_of_two: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it stands in the file.

    :param suffix: what replaces `.weight` in its name; empty for the weight itself
    :param shape: in elements of `dtype`
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]


_PLAIN = {
    Encoding.BF16: ("BF16", torch.bfloat16),
    Encoding.FP16: ("F16", torch.float16),
    Encoding.FP32: ("F32", torch.float32),
}
_INT8 = (Encoding.INT8_CHANNEL, Encoding.INT8_BLOCK)
_BLOCKED = (Encoding.FP8_BLOCK, Encoding.INT8_BLOCK)


def stored_as(scheme: Scheme, shape: tuple[int, ...]) -> tuple[Stored, ...]:
    """What a tensor becomes in this scheme, the weight first; all but plain schemes take a matrix [N, K]."""
    if scheme.encoding in _PLAIN:
        return (Stored("", _PLAIN[scheme.encoding][0], shape),)
    rows, columns = shape
    if scheme.encoding is None:
        return (
            Stored(".weight_packed", "I32", (rows, columns // 8)),
            Stored(".weight_scale", "BF16", (rows, columns // 32)),
            Stored(".weight_shape", "I32", (2,)),
        )
    if scheme.encoding is Encoding.MXFP4:
        return (
            Stored("", scheme.packed_dtype, (rows, columns // 2)),
            Stored(scheme.scale_suffix, scheme.scale_dtype, (rows, columns // 32)),
        )
    return (
        Stored("", "I8" if scheme.encoding in _INT8 else "F8_E4M3", shape),
        Stored(scheme.scale_suffix, scheme.scale_dtype, _scale_shape(scheme.encoding, rows, columns)),
    )


def _scale_shape(encoding: Encoding, rows: int, columns: int) -> tuple[int, ...]:
    if encoding in _BLOCKED:
        return (-(-rows // BLOCK), -(-columns // BLOCK))
    # Quark writes a scale for each row as [N], the int8 exporters as [N, 1]
    return {Encoding.FP8_TENSOR: (), Encoding.FP8_CHANNEL: (rows,)}.get(encoding, (rows, 1))


def encode(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, ...]:
    """Quantize a float32 tensor; the results are those that :func:`stored_as` announces, in its order.

    Scales are amax / (largest value of the format), over a 128x128 block with partial edges, a row, or the tensor.
    """
    if scheme.encoding in _PLAIN:
        return (weight.to(_PLAIN[scheme.encoding][1]),)
    if scheme.encoding is None:
        return _encode_int4(weight)
    if scheme.encoding is Encoding.MXFP4:
        return _encode_mxfp4(weight, scheme)
    is_int = scheme.encoding in _INT8
    largest = 127.0 if is_int else _E4M3_MAX
    if scheme.encoding in _BLOCKED:
        amax = _block_amax(weight)
    elif scheme.encoding is Encoding.FP8_TENSOR:
        amax = weight.abs().amax()
    else:
        amax = weight.abs().amax(dim=1, keepdim=True)
    scale = (amax / largest).clamp_min(2.0**-100)
    if scheme.power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    spread = _spread(scale, weight.shape) if scheme.encoding in _BLOCKED else scale
    scaled = (weight / spread).clamp(-largest, largest)
    quantized = torch.round(scaled).to(torch.int8) if is_int else scaled.to(torch.float8_e4m3fn)
    scale = scale.reshape(_scale_shape(scheme.encoding, *weight.shape))
    return quantized, scale.to(torch.float8_e8m0fnu) if scheme.scale_dtype == "F8_E8M0" else scale


def _block_amax(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    height, width = padded.shape
    return padded.reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK).amax(dim=(1, 3))


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


# Midpoints between the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 of e2m1.
_E2M1_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def _encode_mxfp4(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.reshape(weight.shape[0], -1, 32)
    exponent = (torch.floor(torch.log2(groups.abs().amax(dim=2).clamp_min(2.0**-120))) - 2).clamp(-127, 127)
    scaled = groups / torch.exp2(exponent).unsqueeze(2)
    magnitude = scaled.abs().contiguous()
    # A tie goes to the even code: down from an even code below, up from an odd one.
    code = torch.bucketize(magnitude, _E2M1_MIDPOINTS)
    tie_up = torch.bucketize(magnitude, _E2M1_MIDPOINTS, right=True)
    code = torch.where((code % 2 == 1) & (tie_up > code), tie_up, code)
    code = (code | ((scaled < 0).to(code.dtype) << 3)).to(torch.uint8).flatten(1)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    biased = (exponent + 127).to(torch.uint8)
    return packed, biased.view(torch.float8_e8m0fnu) if scheme.scale_dtype == "F8_E8M0" else biased


def _encode_int4(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, 32)
    scale = (groups.abs().amax(dim=2) / 7).clamp_min(2.0**-100)
    codes = (torch.round(groups / scale.unsqueeze(2)).clamp(-8, 7) + 8).to(torch.int64).reshape(rows, -1, 8)
    packed = (codes << torch.arange(0, 32, 4)).sum(dim=2)
    as_int32 = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return as_int32, scale.to(torch.bfloat16), torch.tensor([rows, columns], dtype=torch.int32)
