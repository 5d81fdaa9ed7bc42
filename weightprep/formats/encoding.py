"""How one tensor of a checkpoint is stored, decided from its name, dtypes and shapes.

The global `quantization_config` of a checkpoint does not say how a given tensor is stored: bf16 projections stand
inside fp8 checkpoints, fp8 ones inside MXFP4 checkpoints, and scales go by several names. So the decision is taken per
tensor, here and nowhere else, and a tensor that fits no known encoding is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from weightprep.deferred import torch
from weightprep.errors import CheckpointError

__all__ = [
    "FOREIGN_SUFFIXES",
    "SCALE_SUFFIXES",
    "WEIGHT_SUFFIXES",
    "EncodedShape",
    "Encoding",
    "RowSlice",
    "classify",
]

# What follows the module's name. A module has at most one weight and at most one scale.
WEIGHT_SUFFIXES = (".weight", ".weight_packed")
SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale_inv", "_scale_inv", ".scale")
# Weights of schemes that are recognised only to be refused by name.
FOREIGN_SUFFIXES = {".qweight": "AWQ or GPTQ (packed int32 with zero points)"}

# Tried in this order where the checkpoint's own block size is not known or does not fit this tensor.
_BLOCKS = ((128, 128), (32, 32), (1, 128), (1, 32))
_MX_GROUP = 32

# By name: a header is classified without torch, and not every torch has every dtype.
_FLOAT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_E8M0 = ("uint8", "float8_e8m0fnu")
_SCALES = ("float32", "bfloat16", "float16", *_E8M0)
_FP8 = "float8_e4m3fn"
_PACKED = ("uint8", "int8", "float4_e2m1fn_x2")


class Encoding(str, Enum):
    """The storage schemes that `dequantize` reads."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_BLOCK = "fp8_block"
    FP8_CHANNEL = "fp8_channel"
    FP8_TENSOR = "fp8_tensor"
    MXFP4 = "mxfp4"
    INT8_CHANNEL = "int8_channel"
    INT8_BLOCK = "int8_block"


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows of a stored tensor: how the slice is encoded, and which rows of the scale belong to it (none: all of the
    scale).
    """

    encoded: EncodedShape
    scale_rows: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class EncodedShape:
    """Encoding and logical shape [rows, cols] of a weight, independent of how many elements a byte holds.

    :param block: rows and columns that share one scale, for the block encodings; edge blocks may be partial
    :param row_offset: first row of this tensor inside the tensor that was quantized. Only its remainder modulo the
        block's rows matters: a tensor parallel rank may start in the middle of a block (448 rows per head are 3.5
        blocks of 128). The scale then starts with the block that holds the first row.
    """

    encoding: Encoding
    rows: int
    cols: int
    block: tuple[int, int] | None = None
    row_offset: int = 0

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape that the scale must have; channel and tensor scales may carry one further dimension of 1. None without
        a scale.
        """
        if self.block is not None:
            phase = self.row_offset % self.block[0]
            return (_ceil_div(phase + self.rows, self.block[0]), _ceil_div(self.cols, self.block[1]))
        if self.encoding is Encoding.MXFP4:
            return (self.rows, self.cols // _MX_GROUP)
        if self.encoding in (Encoding.FP8_CHANNEL, Encoding.INT8_CHANNEL):
            return (self.rows,)
        return () if self.encoding is Encoding.FP8_TENSOR else None

    def slice_rows(self, start: int, stop: int) -> RowSlice:
        """Encoding of rows [start, stop) of this tensor, with the scale rows to take along."""
        if not 0 <= start <= stop <= self.rows:
            raise CheckpointError(
                f"rows {start}:{stop}",
                found=f"a tensor of {self.rows} rows",
                wanted="a slice inside the tensor",
                remedy="check the tensor parallel size against the number of heads",
            )
        offset = self.row_offset + start
        encoded = EncodedShape(self.encoding, stop - start, self.cols, self.block, offset)
        if self.block is not None:
            first = offset // self.block[0] - self.row_offset // self.block[0]
            shape = encoded.scale_shape
            return RowSlice(encoded, (first, first + (shape[0] if shape else 0)))
        if self.encoding in (Encoding.MXFP4, Encoding.FP8_CHANNEL, Encoding.INT8_CHANNEL):
            return RowSlice(encoded, (start, stop))
        return RowSlice(encoded, None)


def classify(
    name: str,
    weight_dtype: torch.dtype | str,
    weight_shape: tuple[int, ...],
    scale_dtype: torch.dtype | str | None,
    scale_shape: tuple[int, ...] | None,
    block_hint: tuple[int, int] | None = None,
) -> EncodedShape:
    """Tell how the weight `name` is stored.

    :param weight_dtype: a torch dtype, or its name without "torch."
    :param weight_shape: shape of the stored tensor in elements of `weight_dtype`, so [N, K/2] for packed fp4
    :param scale_shape: shape of the scale that stands beside it, None without one
    :param block_hint: `weight_block_size` of the checkpoint's config, where it has one; used if it fits this tensor
    :raises CheckpointError: naming the tensor and its dtypes, if no known encoding fits
    """
    weight_dtype = _dtype_name(weight_dtype)
    scale_dtype = None if scale_dtype is None else _dtype_name(scale_dtype)
    for suffix, scheme in FOREIGN_SUFFIXES.items():
        if name.endswith(suffix):
            raise _refuse(
                name, scheme, "a weight that can be dequantized exactly", "start from the unquantized checkpoint"
            )
    if name.endswith(".weight_packed") and weight_dtype == "int32":
        scheme = "pack-quantized (compressed-tensors, int4 or int8 packed into int32)"
        raise _refuse(name, scheme, "a weight that can be dequantized exactly", "start from the unquantized checkpoint")
    found = _describe(weight_dtype, weight_shape, scale_dtype, scale_shape)
    if len(weight_shape) != 2 or 0 in weight_shape:
        raise _refuse(name, found, "a non-empty matrix [N, K]", "check the recipe's source pattern")
    rows, cols = weight_shape
    if weight_dtype in _FLOAT:
        if scale_dtype is not None:
            remedy = "remove the scale, or give the quantized weight that it belongs to"
            raise _refuse(name, found, "no scale beside an unquantized weight", remedy)
        return EncodedShape(Encoding(_FLOAT[weight_dtype]), rows, cols)
    if weight_dtype not in (_FP8, *_PACKED):
        raise _refuse(
            name, found, "bf16, fp16, fp32, float8_e4m3fn, int8 or packed fp4", "convert from another checkpoint"
        )
    if scale_dtype is None or scale_shape is None:
        wanted = f"a scale named {', '.join('<module>' + suffix for suffix in SCALE_SUFFIXES)}"
        raise _refuse(name, found, wanted, "the bytes mean nothing without a scale: look for it in the other shards")
    if weight_dtype == "uint8" and scale_dtype == _FP8:
        raise _refuse(name, f"NVFP4: {found}", "MXFP4 (e8m0 scales)", "start from the unquantized checkpoint")
    if scale_dtype not in _SCALES:
        raise _refuse(name, found, "a float or e8m0 scale", "convert from another checkpoint")

    is_packed = scale_dtype in _E8M0 and scale_shape == (rows, 2 * cols // _MX_GROUP) and 2 * cols % _MX_GROUP == 0
    if weight_dtype in _PACKED and (is_packed or weight_dtype != "int8"):
        if not is_packed:
            wanted = f"a uint8 or float8_e8m0fnu scale of shape [{rows}, {2 * cols // _MX_GROUP}]"
            raise _refuse(name, found, wanted, "packed fp4 has one e8m0 scale for each 32 columns")
        return EncodedShape(Encoding.MXFP4, rows, 2 * cols)

    is_fp8 = weight_dtype == _FP8
    if scale_shape in ((), (1,)) and is_fp8:
        return EncodedShape(Encoding.FP8_TENSOR, rows, cols)
    if scale_shape in ((rows,), (rows, 1)):
        return EncodedShape(Encoding.FP8_CHANNEL if is_fp8 else Encoding.INT8_CHANNEL, rows, cols)
    for block in (block_hint, *_BLOCKS):
        if block is not None and scale_shape == (_ceil_div(rows, block[0]), _ceil_div(cols, block[1])):
            return EncodedShape(Encoding.FP8_BLOCK if is_fp8 else Encoding.INT8_BLOCK, rows, cols, block)
    block = block_hint or _BLOCKS[0]
    wanted = (
        f"a scale of shape [], [1], [{rows}], [{rows}, 1], or "
        f"[{_ceil_div(rows, block[0])}, {_ceil_div(cols, block[1])}] for blocks of {block[0]}x{block[1]}"
    )
    raise _refuse(name, found, wanted, "the scale is transposed, truncated, or belongs to another tensor")


def _dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _describe(
    weight_dtype: str,
    weight_shape: tuple[int, ...],
    scale_dtype: str | None,
    scale_shape: tuple[int, ...] | None,
) -> str:
    weight = f"{weight_dtype} {list(weight_shape)}"
    if scale_dtype is None or scale_shape is None:
        return f"{weight} without a scale"
    return f"{weight} with a scale {scale_dtype} {list(scale_shape)}"


def _refuse(name: str, found: str, wanted: str, remedy: str) -> CheckpointError:
    return CheckpointError(name, found=found, wanted=wanted, remedy=remedy)
