"""Step `e4m3_for_target`: the e4m3 format that the GPU reads.

Files always hold e4m3fn. gfx942 computes with e4m3fnuz, where the same byte means half the value, so a tensor in the
wrong one of the two is off by a factor of 2 without an error.
"""

from __future__ import annotations

from weightprep.deferred import torch
from weightprep.formats import Encoding
from weightprep.formats.e4m3 import FNUZ_TARGETS, fn_to_fnuz
from weightprep.transforms.bundle import ANY_ENCODING, Bundle, Form, StepContext
from weightprep.transforms.step import transform

__all__ = ["e4m3_for_target"]


@transform(requires=Form(True, ANY_ENCODING), ensures=lambda given: given)
def e4m3_for_target(bundle: Bundle, context: StepContext) -> Bundle:
    """Turn w_kc and w_vc into e4m3fnuz and double w_scale if the target is gfx942; every other bundle passes.

    :raises CheckpointError: a NaN code, which would read as +-240
    """
    is_fn = bundle.encoded.encoding is Encoding.FP8_TENSOR and bundle["w_kc"].dtype is torch.float8_e4m3fn
    if context.target not in FNUZ_TARGETS or not is_fn:
        return bundle
    w_kc, w_scale = fn_to_fnuz(bundle["w_kc"], bundle["w_scale"], context.name)
    w_vc, _ = fn_to_fnuz(bundle["w_vc"], bundle["w_scale"], context.name)
    return Bundle({"w_kc": w_kc, "w_vc": w_vc, "w_scale": w_scale}, bundle.encoded)
