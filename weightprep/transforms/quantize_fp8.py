"""Step `quantize_fp8`: to float8_e4m3fn with float32 scales.

Per tensor is what the absorbed MLA kernels read; the amax is that of the whole weight, so that tensor parallel ranks
agree on one scale and the bytes do not depend on the number of ranks. A source that already is fp8 with one scale, or
with one value in every entry of a block or channel scale, is that result: it keeps its bytes and its scale.
"""

from __future__ import annotations

from typing import Literal

from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.formats.e4m3 import quantization_multiplier, quantize_e4m3fn
from weightprep.transforms.bundle import FLOATS, FP8, Bundle, Form, StepContext
from weightprep.transforms.dequantize import dequantize, source_scale
from weightprep.transforms.step import transform

__all__ = ["largest_magnitude", "not_finite", "quantize_fp8"]

Granularity = Literal["tensor", "channel", "block"]
_RESULT = {"tensor": Encoding.FP8_TENSOR, "channel": Encoding.FP8_CHANNEL, "block": Encoding.FP8_BLOCK}
_BLOCK = (128, 128)


def _ensures(given: Form, *, format: str, granularity: Granularity) -> Form:
    return Form(False, frozenset({_RESULT[granularity]}))


def _already(bundle: Bundle, context: StepContext, *, format: str, granularity: Granularity) -> Bundle | None:
    encoded = bundle.encoded
    if bundle.absorbed:
        return None
    if encoded.encoding not in FP8 or granularity != "tensor":
        return bundle if encoded.encoding is _RESULT[granularity] else None
    if encoded.encoding is Encoding.FP8_TENSOR:
        if bundle["scale"].dtype is torch.float32:
            return bundle
        # a number from here on: the code of an e8m0 scale would be taken for one
        return Bundle({"weight": bundle["weight"], "scale": source_scale(bundle, context.name)}, encoded)
    # The range over all ranks, where they agreed on one: a rank whose own rows share a scale may not be the only one.
    smallest, largest = torch.aminmax(source_scale(bundle, context.name))
    if context.amax is not None:
        largest, smallest = context.amax[1], -context.amax[2]
    if not bool(smallest == largest) or not bool(largest > 0):
        return None
    shape = EncodedShape(Encoding.FP8_TENSOR, encoded.rows, encoded.cols)
    return Bundle({"weight": bundle["weight"], "scale": largest.clone()}, shape)


def _measure(bundle: Bundle, context: StepContext, *, format: str, granularity: Granularity) -> torch.Tensor | None:
    if granularity != "tensor" or bundle.absorbed or bundle.encoded.encoding is Encoding.FP8_TENSOR:
        return None
    nothing = bundle["weight"].new_zeros((), dtype=torch.float32)
    if bundle.encoded.encoding in FLOATS:
        return torch.stack([largest_magnitude(bundle["weight"]), nothing, nothing])
    try:
        smallest, largest = (
            torch.aminmax(source_scale(bundle, context.name)) if "scale" in bundle else (nothing, nothing)
        )
        return torch.stack([largest_magnitude(dequantize(bundle, context)["weight"]), largest, -smallest])
    except CheckpointError:
        # Raising here would leave the other ranks waiting in the reduction; run_steps raises on every rank.
        return torch.stack([nothing + float("inf")] * 3)


@transform(requires=Form(False, FLOATS), ensures=_ensures, already=_already, measure=_measure)
def quantize_fp8(
    bundle: Bundle,
    context: StepContext,
    *,
    format: Literal["e4m3fn"] = "e4m3fn",
    granularity: Granularity = "tensor",
) -> Bundle:
    """Quantize a weight [N, K] to float8_e4m3fn with float32 scales.

    The scale has shape [] per tensor, [N, 1] per channel and [ceil(N/128), ceil(K/128)] per block.
    m = 448 * (1 / amax), q = clamp(w * m), scale = 1 / m in float32 (sglang's input_to_float8); an amax of 0 gives
    scale 1.

    :raises CheckpointError: a NaN or an infinity in the weight
    """
    weight, encoded = bundle["weight"], bundle.encoded
    if granularity == "tensor":
        amax = context.amax[0] if context.amax is not None else largest_magnitude(weight)
    elif granularity == "channel":
        amax = weight.abs().amax(dim=1, keepdim=True).to(torch.float32)
    else:
        amax = _block_amax(weight)
    if not bool(torch.isfinite(amax).all()):
        raise not_finite(context.name)
    m, scale = quantization_multiplier(amax)
    block = _BLOCK if granularity == "block" else None
    if block is not None:
        m = m.repeat_interleave(block[0], 0)[: encoded.rows].repeat_interleave(block[1], 1)[:, : encoded.cols]
    shape = EncodedShape(_RESULT[granularity], encoded.rows, encoded.cols, block)
    return Bundle({"weight": quantize_e4m3fn(weight, m), "scale": scale}, shape)


def not_finite(name: str) -> CheckpointError:
    """The refusal of a weight that no scale can be found for."""
    return CheckpointError(
        name,
        found="a NaN or an infinity in the weight",
        wanted="finite weights",
        remedy="the checkpoint is damaged, or was saved from a diverged run: download it again or use another",
    )


def largest_magnitude(weight: torch.Tensor) -> torch.Tensor:
    """The amax of a weight, 0-dim float32; infinity where it holds a NaN."""
    smallest, largest = torch.aminmax(weight)
    amax = torch.maximum(smallest.abs(), largest.abs()).to(torch.float32)
    # a reduction by MAX may drop a NaN but keeps an infinity
    return torch.where(torch.isnan(amax), torch.full_like(amax, float("inf")), amax)


def _block_amax(weight: torch.Tensor) -> torch.Tensor:
    rows, cols = weight.shape
    padding = (0, -cols % _BLOCK[1], 0, -rows % _BLOCK[0])
    padded = torch.nn.functional.pad(weight.abs().to(torch.float32), padding)
    blocks = torch.unflatten(torch.unflatten(padded, 1, (-1, _BLOCK[1])), 0, (-1, _BLOCK[0]))
    return blocks.amax(dim=(1, 3))
