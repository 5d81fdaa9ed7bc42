"""Step `quantize_w_vc`: fp8 for the V matmul alone, while w_kc stays in bf16.

One kv_b_proj cannot be stored in two precisions, so this step belongs to loading. Ranks agree on the largest magnitude
of all rows of the value, which are not the rows of the whole weight.
"""

from __future__ import annotations

from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.formats.e4m3 import quantization_multiplier, quantize_e4m3fn
from weightprep.transforms.bundle import FLOATS, Bundle, Form, StepContext
from weightprep.transforms.dequantize import dequantize
from weightprep.transforms.quantize_fp8 import largest_magnitude, not_finite
from weightprep.transforms.step import transform

__all__ = ["quantize_w_vc"]


def _measure(bundle: Bundle, context: StepContext) -> torch.Tensor:
    nope, v = context.dims["nope"], context.dims["v"]
    try:
        weight = dequantize(bundle, context)["weight"]
    except CheckpointError:
        # Raising here would leave the other ranks waiting in the reduction; run_steps raises on every rank.
        return torch.full((1,), float("inf"), device=bundle["weight"].device)
    return largest_magnitude(torch.unflatten(weight, 0, (-1, nope + v))[:, nope:]).reshape(1)


@transform(
    requires=Form(True, FLOATS), ensures=Form(True, frozenset({Encoding.BF16})), dims=("nope", "v"), measure=_measure
)
def quantize_w_vc(bundle: Bundle, context: StepContext) -> Bundle:
    """Quantize w_vc to float8_e4m3fn under one scale, w_scale, and round w_kc to bf16.

    The arithmetic is that of `quantize_fp8`; amax is that of w_vc over all ranks.

    :raises CheckpointError: a NaN or an infinity in w_vc, or in w_kc after rounding
    """
    w_kc, w_vc = bundle["w_kc"].to(torch.bfloat16), bundle["w_vc"]
    amax = context.amax[0] if context.amax is not None else largest_magnitude(w_vc)
    if not bool(torch.isfinite(amax)) or not bool(torch.isfinite(w_kc).all()):
        raise not_finite(context.name)
    m, scale = quantization_multiplier(amax)
    encoded = EncodedShape(Encoding.BF16, bundle.encoded.rows, bundle.encoded.cols)
    return Bundle({"w_kc": w_kc, "w_vc": quantize_e4m3fn(w_vc, m), "w_scale": scale}, encoded)
