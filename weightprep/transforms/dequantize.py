"""Step `dequantize`: from any stored encoding to numbers.

A quantized weight becomes float32, never bf16, so that what is quantized next is rounded once. The whole tensor is
expanded before any split: with 448 rows per head (GLM) a 128-row scale block straddles heads and the boundary between k
and v.
"""

from __future__ import annotations

from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.formats.e2m1 import decode_e2m1
from weightprep.formats.e4m3 import decode_e4m3fn, refuse_nan
from weightprep.formats.e8m0 import decode_e8m0
from weightprep.formats.mx import MX_GROUP
from weightprep.transforms.bundle import ANY_ENCODING, FLOATS, FP8, Bundle, Form, StepContext
from weightprep.transforms.step import transform

__all__ = ["dequantize", "source_scale"]


def _ensures(given: Form) -> Form:
    kept = given.encodings & FLOATS
    return Form(False, kept if kept == given.encodings else kept | {Encoding.FP32})


@transform(requires=Form(False, ANY_ENCODING), ensures=_ensures)
def dequantize(bundle: Bundle, context: StepContext) -> Bundle:
    """Expand a quantized weight [N, K] to float32; bf16, fp16 and fp32 pass as they are.

    :raises CheckpointError: a NaN in the weight, or a scale that is NaN, infinite, negative or of the wrong shape
    """
    encoded = bundle.encoded
    if encoded.encoding in FLOATS:
        return bundle
    weight, scale = bundle["weight"], source_scale(bundle, context.name)
    if encoded.encoding in FP8:
        refuse_nan(weight, context.name)
    if encoded.encoding is Encoding.MXFP4:
        values = torch.unflatten(decode_e2m1(weight), 1, (-1, MX_GROUP)).mul_(scale.unsqueeze(-1)).flatten(1)
    elif encoded.block is not None:
        values = _scale_blocks(_numbers(weight), scale, encoded, encoded.block)
    else:
        values = _numbers(weight).mul_(scale.reshape(-1, 1))
    return Bundle({"weight": values}, EncodedShape(Encoding.FP32, encoded.rows, encoded.cols))


def _numbers(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float32) if weight.dtype is torch.int8 else decode_e4m3fn(weight)


def source_scale(bundle: Bundle, name: str) -> torch.Tensor:
    """The scale of a quantized source as float32, in the shape that `bundle.encoded` says.

    :raises CheckpointError: NaN, infinite or negative values, or the wrong number of rows and columns
    """
    stored = bundle["scale"]
    is_e8m0 = stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
    scale = decode_e8m0(stored) if is_e8m0 else stored.to(torch.float32)
    wanted = bundle.encoded.scale_shape
    if wanted is None or tuple(scale.squeeze(-1).shape if scale.dim() > len(wanted) else scale.shape) != wanted:
        raise CheckpointError(
            name,
            found=f"scale {list(scale.shape)} for {bundle.encoded.rows} rows from row {bundle.encoded.row_offset}",
            wanted="no scale" if wanted is None else f"shape {list(wanted)}",
            remedy="give the scale rows that belong to these weight rows",
        )
    faulty = ~(torch.isfinite(scale) & (scale >= 0))
    if bool(faulty.any()):
        index = faulty.nonzero()[0].tolist()
        value = "255 (NaN in e8m0)" if is_e8m0 else f"{float(scale[tuple(index)])}"
        raise CheckpointError(
            name,
            found=f"scale {value} at index {index}",
            wanted="finite scales that are not negative",
            remedy="the checkpoint is damaged: download this shard again",
        )
    return scale.reshape(wanted)


def _scale_blocks(
    values: torch.Tensor, scale: torch.Tensor, encoded: EncodedShape, block: tuple[int, int]
) -> torch.Tensor:
    phase = encoded.row_offset % block[0]
    row_scales = scale.repeat_interleave(block[0], dim=0)[phase : phase + encoded.rows]
    if encoded.cols % block[1] == 0:
        return torch.unflatten(values, 1, (-1, block[1])).mul_(row_scales.unsqueeze(-1)).flatten(1)
    return values.mul_(row_scales.repeat_interleave(block[1], dim=1)[:, : encoded.cols])
